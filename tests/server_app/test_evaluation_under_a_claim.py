"""Under a claim no metric is measured on what the clients hold: it is released as it is."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from shakespeare_files import LINE, samples, write

from blackthorn.server_app.claim_checks import check_evaluation
from blackthorn.server_app.run import prepare
from blackthorn.settings.config import ConfigError, make_config
from blackthorn.tasks.problem import TASK_NAMES, Problem, load_problem
from blackthorn.tasks.shards import ExampleShard

CLIENT_LEVEL = {
    "algorithm": "dp-fedavg",
    "clip-norm": 1.0,
    "noise-multiplier": 1.0,
    "participation": "poisson",
    "sample-rate": 0.5,
}
OF_EXAMPLES = {"local-dp-sgd": True, "dp-sgd-sample-rate": 0.1, "batch-size": 8}
PROBLEMS: dict[str, dict[str, Any]] = {
    "least-squares": {"num-clients": 3},
    "bayes-linear": {},
    "quadratic-noise": {},
    "digits": {},
    "shakespeare": {"num-clients": 2, "partition": "natural"},
}


def values_of(task: str, folder: Path) -> dict[str, Any]:
    values = {"task": task, "output-dir": str(folder / "run"), **PROBLEMS[task]}
    if task == "shakespeare":
        for split in ("train", "test"):
            users = {user: samples(LINE, 4) for user in ("JULIET", "PUCK")}
            write(folder / "shakespeare" / split / "all.json", users)
        values["data-dir"] = str(folder)
    return values


@pytest.mark.parametrize("task", ["least-squares", "bayes-linear"])
def test_a_task_that_evaluates_on_the_clients_examples_is_refused(
    task: str, tmp_path: Path
) -> None:
    values = {**values_of(task, tmp_path), **CLIENT_LEVEL}
    with pytest.raises(ConfigError, match=f"task = {task} breaks the claim: its metrics are"):
        prepare(make_config(values))
    assert prepare(make_config({**values, "claim-privacy": False})).warnings is not None
    assert not (tmp_path / "run").exists()


def test_it_is_refused_under_a_claim_of_single_examples_too(tmp_path: Path) -> None:
    values = {**values_of("bayes-linear", tmp_path), **OF_EXAMPLES}
    with pytest.raises(ConfigError, match="task = bayes-linear breaks the claim"):
        prepare(make_config(values))
    prepare(make_config({**values, "claim-privacy": False}))


def test_other_examples_of_the_same_people_are_told_of(tmp_path: Path) -> None:
    values = {**values_of("shakespeare", tmp_path), **CLIENT_LEVEL}
    (said,) = [w for w in prepare(make_config(values)).warnings if "same people" in w]
    assert said.startswith("task = shakespeare with partition = natural")
    for other in ({"partition": "iid"}, {"claim-privacy": False}):
        warnings = prepare(make_config({**values, **other})).warnings
        assert not any("same people" in w for w in warnings)


def metrics_of(problem: Problem, params: torch.Tensor) -> dict[str, float]:
    return problem.task.evaluate(problem.model, params)


@pytest.mark.parametrize("task", PROBLEMS)
def test_what_a_task_says_of_its_evaluation_is_so(task: str, tmp_path: Path) -> None:
    """Whatever the clients' examples are changed to, the metrics stay, or the task says not."""
    problem = load_problem(make_config(values_of(task, tmp_path)))
    params = problem.model.flatten(problem.state())
    before = metrics_of(problem, params)
    # Data sets are kept in memory and shared: their labels are put back.
    held = {
        id(examples.y): (examples.y, examples.y.clone())
        for shard in problem.shards()
        if isinstance(shard, ExampleShard)
        for examples in [vars(shard)["_examples"]]
    }
    assert bool(held) == (task != "quadratic-noise")
    try:
        for y, _ in held.values():
            y.copy_((y + 1) % (problem.task.num_classes or 7))
        changed = metrics_of(problem, params) != before
    finally:
        for y, kept in held.values():
            y.copy_(kept)
    assert changed == (problem.task.evaluation_data == "clients")
    assert metrics_of(problem, params) == before


def test_the_tasks_here_are_all_there_are() -> None:
    """Those of the same kind as digits read a file each, and all keep their test sets apart."""
    of_data_sets = {
        "mnist",
        "fashion-mnist",
        "emnist",
        "cifar10",
        "features",
        "own-data",
        "own-project",
    }
    assert {*PROBLEMS, *of_data_sets} == {*TASK_NAMES}


def test_a_task_that_does_not_say_may_read_anything() -> None:
    @dataclass
    class Silent:
        name: str = "silent"
        server_evaluates: bool = True

    config = make_config({"num-clients": 20, **CLIENT_LEVEL})
    with pytest.raises(ValueError, match="breaks the claim"):
        check_evaluation(config, Silent())  # type: ignore[arg-type]
