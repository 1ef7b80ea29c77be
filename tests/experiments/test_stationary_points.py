"""Where clipped FedAvg ends (Zhang et al., Table 4 and Claim 2.1), through the strategies.

Units: u_i = (w - w_i)/eta_l is in gradient units, Δ_i = w_i - w in parameter units. A threshold c
in one is eta_l times that in the other; each test says which it means.
"""

from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord
from scipy.optimize import brentq

from blackthorn.server_app.build import build_strategy
from blackthorn.server_app.run import prepare
from blackthorn.settings.config import ConfigError, make_config
from blackthorn.simulation.engine import EngineGrid
from blackthorn.strategies import CEFedAvg, FatClippingPR, GFedAvg, ModelClipping
from blackthorn.strategies.reports import RoundReport
from blackthorn.tasks.problem import load_problem

INITIAL = pytest.mark.parametrize("initial", [-5.0, 0.6, 5.0])
# Exact minimisation of every f_i is emulated: (1 - 0.05·1)^400 = 1e-9, |1 - 0.05·36|^400 = 0.
TO_THE_END = {"local_steps": 400, "local_lr": 0.05}


def end(initial: float, strategy: type, **values: Any) -> float:
    given = {key.replace("_", "-"): value for key, value in values.items()}
    config = make_config(
        {
            "task": "least-squares",
            "dtype": "float64",
            "num-clients": 3,
            "batch-size": 0,
            "initial-point": initial,
            **given,
        }
    )
    problem = load_problem(config)
    reports: list[RoundReport] = []
    built = build_strategy(config, [reports.append])
    assert type(built) is strategy
    built.start(
        EngineGrid(config, problem),
        ArrayRecord(problem.state()),
        num_rounds=config.num_server_rounds,
        train_config=ConfigRecord({"seed": 0}),
        evaluate_fn=lambda _round, _arrays: None,
    )
    assert not any(report.rejected or report.skipped for report in reports)
    # Stationary: the last rounds did not move it.
    ends = [float(report.model[0]) for report in reports[-2:]]
    assert ends[0] == pytest.approx(ends[1], abs=1e-7)
    return ends[1]


@INITIAL
def test_one_step_without_clipping_ends_at_the_minimum(initial: float) -> None:
    x = end(initial, GFedAvg, local_steps=1, local_lr=0.05, num_server_rounds=40)
    assert x == pytest.approx(0.0, abs=1e-6)


@INITIAL
def test_steps_without_end_and_without_clipping_end_at_13_9(initial: float) -> None:
    x = end(initial, GFedAvg, **TO_THE_END, num_server_rounds=3)
    assert x == pytest.approx(13 / 9, abs=1e-6)  # the mean of 4, 1/2 and -1/6


@INITIAL
@pytest.mark.parametrize(
    ("algorithm", "strategy"), [("ce-fedavg", CEFedAvg), ("fat-clipping-pr", FatClippingPR)]
)
def test_one_step_clipped_in_gradient_units_ends_at_1_2(
    initial: float, algorithm: str, strategy: type
) -> None:
    x = end(
        initial,
        strategy,
        algorithm=algorithm,
        clip_norm=1.0,
        clip_units="gradient",
        local_steps=1,
        local_lr=0.2,
        num_server_rounds=110,
    )
    assert x == pytest.approx(1 / 2, abs=1e-6)


@INITIAL
def test_one_step_at_rate_one_clipped_in_parameter_units_ends_at_1_2(initial: float) -> None:
    # With eta_l = 1 the units agree.
    x = end(
        initial,
        CEFedAvg,
        algorithm="ce-fedavg",
        clip_norm=1.0,
        local_steps=1,
        local_lr=1.0,
        num_server_rounds=60,
    )
    assert x == pytest.approx(1 / 2, abs=1e-6)


@INITIAL
def test_one_short_step_clipped_in_parameter_units_is_not_clipped(initial: float) -> None:
    x = end(
        initial,
        CEFedAvg,
        algorithm="ce-fedavg",
        clip_norm=1.0,
        local_steps=1,
        local_lr=0.02,
        num_server_rounds=150,
    )
    assert x == pytest.approx(0.0, abs=1e-6)


@INITIAL
@pytest.mark.parametrize(
    ("algorithm", "strategy", "threshold"),
    [
        ("ce-fedavg", CEFedAvg, {"clip_norm": 1.0, "clip_units": "parameter"}),
        # The same c = 1, counted in gradients: c / eta_l.
        ("fat-clipping-pr", FatClippingPR, {"clip_norm": 20.0, "clip_units": "gradient"}),
    ],
)
def test_steps_without_end_clipped_end_at_2_3(
    initial: float, algorithm: str, strategy: type, threshold: dict[str, Any]
) -> None:
    x = end(initial, strategy, algorithm=algorithm, **threshold, **TO_THE_END, num_server_rounds=30)
    assert x == pytest.approx(2 / 3, abs=1e-6)


CLAIM = pytest.mark.parametrize(
    ("c", "k", "local_lr", "steps"),
    [(1.0, 4.1, 0.5, 1), (2.0, 5.0, 0.3, 3), (0.7, 9.0, 0.05, 10), (1.0, 6.0, 0.9, 4)],
)


@CLAIM
@INITIAL
def test_by_claim_2_1_clipped_models_end_beside_the_minimum(
    c: float, k: float, local_lr: float, steps: int, initial: float
) -> None:
    x = claim_end(initial, ModelClipping, "model-clipping", c, k, local_lr, steps)
    contraction = (1 - local_lr) ** steps
    assert x == pytest.approx(contraction * c / (3 - 2 * contraction), abs=1e-6)
    assert abs(x - (k - 1) * c / 3) > 0.1 * c


@CLAIM
def test_for_claim_2_1_clipped_differences_end_nearer(
    c: float, k: float, local_lr: float, steps: int
) -> None:
    models = claim_end(0.6, ModelClipping, "model-clipping", c, k, local_lr, steps)
    differences = claim_end(0.6, CEFedAvg, "ce-fedavg", c, k, local_lr, steps)
    targets = np.array([-c / 2, -c / 2, k * c])
    pull = 1 - (1 - local_lr) ** steps

    def drift(x: float) -> float:
        return float(np.clip(pull * (targets - x), -c, c).sum())

    assert differences == pytest.approx(brentq(drift, -c, k * c, xtol=1e-12), abs=1e-6)

    def loss(x: float) -> float:
        return float(((x - targets) ** 2).sum())

    assert loss(differences) < loss(models)


def test_for_claim_2_1_no_clipping_ends_at_the_minimum() -> None:
    x = claim_end(0.6, GFedAvg, "gfedavg", 2.0, 5.0, 0.3, 3)
    assert x == pytest.approx(8 / 3, abs=1e-6)


def claim_end(
    initial: float,
    strategy: type,
    algorithm: str,
    c: float,
    k: float,
    local_lr: float,
    steps: int,
) -> float:
    return end(
        initial,
        strategy,
        problem="claim-2.1",
        problem_c=c,
        problem_k=k,
        algorithm=algorithm,
        clip_norm=0.0 if algorithm == "gfedavg" else c,
        local_lr=local_lr,
        local_steps=steps,
        num_server_rounds=120,
    )


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_analytic_gradient_is_autograd_s(dtype: str) -> None:
    config = make_config({"task": "least-squares", "num-clients": 3, "dtype": dtype})
    model = load_problem(config).model
    kind = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(0)
    params, x = (
        torch.randn(*shape, dtype=kind, generator=generator) for shape in ((4, 1), (4, 5, 1))
    )
    y, weights = (torch.rand(4, 5, dtype=kind, generator=generator) for _ in range(2))
    losses, gradients = model.loss_and_gradient(params, x, y, weights)
    for client in range(4):
        point = params[client].clone().requires_grad_()
        loss = (weights[client] * 0.5 * (x[client] @ point - y[client]) ** 2).sum()
        torch.testing.assert_close(losses[client], loss.detach())
        torch.testing.assert_close(gradients[client], torch.autograd.grad(loss, point)[0])


def test_the_server_s_loss_is_the_mean_over_clients() -> None:
    config = make_config({"task": "least-squares", "num-clients": 3, "dtype": "float64"})
    problem = load_problem(config)
    metrics = problem.task.evaluate(problem.model, torch.tensor([2.0], dtype=torch.float64))
    assert metrics == {"loss": pytest.approx((4 / 2 + 9 / 2 + 169 / 2) / 3), "x-0": 2.0}


def test_the_number_of_clients_is_the_problem_s() -> None:
    with pytest.raises(ConfigError, match="num-clients is 10: problem 'table-4' has 3"):
        prepare(make_config({"task": "least-squares"}))
