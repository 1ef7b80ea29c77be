"""The audit of noise that the clients add: right clients pass, and who falls short is found."""

from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from mutants import mutated
from test_audit import SURE, recipe

from blackthorn.client_app import private_update
from blackthorn.recording.privacy import privacy_plan
from blackthorn.settings.config import RunConfig
from blackthorn.simulation.auditing import Finding
from blackthorn.simulation.engine import EngineGrid
from blackthorn.simulation.noise_audit import attack_local_claim, most_different, update_sent
from blackthorn.simulation.privacy_audit import Build, audit
from blackthorn.strategies import (
    DPFedAvg,
    PrivacyPlan,
    Release,
    RoundContext,
    StrategyOptions,
    bounded_update,
    spent,
)
from blackthorn.strategies.private_averaging import PrivateAveraging
from blackthorn.tasks.problem import load_problem

CENTRAL, ALONE = 1, 2  # the findings after the one-shot's


def client_recipe(**options: Any) -> RunConfig:
    return recipe(**{"noise_multiplier": 2.0, "noise_location": "client", **options})


def by_size(config: RunConfig, runs: int, confidence: float = 0.95) -> Finding:
    """The finding of the size of the noise, alone."""
    problem, plan = load_problem(config), privacy_plan(config)
    _, size = attack_local_claim(config, problem, plan, runs, 0.05, confidence)
    return size


def no_top_up(plan: PrivacyPlan, options: StrategyOptions) -> PrivateAveraging:
    """Says that the server adds what is missing, and does not."""
    return DPFedAvg(replace(plan, top_up=False, claim=False), **options)


class HalfTopUp(DPFedAvg):
    """Adds half of the variance that is missing."""

    def _noise(self, share: float, context: RoundContext) -> torch.Tensor:
        return super()._noise(share / 2, context)


@pytest.mark.parametrize(
    "options",
    [
        {"num_server_rounds": 3},
        {"algorithm": "dp-normfedavg", "noise_multiplier": 9.0},
        {"participation": "poisson", "sample_rate": 0.5},
        {"aggregator": "rage"},
        {"task": "bayes-linear", "model": "auto", "local_lr": 0.001},
        # By the way of a trainer, which the message has to name w's entries.
        {"local_optimizer": "adam", "num_server_rounds": 3},
    ],
)
def test_right_clients_are_left_alone(options: dict[str, Any]) -> None:
    result = audit(client_recipe(**options), canaries=10, runs=20, confidence=SURE)
    assert len(result.findings) == (2 if "aggregator" in options else 5)
    assert not result.refuted


def test_the_size_of_the_noise_is_nearly_what_is_claimed() -> None:
    """One round: ε of a Gaussian of the exact deviation, found from below and within a tenth."""
    size = by_size(client_recipe(num_server_rounds=1), runs=100, confidence=SURE)
    s = 8
    exact = spent([(Release(2.0 / (2 * s**0.5)), 1)], 1e-5, "pld").epsilon
    assert 0.85 * exact < size.found < exact
    assert exact < size.claimed


def test_a_plan_s_bound_on_delta_is_not_the_audit_s() -> None:
    """More than 1/0.05 clients: the attack's δ = 0.05 is above 1/m, the plan's is not."""
    config = client_recipe(num_clients=24, num_server_rounds=3)
    result = audit(config, canaries=10, runs=2, confidence=SURE)
    assert not result.refuted
    local = result.findings[3]
    assert local.delta == 0.05
    exact = spent([(Release(2.0 / (2 * 24**0.5)), 1)], 0.05, "pld").epsilon
    assert exact < local.claimed < 1.5 * exact


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        (bounded_update, "return client_deviation(", "return 1e-9 * client_deviation("),
        (bounded_update, "return client_deviation(", "return 0.7 * client_deviation("),
        # As if its variance were shared among s² clients, and where it is not drawn afresh.
        (bounded_update, "self.bound, shares) * local_lr", "1.0, shares**2) * local_lr"),
        (private_update, "if config.insecure_seeded_noise:", "if True:"),
        # One number for all coordinates: of the right size, and nothing along most directions.
        (
            bounded_update,
            "gaussian_noise(tuple(row.shape), deviation, randomness, torch.float64)",
            "gaussian_noise((1,), deviation, randomness, torch.float64).expand(len(row))",
        ),
        (bounded_update, "update + noise if finite", "update if finite"),
        (bounded_update, "return clip(updates, bound)", "return clip(updates, 5 * bound)"),
    ],
)
def test_the_attack_finds_a_client_that_falls_short(module: ModuleType, old: str, new: str) -> None:
    with mutated(module, (old, new)):
        assert by_size(client_recipe(), runs=20).refutes


def test_noise_that_no_client_adds_shows_in_one_of_the_attacks() -> None:
    """What is released then has two ninths of the variance at most, all of it the server's."""
    with mutated(bounded_update, ("update + noise if finite", "update if finite")):
        result = audit(client_recipe(), canaries=10, runs=120)
    assert any(finding.refutes for finding in result.findings)


def half_top_up(plan: PrivacyPlan, options: StrategyOptions) -> PrivateAveraging:
    """Says that the server adds what is missing, and adds half of it."""
    return HalfTopUp(replace(plan, claim=False), **options)


@pytest.mark.parametrize("build", [no_top_up, half_top_up])
def test_the_attack_finds_noise_without_top_up(build: Build) -> None:
    config = client_recipe(num_clients=1)
    result = audit(config, canaries=10, runs=250, confidence=SURE, build=build)
    assert result.findings[ALONE].refutes
    # Where everybody answers, nothing is missing.
    assert not result.findings[CENTRAL].refutes


def test_the_audit_s_two_data_sets_give_updates_far_apart() -> None:
    """The example under two labels is what a client that may change its data at will can do."""
    config = client_recipe()
    problem, plan = load_problem(config), privacy_plan(config)
    shards = most_different(config, problem, plan)
    silent = config.model_copy(update={"noise_location": "server"})
    one, other = (update_sent(EngineGrid(silent, problem, [shard]), plan) for shard in shards)
    assert float(torch.linalg.vector_norm(one - other)) > 1.3
    assert float(torch.linalg.vector_norm(one)) <= 1 + 1e-4
