"""The audit's arithmetic against closed forms, and the audit against mechanisms that cheat."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from mutants import mutated
from scipy import stats

from blackthorn.client_app import disclosure, dp_sgd
from blackthorn.launch.commands.audit import audit_report
from blackthorn.settings.config import ConfigError, RunConfig, make_config
from blackthorn.simulation import noise_audit, privacy_audit, sample_audit
from blackthorn.simulation.auditing import (
    Finding,
    clopper_pearson,
    gaussian_pair_epsilon,
    lower_bound,
    one_shot_epsilon,
)
from blackthorn.simulation.privacy_audit import AuditResult, audit
from blackthorn.strategies import (
    DPFedAvg,
    PrivacyPlan,
    Release,
    RoundContext,
    StrategyOptions,
    spent,
)
from blackthorn.strategies.private_averaging import PrivateAveraging

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


def binomial_limit(count: int, trials: int, tail: float, *, above: bool) -> float:
    """The p at which `count` or more successes (or fewer, `above`) have the probability `tail`."""
    counts = range(count + 1) if above else range(count, trials + 1)
    low, high = 0.0, 1.0
    for _ in range(60):
        p = (low + high) / 2
        mass = sum(math.comb(trials, n) * p**n * (1 - p) ** (trials - n) for n in counts)
        low, high = (p, high) if (mass > tail) == above else (low, p)
    return low


def test_the_first_halves_choose_the_event_and_the_second_ones_count_it() -> None:
    """The first halves prefer "above", of which the second ones saw 40 and 12 of 50
    (and would rather have counted "below")."""
    ones = [np.repeat([1.0, 0.0], [n, 50 - n]) for n in (48, 40, 0, 12)]
    present, absent = np.concatenate(ones[:2]), np.concatenate(ones[2:])
    for delta, confidence in ((0.05, 0.95), (1e-5, 0.99)):
        tail = (1 - confidence) / 2
        likely = binomial_limit(40, 50, tail, above=False)
        unlikely = binomial_limit(12, 50, tail, above=True)
        found = lower_bound(present, absent, delta, confidence)
        assert found == pytest.approx(math.log((likely - delta) / unlikely), rel=1e-9)


# Mechanisms.

# The noise is the operating system's: a test of a right mechanism may be wrong once in a million.
SURE = 1 - 1e-6
# Two lower bounds, each with 95 %.
EACH_95 = 0.9

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


class Unbounded(DPFedAvg):
    """Counts on the clients' having clipped."""

    def bound(self, updates: torch.Tensor, context: RoundContext) -> torch.Tensor:
        del context
        return updates


class HalfTheNoise(DPFedAvg):
    """Says z and adds z/2."""

    def _noise(self, share: float, context: RoundContext) -> torch.Tensor:
        return super()._noise(share, context) / 2


def weighs_by_examples(plan: PrivacyPlan, options: StrategyOptions) -> PrivateAveraging:
    """Claims uniform weights, and lets the clients' counts decide."""
    options["weighting"] = "num-examples"
    return DPFedAvg(replace(plan, claim=False), **options)


def leaves_updates_as_they_are(plan: PrivacyPlan, options: StrategyOptions) -> PrivateAveraging:
    return Unbounded(replace(plan, claim=False), **options)


def halves_the_noise(plan: PrivacyPlan, options: StrategyOptions) -> PrivateAveraging:
    return HalfTheNoise(replace(plan, claim=False), **options)


def test_a_recipe_without_a_claim_is_refused() -> None:
    for options in (
        {"algorithm": "gfedavg", "clip_norm": 0.0},
        {"noise_multiplier": 1.0, "claim_privacy": False},
        {"noise_multiplier": 1.0, "insecure_seeded_noise": True},
    ):
        with pytest.raises(ConfigError, match="nothing to audit"):
            audit(recipe(**options))


def test_the_recipe_s_delta_is_measured_by_its_own_clients() -> None:
    """1/8 is allowed with eight clients; the canaries' places are the audit's."""
    result = audit(
        recipe(noise_multiplier=3.0, num_server_rounds=1, delta=1 / 8), canaries=12, runs=2
    )
    assert result.findings[0].delta == 1 / 8


@pytest.mark.parametrize("runs", [-1, 0, 1])
def test_too_few_runs_are_refused(runs: int) -> None:
    with pytest.raises(ValueError, match=f"runs = {runs} is not allowed: 2 or more"):
        audit(recipe(noise_multiplier=3.0, num_server_rounds=2), canaries=12, runs=runs)


def test_an_audit_s_report_says_what_was_claimed_found_and_refuted() -> None:
    config = recipe(noise_multiplier=3.0, num_server_rounds=2, examples_per_client=20, **SAMPLE)
    result = audit(config, canaries=12, runs=2, confidence=SURE)
    text = audit_report(result)
    assert text.count("claimed epsilon") == 3
    assert "One run of 2 rounds with 12 canary clients, delta = 1e-05:" in text
    assert "2 rounds of a client with one example more and 2 without, delta = 0.05:" in text
    assert not result.refuted
    assert "The claim is not refuted" in text
    broken = replace(result.findings[1], found=9.9)
    assert "REFUTED" in audit_report(AuditResult([result.findings[0], broken]))


def test_a_refutation_says_how_often_a_true_claim_is_refuted() -> None:
    text = audit_report(AuditResult([Finding("an attack", 0.05, 1.0, 2.0)]))
    assert "REFUTED (as a true one is with probability 5 % at most" in text


@pytest.mark.parametrize(
    ("options", "findings"),
    [
        ({}, 2),
        ({"noise_location": "client"}, 5),
        ({"local_dp_sgd": True}, 3),
        ({"noise_location": "client", "local_dp_sgd": True}, 6),
    ],
)
def test_the_attacks_of_an_audit_share_one_error(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], findings: int
) -> None:
    """A mechanism that keeps all its claims is refuted once in twenty audits at most."""
    errors: list[float] = []

    def bound(name: str, module: ModuleType, place: int) -> None:
        real = getattr(module, name)

        def noting(*arguments: Any) -> Any:
            errors.append(1 - arguments[place])
            return real(*arguments)

        monkeypatch.setattr(module, name, noting)

    for module in (privacy_audit, noise_audit, sample_audit):
        bound("lower_bound", module, 3)
    bound("one_shot_epsilon", privacy_audit, 3)
    bound("_least_deviation", noise_audit, 2)
    values = {"noise_multiplier": 20.0, "num_server_rounds": 2, **SAMPLE, "local_dp_sgd": False}
    few = {"examples_per_client": 20}
    result = audit(recipe(**{**values, **few, **options}), canaries=12, runs=4)
    assert len(result.findings) == findings
    assert 0.04 < sum(errors) < 0.0501


def test_the_figures_of_an_audit_are_rounded_to_the_side_that_is_safe() -> None:
    told = audit_report(AuditResult([Finding("an attack", 0.05, 1.07031, 0.99999, 1.00001)]))
    shown = re.findall(r"epsilon +(\S+)", told)
    assert shown == ["1.071", "1", "0.9999"]


# The claim of single examples.

SAMPLE: dict[str, Any] = {
    "local_dp_sgd": True,
    "dp_sgd_noise_multiplier": 4.0,
    "dp_sgd_sample_rate": 0.5,
    "batch_size": 8,
}


def sample_recipe(**options: Any) -> RunConfig:
    return recipe(**{"algorithm": "gfedavg", "clip_norm": 0.0, **SAMPLE, **options})


def test_the_attack_leaves_a_right_dp_sgd_alone() -> None:
    result = audit(sample_recipe(local_steps=3), runs=60, confidence=SURE)
    (finding,) = result.findings
    spec = spent([(Release(4.0, sample_rate=0.5), 3)], 0.05)
    assert finding.claimed == spec.epsilon
    assert not result.refuted


def test_the_attack_comes_near_the_claim() -> None:
    """z = 1 without sampling, one step: above nothing, and never above what is exact.

    Of 3000 runs the bound is 5 of its deviations away from either; how many examples a batch has is
    all the same, and two are quick."""
    config = sample_recipe(dp_sgd_noise_multiplier=1.0, dp_sgd_sample_rate=1.0, batch_size=2)
    (finding,) = audit(config, runs=3000, confidence=SURE).findings
    exact = spent([(Release(1.0), 1)], 0.05, "pld").epsilon
    assert 0.1 * exact < finding.found < exact


FULL = {"dp_sgd_sample_rate": 1.0}


@pytest.mark.parametrize(
    ("module", "old", "new", "options"),
    [
        (disclosure, 'if claim == "none":', 'if claim != "client":', {}),
        (disclosure, "metrics[figure] = 1", "pass", {}),
        (dp_sgd, "summed / spec.batch_size", "summed / max(1, len(drawn))", FULL),
        (dp_sgd, "(len(w),), deviation", "(len(w),), deviation * 8 / len(examples)", {}),
        (dp_sgd, "deviation = spec.noise", "deviation = 0.02 * spec.noise", FULL),
        (dp_sgd, "clip(gradient.double(), spec.clip_norm)", "10 * gradient.double()", FULL),
        (
            dp_sgd,
            "< spec.sample_rate",
            "< 1",
            {"dp_sgd_noise_multiplier": 0.5, "dp_sgd_sample_rate": 0.01},
        ),
    ],
)
def test_the_attack_finds_the_cheat(
    module: ModuleType, old: str, new: str, options: dict[str, Any]
) -> None:
    values = {"dp_sgd_noise_multiplier": 20.0, **options}
    with mutated(module, (old, new)):
        assert audit(sample_recipe(**values), runs=200).refuted


TURNS = {"participation": "rotating", "bands": 4}
LONG = {"model": "mlp-64", "noise_multiplier": 5.0, "num_server_rounds": 20, "local_steps": 1}


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"noise_location": "client"}, TURNS])
def test_one_shot_leaves_a_right_mechanism_alone(options: dict[str, Any]) -> None:
    """z = 5, T = 20 without sampling: RDP claims more than the exact ε of one Gaussian."""
    result = audit(recipe(**LONG, **options), canaries=150, runs=2, confidence=SURE)
    one_shot = result.findings[0]
    assert one_shot.found < one_shot.claimed
    assert one_shot.estimate is not None
    assert one_shot.estimate > 0.5 * one_shot.claimed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "canaries"),
    [(halves_the_noise, 150), (weighs_by_examples, 10), (leaves_updates_as_they_are, 10)],
)
def test_one_shot_finds_the_cheat(
    build: Callable[[PrivacyPlan, StrategyOptions], PrivateAveraging], canaries: int
) -> None:
    options = {**LONG, "num_clients": 60 if canaries == 10 else 8}
    result = audit(recipe(**options), canaries=canaries, runs=2, build=build, confidence=EACH_95)
    assert result.findings[0].refutes
    assert result.refuted


def test_the_lower_bound_finds_a_server_that_does_not_bound_what_comes() -> None:
    """Ten times C against noise of 2 C: five deviations apart, of which the claim is 1/2."""
    config = recipe(noise_multiplier=2.0, num_server_rounds=1)
    cheat = leaves_updates_as_they_are
    # With 40 runs it is missed once in fifty times, with 80 not once in 2000.
    assert audit(config, canaries=10, runs=80, build=cheat, confidence=EACH_95).findings[1].refutes
    assert not audit(config, canaries=10, runs=40, confidence=SURE).findings[1].refutes


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, TURNS])
def test_the_lower_bound_leaves_a_right_mechanism_alone(options: dict[str, Any]) -> None:
    result = audit(recipe(noise_multiplier=2.0, **options), canaries=10, runs=300, confidence=SURE)
    assert not result.findings[1].refutes


# Where half of the noise shows most: a large claim without RDP's slack, and few others, whose sum,
# of length 2 at most, is next to nothing along one of 650 directions.
CLEAR: dict[str, Any] = {"noise_multiplier": 0.8, "num_clients": 2, "accountant": "pld"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "runs", "options"),
    [(halves_the_noise, 1500, CLEAR), (weighs_by_examples, 100, {"noise_multiplier": 2.0})],
)
def test_the_lower_bound_finds_the_cheat(
    build: Callable[[PrivacyPlan, StrategyOptions], PrivateAveraging],
    runs: int,
    options: dict[str, Any],
) -> None:
    """Half of the noise is missed less than once in 1000 times: of 4000 draws of its two laws none
    was, and the margin was 1.5 with a deviation of 0.32."""
    result = audit(
        recipe(**options),
        canaries=10,
        runs=runs,
        short_delta=0.1,
        build=build,
        confidence=EACH_95,
    )
    assert result.findings[1].refutes
    assert result.refuted


@pytest.mark.slow
def test_sampling_and_normalising_are_audited_too(repository: Path) -> None:
    assert (repository / "recipes" / "dp-digits.toml").exists()
    options = {"participation": "poisson", "sample_rate": 0.5, "noise_multiplier": 2.0}
    result = audit(
        recipe(algorithm="dp-normfedavg", num_server_rounds=10, **options), canaries=50, runs=50
    )
    assert not result.refuted
