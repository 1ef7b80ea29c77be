"""Rules that look at trusted data: what they compute, against whom they hold, what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord

from blackthorn.server_app.build import build_strategy
from blackthorn.server_app.evaluation import server_evaluation
from blackthorn.server_app.run import prepare, with_simulated_attack
from blackthorn.server_app.trusted_data import trusted_examples
from blackthorn.settings.config import ConfigError, RunConfig, make_config
from blackthorn.simulation.engine import EngineGrid
from blackthorn.strategies.aggregation import RoundOfRule, fltrust, validated
from blackthorn.strategies.reports import RoundReport
from blackthorn.tasks.labelled import LabelledTask, evaluate
from blackthorn.tasks.problem import load_problem

SETTING: dict[str, Any] = {
    **{"task": "digits", "partition": "dominant-label", "num-clients": 20, "local-steps": 10},
    **{"batch-size": 16, "local-lr": 0.3, "num-server-rounds": 8, "aggregator": "fltrust"},
    **{"trusted-examples": 100, "model": "mlp-32"},
}


def config_of(**more: Any) -> RunConfig:
    return make_config({**SETTING, **{key.replace("_", "-"): v for key, v in more.items()}})


def run(config: RunConfig) -> list[RoundReport]:
    reports: list[RoundReport] = []
    problem = load_problem(config)
    build_strategy(config, [reports.append]).start(
        with_simulated_attack(config, EngineGrid(config, problem)),
        ArrayRecord(problem.state()),
        num_rounds=config.num_server_rounds,
        evaluate_fn=server_evaluation(problem),
    )
    return [report for report in reports if report.server_round]


def at_round(model: torch.Tensor, server_round: int = 3) -> RoundOfRule:
    return RoundOfRule(server_round, 0.3, model, np.random.default_rng(4))


def test_fltrust_is_its_definition() -> None:
    rng = np.random.default_rng(1)
    rows, anchor = rng.standard_normal((7, 5)), rng.standard_normal(5)
    rows[3] = 0.0
    top, bottom = np.zeros(5), 0.0
    for row in rows:
        length = np.linalg.norm(row)
        cosine = max(0.0, row @ anchor / (length * np.linalg.norm(anchor))) if length else 0.0
        if cosine:
            top += cosine * row / length * np.linalg.norm(anchor)
            bottom += cosine
    found = fltrust(rows, anchor)
    np.testing.assert_allclose(found.vector.numpy(), top / bottom, rtol=1e-12)
    assert not found.survivors[3]
    assert found.survivors.tolist() == [bool(row @ anchor > 0) for row in rows]


def test_where_nobody_goes_the_trusted_way_there_is_no_step() -> None:
    for rows, anchor in (([[-1.0, 0.0], [0.0, 2.0]], [1.0, 0.0]), ([[1.0, 0.0]], [0.0, 0.0])):
        found = fltrust(torch.tensor(rows), torch.tensor(anchor))
        assert found.vector.tolist() == [0.0, 0.0]
        assert not found.survivors.any()


def test_no_update_however_long_moves_fltrust_farther_than_the_trusted_one() -> None:
    rows = torch.tensor([[1e20, 1e20], [1.0, 0.5], [-1e9, 3.0]])
    anchor = torch.tensor([0.6, 0.8])
    assert float(fltrust(rows, anchor).vector.norm()) <= 1.0 + 1e-6


def test_validated_is_the_clipped_mean_of_those_that_do_best() -> None:
    rows = torch.tensor([[3.0, 4.0], [1.0, 0.0], [0.0, 1.0], [9.0, 9.0]])
    found = validated(rows, [0.1, 0.2, float("nan"), 0.9], 2, length=1.0)
    assert found.vector.tolist() == pytest.approx([(0.6 + 1.0) / 2, 0.4])
    assert found.survivors.tolist() == [True, True, False, False]
    with pytest.raises(ValueError, match="validated needs num_corrupt < K"):
        validated(rows, [0.0] * 4, 4, length=1.0)


def test_the_server_trains_as_a_client_does() -> None:
    config = config_of(batch_size=0)
    trusted = trusted_examples(config)
    problem = load_problem(config)
    start = problem.model.flatten(problem.state())
    examples = trusted.examples
    assert len(examples) == 100
    weights = start.clone().requires_grad_()
    for _ in range(config.local_steps):
        outputs = problem.model.outputs(weights, examples.x)
        loss = torch.nn.functional.cross_entropy(outputs, examples.y)
        (gradient,) = torch.autograd.grad(loss, weights)
        weights = (weights.detach() - 0.3 * gradient).requires_grad_()
    expected = (start - weights.detach()) / 0.3
    torch.testing.assert_close(trusted.update(at_round(start)), expected, rtol=1e-3, atol=1e-5)
    losses = trusted.losses(torch.stack([start, weights.detach()]))
    assert losses[1] < losses[0]
    assert float(losses[0]) == evaluate(problem.model, start, examples)["loss"]


def test_the_server_evaluates_on_none_of_its_trusted_examples() -> None:
    plain = load_problem(config_of(trusted_examples=0, aggregator="mean")).task
    task = load_problem(config_of()).task
    assert isinstance(task, LabelledTask) and isinstance(plain, LabelledTask)
    assert task.test is not None and task.trusted is not None and plain.test is not None
    together = torch.cat([task.test.x, task.trusted.x]).flatten(1)
    assert len(task.trusted) == 100
    assert sorted(together.tolist()) == sorted(plain.test.x.flatten(1).tolist())


@pytest.mark.parametrize("rule", ["fltrust", "validated"])
def test_with_trusted_data_nearly_half_may_lie(rule: str) -> None:
    lies = {"num_byzantine": 9, "attack": "reverse-scaled-average", "num_corrupt": 9}
    reports = run(config_of(aggregator=rule, **lies))
    robust = run(config_of(aggregator="median", trusted_examples=0, **lies))
    assert reports[-1].metrics["accuracy"] > robust[-1].metrics["accuracy"] + 0.1
    if rule == "fltrust":  # validated may keep one whose data are further away than the lie
        assert all(set(range(11, 20)) <= set(report.filtered) for report in reports)


def test_trusted_data_may_be_a_file(tmp_path: Path) -> None:
    chosen = trusted_examples(config_of()).examples
    np.savez(tmp_path / "trusted.npz", x=chosen.x.numpy(), y=chosen.y.numpy())
    config = config_of(trusted_data=str(tmp_path / "trusted.npz"), trusted_examples=0)
    found = trusted_examples(config).examples
    assert torch.equal(found.x, chosen.x) and torch.equal(found.y, chosen.y)


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ({"trusted_examples": 0}, "set one of the two"),
        ({"trusted_data": "a.npz"}, "set one of the two"),
        ({"pre_aggregator": "bucketing"}, "pre-aggregator = bucketing: set none"),
        (
            {"algorithm": "fat-clipping-pr", "clip_norm": 1.0},
            "aggregator = fltrust is not allowed with algorithm fat-clipping-pr",
        ),
        (
            {"task": "least-squares"},
            "trusted-examples = 100 is not allowed with task",
        ),
        (
            {"task": "own-project", "aggregator": "mean", "data": "a.py:b", "model": "a.py:c"},
            "trusted-examples = 100 is not allowed with task own-project",
        ),
        ({"aggregator": "validated", "num_corrupt": 20}, "fewer than all"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(more: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line) as refused:
        config_of(**more)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ({"trusted_examples": 360}, "trusted-examples is 360: task 'digits' has 3.. test examples"),
        ({"trusted_examples": 0, "trusted_data": "none.npz"}, "trusted-data 'none.npz' does not"),
    ],
)
def test_what_is_not_there_is_refused_before_the_run(more: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        prepare(config_of(**more))
