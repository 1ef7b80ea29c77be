"""The audit's arithmetic against closed forms, and the audit against mechanisms that cheat."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from launch.audit import audit_report
from server_app.config import ConfigError, RunConfig, make_config
from simulation.privacy_audit import audit
from strategies import DPFedAvg, FrameOptions, PrivacyPlan, Release, RoundReport, spent
from strategies.auditing import (
    clopper_pearson,
    gaussian_pair_epsilon,
    lower_bound,
    one_shot_epsilon,
)
from strategies.private_averaging import PrivateAveraging

# Arithmetic.


@pytest.mark.parametrize("z", [0.7, 2.0, 5.0])
@pytest.mark.parametrize("delta", [1e-5, 0.05])
def test_two_gaussians_of_one_spread_are_the_gaussian_mechanism(z: float, delta: float) -> None:
    exact = spent([(Release(z), 1)], delta, "pld").epsilon
    assert gaussian_pair_epsilon(0.3, 0.3 / z, 0.3, delta) == pytest.approx(exact, abs=0.005)


def test_equal_laws_cost_nothing_and_wider_ones_something() -> None:
    assert gaussian_pair_epsilon(1.0, 0.0, 1.0, 1e-5) == 0
    # sup of the densities' ratio at 0 is 2: with δ = 0 exactly ln 2 one way, without a bound the
    # other.
    assert gaussian_pair_epsilon(1.0, 0.0, 2.0, 1e-5) > math.log(2)


def test_one_shot_finds_the_epsilon_of_gaussian_cosines() -> None:
    d, z = 400, 2.0
    generator = np.random.default_rng(3)
    cosines = (1 / z + generator.standard_normal(20_000)) / math.sqrt(d)
    found = one_shot_epsilon(cosines, d, 1e-5)
    exact = spent([(Release(z), 1)], 1e-5, "pld").epsilon
    assert found.epsilon == pytest.approx(exact, rel=0.1)
    assert found.epsilon_low < exact
    with pytest.raises(ValueError, match="9 canaries"):
        one_shot_epsilon(cosines[:9], d, 1e-5)


@pytest.mark.parametrize(("successes", "trials"), [(0, 10), (3, 10), (10, 10), (57, 200)])
def test_clopper_pearson_inverts_the_binomial_tests(successes: int, trials: int) -> None:
    low, high = clopper_pearson(successes, trials, 0.025)
    if successes:
        assert stats.binom.sf(successes - 1, trials, low) == pytest.approx(0.025)
    else:
        assert low == 0
    if successes < trials:
        assert stats.binom.cdf(successes, trials, high) == pytest.approx(0.025)
    else:
        assert high == 1


def test_the_lower_bound_is_below_the_truth_and_not_far() -> None:
    z, n, delta = 1.0, 4000, 0.05
    exact = spent([(Release(z), 1)], delta, "pld").epsilon
    generator = np.random.default_rng(8)
    bounds = [
        lower_bound(1 / z + generator.standard_normal(n), generator.standard_normal(n), delta)
        for _ in range(12)
    ]
    assert sum(bound > exact for bound in bounds) <= 2
    assert np.median(bounds) > 0.6 * exact
    same = lower_bound(generator.standard_normal(n), generator.standard_normal(n), delta)
    assert same == 0


# Mechanisms.

# The noise is the operating system's: a test of a right mechanism may be wrong once in a million.
SURE = 1 - 1e-6

RECIPE: dict[str, Any] = {
    "algorithm": "dp-fedavg",
    "task": "digits",
    "model": "logistic",
    "num-clients": 8,
    "participation": "full",
    "local-steps": 1,
    "batch-size": 0,
    "local-lr": 0.1,
    "clip-norm": 1.0,
    "delta": 1e-5,
}


def recipe(**options: Any) -> RunConfig:
    return make_config({**RECIPE, **{k.replace("_", "-"): v for k, v in options.items()}})


class HalfTheNoise(DPFedAvg):
    """Says z and adds z/2."""

    def _noise(self, share: float, report: RoundReport) -> torch.Tensor:
        return super()._noise(share, report) / 2


def weighs_by_examples(plan: PrivacyPlan, frame: FrameOptions) -> PrivateAveraging:
    """Claims uniform weights, and lets the clients' counts decide."""
    frame["weighting"] = "num-examples"
    return DPFedAvg(replace(plan, claim=False), **frame)


def halves_the_noise(plan: PrivacyPlan, frame: FrameOptions) -> PrivateAveraging:
    return HalfTheNoise(plan, **frame)


def test_a_recipe_without_a_claim_is_refused() -> None:
    for options in (
        {"algorithm": "gfedavg", "clip_norm": 0.0},
        {"noise_multiplier": 1.0, "claim_privacy": False},
        {"noise_multiplier": 1.0, "insecure_seeded_noise": True},
        {"noise_multiplier": 1.0, "noise_location": "client", "aggregator": "rage"},
    ):
        with pytest.raises(ConfigError, match="nothing to audit"):
            audit(recipe(**options))


@pytest.mark.parametrize("runs", [-1, 0, 1])
def test_too_few_runs_are_refused(runs: int) -> None:
    with pytest.raises(ValueError, match=f"runs = {runs} is not allowed: 2 or more"):
        audit(recipe(noise_multiplier=3.0, num_server_rounds=2), canaries=12, runs=runs)


def test_an_audit_in_words() -> None:
    config = recipe(noise_multiplier=3.0, num_server_rounds=2)
    result = audit(config, canaries=12, runs=2, confidence=SURE)
    text = audit_report(config, result, 12, 2)
    assert "claimed epsilon" in text
    assert not result.refuted
    assert "The claim is not refuted" in text
    assert "REFUTED" in audit_report(config, replace(result, short_bound=9.9), 12, 2)


LONG = {"model": "mlp-64", "noise_multiplier": 5.0, "num_server_rounds": 20, "local_steps": 1}


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"noise_location": "client"}])
def test_one_shot_leaves_a_right_mechanism_alone(options: dict[str, Any]) -> None:
    """z = 5, T = 20 without sampling: RDP claims more than the exact ε of one Gaussian."""
    result = audit(recipe(**LONG, **options), canaries=150, runs=2, confidence=SURE)
    assert result.one_shot.epsilon_low < result.claimed
    assert result.one_shot.epsilon > 0.5 * result.claimed


@pytest.mark.slow
@pytest.mark.parametrize(("build", "canaries"), [(halves_the_noise, 150), (weighs_by_examples, 10)])
def test_one_shot_finds_the_cheat(
    build: Callable[[PrivacyPlan, FrameOptions], PrivateAveraging], canaries: int
) -> None:
    options = {**LONG, "num_clients": 60 if canaries == 10 else 8}
    result = audit(recipe(**options), canaries=canaries, runs=2, build=build)
    assert result.one_shot.epsilon_low > result.claimed
    assert result.refuted


@pytest.mark.slow
def test_the_lower_bound_leaves_a_right_mechanism_alone() -> None:
    result = audit(recipe(noise_multiplier=2.0), canaries=10, runs=300, confidence=SURE)
    assert result.short_bound < result.short_claimed


@pytest.mark.slow
@pytest.mark.parametrize(("build", "runs"), [(halves_the_noise, 2000), (weighs_by_examples, 100)])
def test_the_lower_bound_finds_the_cheat(
    build: Callable[[PrivacyPlan, FrameOptions], PrivateAveraging], runs: int
) -> None:
    result = audit(recipe(noise_multiplier=2.0), canaries=10, runs=runs, build=build)
    assert result.short_bound > result.short_claimed
    assert result.refuted


@pytest.mark.slow
def test_sampling_and_normalising_are_audited_too(repository: Path) -> None:
    assert (repository / "recipes" / "dp-digits.toml").exists()
    options = {"participation": "poisson", "sample_rate": 0.5, "noise_multiplier": 2.0}
    result = audit(
        recipe(algorithm="dp-normfedavg", num_server_rounds=10, **options), canaries=50, runs=50
    )
    assert not result.refuted
