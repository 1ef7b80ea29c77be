"""What one client's data move in a round with Byzantine clients, under a claim: its own message."""

from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord

from blackthorn import attacks
from blackthorn.server_app.build import build_strategy
from blackthorn.server_app.run import with_simulated_attack
from blackthorn.settings.config import make_config
from blackthorn.settings.privacy_checks import has_central_claim
from blackthorn.simulation.engine import EngineGrid
from blackthorn.strategies import RoundReport
from blackthorn.strategies.bounding import clip
from blackthorn.tasks.datasets import Examples
from blackthorn.tasks.problem import Problem, load_problem
from blackthorn.tasks.shards import ExampleShard, Shard

CLIENTS, BYZANTINE, C = 6, 3, 0.05
DP: dict[str, Any] = {
    "algorithm": "dp-fedavg",
    "clip-norm": C,
    "noise-multiplier": 1.0,
    "num-clients": CLIENTS,
    "neighbours": "replace-one",
    "delta": 1e-2,
    "task": "digits",
    "model": "logistic",
    "num-byzantine": BYZANTINE,
    "collusion": False,
}


def bounded_sum(values: dict[str, Any], problem: Problem, shards: list[Shard]) -> np.ndarray:
    """Σ clip(u_i, C) of a round, without its noise, float64 [d]."""
    config, sums = make_config(values), []
    assert has_central_claim(config)

    def observe(report: RoundReport) -> None:
        if report.server_round == 0:
            return
        assert report.updates is not None
        sums.append(clip(report.updates, C).double().sum(dim=0).numpy())

    grid = with_simulated_attack(config, EngineGrid(config, problem, shards))
    build_strategy(config, [observe]).start(
        grid,
        ArrayRecord(problem.state()),
        num_rounds=1,
        train_config=ConfigRecord({"seed": 0}),
        evaluate_fn=lambda _, __: None,
    )
    return sums[0]


@pytest.mark.parametrize("byzantine_set", ["fixed", "redrawn"])
@pytest.mark.parametrize("attack", attacks.names("vector"))
def test_one_client_replaced_moves_the_sum_by_2_c_at_most(attack: str, byzantine_set: str) -> None:
    values = {**DP, "attack": attack, "byzantine-set": byzantine_set}
    problem = load_problem(make_config(values))
    shards = list(problem.shards())
    other = ExampleShard(Examples(torch.ones(20, 1, 8, 8) * 5, torch.zeros(20, dtype=torch.int64)))
    base = bounded_sum(values, problem, shards)
    for i in range(CLIENTS):
        neighbour = bounded_sum(values, problem, [*shards[:i], other, *shards[i + 1 :]])
        assert np.linalg.norm(neighbour - base) <= 2 * C * (1 + 1e-5)
