"""How the papers' figures are measured, on small cases; the full ones are marked slow."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from blackthorn.experiments import (
    byzantine_mnist,
    catastrophes,
    clipping_cost,
    clipping_runs,
    private_fashion,
    private_quadratic,
    synthetic_noise,
    update_tails,
)
from blackthorn.experiments.engine_run import EngineRun, run_alone, run_in_lockstep
from blackthorn.experiments.study import Context, Scale, blocks
from blackthorn.settings.config import RunConfig, make_config
from blackthorn.strategies.reports import RoundReport
from blackthorn.tasks.problem import load_problem
from blackthorn.tasks.shards import ExampleShard


def run_of(config: RunConfig) -> tuple[EngineRun, list[RoundReport]]:
    reports: list[RoundReport] = []
    return EngineRun(config, load_problem(config), [reports.append]), reports


@pytest.mark.parametrize(
    "values",
    [
        {**synthetic_noise.SETTING, "algorithm": "fat-clipping-pi", "clip-norm": 3.0},
        {**synthetic_noise.SETTING, "algorithm": "fat-clipping-pr", "clip-norm": 30.0},
        {"local-steps": 3, "participation": "fixed", "clients-per-round": 4, "model": "mlp-8"},
    ],
)
def test_runs_in_lockstep_are_the_runs_alone(values: dict[str, Any]) -> None:
    configs = [make_config({**values, "num-server-rounds": 4, "seed": s}) for s in (0, 5, 9)]
    together = [run_of(config) for config in configs]
    run_in_lockstep([run for run, _ in together])
    for config, (_, reports) in zip(configs, together, strict=True):
        alone, expected = run_of(config)
        run_alone(alone)
        for report, other in zip(reports, expected[1:], strict=True):  # round 0 is evaluation
            assert report.server_round == other.server_round
            assert report.accepted == other.accepted
            torch.testing.assert_close(report.model, other.model, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(together[0][1][-1].model, together[1][1][-1].model, rtol=1e-2)


def test_blocks_cover_every_seed_once() -> None:
    assert blocks(7, 3) == [(0, 3), (3, 6), (6, 7)]
    assert blocks(2, 25) == [(0, 2)]


def test_a_cauchy_cell_measures_what_the_run_alone_does() -> None:
    cells = synthetic_noise.cauchy_cells(Scale(seeds=2))
    assert [cell.label for cell in cells] == [(method, 0) for method in synthetic_noise.METHODS]
    (cell,) = [cell for cell in cells if cell.label[0] == "PI 3"]
    found = cell.work({**cell.settings, "num-server-rounds": 22}, Context())["norms"]
    # The run itself, from x = (1, ..., 1) in ten dimensions on.
    values = {**synthetic_noise.SETTING, **synthetic_noise.METHODS["PI 3"]}
    run, reports = run_of(make_config({**values, "num-server-rounds": 22, "seed": 1}))
    run_alone(run)
    norms = [float(report.model.square().sum()) for report in reports if report.server_round]
    assert found[1] == pytest.approx([10.0, *norms], rel=2e-3)
    tails = synthetic_noise.tails(np.array(found))
    assert tails[1] == pytest.approx(np.mean(norms[-20:]), rel=2e-3)


def test_the_tail_index_of_stable_vectors_is_their_alpha() -> None:
    settings = {"samples": 50_000, "dimension": 10, "block-size": 10, "seed": 0}
    found = {a: update_tails.law({**settings, "alpha": a}, Context()) for a in (1.0, 2.0)}
    assert found[1.0]["vectors"] == pytest.approx(1.0, abs=0.05)
    assert found[2.0]["vectors"] == pytest.approx(2.0, abs=0.05)
    # Norms of Gaussian vectors are nearly alike: their sums grow as their number.
    assert found[2.0]["norms"] == pytest.approx(1.0, abs=0.03)


def test_norms_of_updates_look_light_and_vectors_do_not() -> None:
    settings = {**update_tails.SETTING, "task": "digits", "classes-per-client": 10}
    settings |= {"num-clients": 40, "local-steps": 2, "num-server-rounds": 3, "seed": 0}
    found = update_tails.updates(settings, Context())
    assert found["norms"] == pytest.approx(1.0, abs=0.05)
    assert found["vectors"] > 1.4
    assert len(found["last"]) == 40


def test_a_trial_says_when_it_failed() -> None:
    settings = {**catastrophes.SETTING, "algorithm": "gfedavg", "task": "digits", "seed": 0}
    settings |= {"classes-per-client": 10, "num-server-rounds": 6, "local-lr": 0.3}
    found = catastrophes.trial(settings, Context())
    assert len(found["accuracy"]) == 7
    assert len(found["longest"]) == 6
    assert found["failed"] is None
    assert catastrophes.succeeded(found)
    # A rate at which the very first step leaves float32.
    ruined = catastrophes.trial({**settings, "local-lr": 1e30}, Context())
    assert not catastrophes.succeeded(ruined)


# The quadratic of Das et al., beside NumPy.


def local_gradients(w: np.ndarray, seed: int, rate: float, steps: int) -> np.ndarray:
    """u_i of every client: the sum of its gradients A_i A_iᵀ(w − w_i*) along its own steps."""
    task, _, _ = private_quadratic.problem_of(seed)
    updates = []
    for a, b in zip(task.a, task.b, strict=True):
        rows, targets = a.numpy(), b.numpy()
        hessian, offset = rows.T @ rows / len(rows), rows.T @ targets / len(rows)
        x, total = w.copy(), np.zeros_like(w)
        for _ in range(steps):
            gradient = hessian @ x - offset
            total += gradient
            x -= rate * gradient
        updates.append(total)
    return np.array(updates)


def test_the_quadratic_s_minimum_has_no_gradient_and_its_curvature_is_the_paper_s() -> None:
    task, offset, minimum = private_quadratic.problem_of(3)
    gradients = [a.T @ (a @ minimum - b) for a, b in zip(task.a, task.b, strict=True)]
    gradient = torch.stack(gradients).sum(dim=0)
    assert float(gradient.abs().max()) < 1e-9
    assert 0 <= float(offset.min()) < float(offset.max()) <= 1
    # E tr(A_i A_iᵀ) = 200 · 20 / 20² = 10; the rows are √20 times A_i's columns, their mean 1/20.
    traces = [float(a.square().sum()) / 20 for a in task.a]
    assert np.mean(traces) == pytest.approx(10, rel=0.02)


@pytest.mark.parametrize("method", list(private_quadratic.PRIVATE))
def test_the_quadratic_s_first_rounds_are_those_by_hand(method: str) -> None:
    bound, rate = 100.0, 0.001
    settings: Mapping[str, Any] = {
        **private_quadratic.SETTING,
        "algorithm": private_quadratic.PRIVATE[method],
        "clip-norm": bound,
        "start": "I1",
        "local-lr": rate,
        "seed": 0,
        "num-server-rounds": 5,
    }
    found = private_quadratic.trajectory(settings, Context())
    assert found["round"] == [0, 5]
    task, offset, minimum = private_quadratic.problem_of(0)
    start = (minimum + offset).numpy()
    rows = [a.numpy() @ offset.numpy() for a in task.a]
    # f(w) − f(w*) = ½ (w − w*)ᵀ H (w − w*), H the mean of the A_i A_iᵀ.
    expected = np.mean([0.5 * np.mean(own**2) for own in rows])
    assert found["suboptimality"][0] == pytest.approx(expected, rel=1e-5)
    assert found["along"][0] == pytest.approx(float(offset.norm()), rel=1e-5)
    assert found["across"][0] == pytest.approx(0, abs=1e-5)
    assert found["ratio"][0] is None
    # The signal hardly changes in five rounds; the noise has the norm zC√d/m, to √(1/2d) = 5 %.
    updates = local_gradients(start, 0, rate, 20)
    norms = np.linalg.norm(updates, axis=1, keepdims=True)
    bounded = updates * (bound / norms if method == "normalising" else np.minimum(1, bound / norms))
    noise = 23.24 * bound * math.sqrt(200) / 100
    signal = np.linalg.norm(bounded.mean(axis=0))
    assert found["ratio"][1] == pytest.approx(signal / noise, rel=0.3)


def test_both_methods_of_the_quadratic_get_the_same_noise() -> None:
    # Bounded so tightly that both methods do the same: nothing but noise could differ.
    ends = []
    for method in private_quadratic.PRIVATE.values():
        settings = {**private_quadratic.SETTING, "algorithm": method, "clip-norm": 0.01}
        settings |= {"start": "I2", "local-lr": 0.001, "seed": 1, "num-server-rounds": 5}
        ends.append(private_quadratic.trajectory(settings, Context()))
    assert ends[0]["along"] == pytest.approx(ends[1]["along"], rel=1e-9)
    assert ends[0]["ratio"][1] == pytest.approx(ends[1]["ratio"][1], rel=1e-6)


def test_a_cell_of_table_1_gives_the_last_accuracies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BLACKTHORN_DATA_DIR", raising=False)
    cells = private_fashion.cells(Scale(quick=True))
    assert len(cells) == 5
    for cell in (cells[0], cells[1]):
        found = cell.work({**cell.settings, "num-server-rounds": 6}, Context())
        assert len(found["last"]) == 5
        assert all(0 < accuracy <= 100 for accuracy in found["last"])


def test_the_threshold_is_half_the_mean_norm_of_fedavg() -> None:
    values = {**clipping_cost.SETTING, "task": "digits", **clipping_cost.DIGITS, "seed": 0}
    values |= {"num-server-rounds": 3, "local-steps": 2, "batch-size": 8}
    fedavg, ce, private = clipping_runs.cells((), values, (5.0,), 1.0)
    before = fedavg.work(fedavg.settings, Context())
    run, reports = run_of(make_config(dict(fedavg.settings)))
    run_alone(run)
    norms = [
        0.1 * float(row.double().norm())
        for report in reports
        if report.updates is not None
        for row in report.updates
    ]
    assert before["mean norm"] == pytest.approx(np.mean(norms), rel=1e-5)
    assert before["norms"] == pytest.approx(norms[-10:], abs=2e-5)
    assert all(0 <= angle <= 180 for angle in before["angles"])
    for cell in (ce, private):
        assert cell.after == fedavg.label
        found = cell.work(cell.settings, Context(before=before))
        assert found["c"] == pytest.approx(before["mean norm"] / 2)
        assert len(found["accuracy"]) == 4


def test_an_attacked_run_counts_whom_rage_removes() -> None:
    settings = {**byzantine_mnist.SETTING, **byzantine_mnist.QUICK, **byzantine_mnist.DIGITS}
    settings |= {"task": "digits", "aggregator": "rage", "seed": 0, "num-server-rounds": 3}
    settings |= {"attack": "reverse-scaled-average", "num-byzantine": 5}
    found = byzantine_mnist.attacked(settings, Context())
    assert found["corrupt removed"] == [100.0] * 3
    assert all(0 < share < 20 for share in found["honest removed"])
    assert len(found["loss"]) == len(found["accuracy"]) == len(found["seconds"]) == 4
    unfiltered = byzantine_mnist.attacked({**settings, "aggregator": "mean"}, Context())
    assert unfiltered["corrupt removed"] == [0.0] * 3
    assert unfiltered["loss"][-1] > found["loss"][-1]


def test_a_draw_moves_the_initial_weights_alone() -> None:
    """Draw 1 begins with another model; clients, batches and attackers are the seed's."""
    settings = {**byzantine_mnist.SETTING, **byzantine_mnist.QUICK, **byzantine_mnist.DIGITS}
    settings |= {"task": "digits", "seed": 0, "num-server-rounds": 1, "aggregator": "mean"}
    seen: list[tuple[EngineRun, RoundReport]] = []

    def noting(run: EngineRun) -> None:
        reports: list[RoundReport] = []
        run_alone(EngineRun(run.config, run.problem, [*run.observers, reports.append]))
        seen.append((run, reports[0]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(byzantine_mnist, "run_alone", noting)
        for draw in (0, 1, 1):
            byzantine_mnist.attacked({**settings, "draw": draw}, Context())
    (first, start), (second, other), (_, again) = seen
    product = load_problem(make_config(settings)).model
    torch.testing.assert_close(start.model, product.flatten(dict(product.module.state_dict())))
    assert torch.equal(other.model, again.model)
    assert not torch.allclose(start.model, other.model, atol=0.01)
    for one, two in zip(first.problem.shards(), second.problem.shards(), strict=True):
        assert isinstance(one, ExampleShard) and isinstance(two, ExampleShard)
        assert np.array_equal(one.all_rows, two.all_rows)
    assert first.config == second.config


def test_a_draw_s_runs_are_numbered_and_one_goes_on_to_epoch_40(data_dir: str) -> None:
    cells = byzantine_mnist.cells(Scale(seeds=2, draws=2, data_dir=data_dir), ("A.6",))
    own = [cell for cell in cells if cell.label[:2] == ("A.6", "median")]
    assert [cell.label[2] for cell in own] == [0, 1, 2, 3]
    shown = [(c.settings["seed"], c.settings["draw"], c.settings["num-server-rounds"]) for c in own]
    assert shown == [(0, 0, 45), (0, 1, 25), (1, 0, 45), (1, 1, 25)]
    assert 45 * byzantine_mnist.epochs_a_round(Scale(data_dir=data_dir)) == pytest.approx(40.32)
