"""Problems: what the run configuration names is what there is, in the dtype that it names."""

from typing import Any, get_args

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord

from blackthorn.attacks import AttackingGrid, fixed_corrupt
from blackthorn.client_app.node_data import load_node_client
from blackthorn.server_app.build import build_strategy
from blackthorn.settings.catalogue import TASKS
from blackthorn.settings.config import RunConfig, make_config
from blackthorn.simulation.engine import EngineGrid
from blackthorn.strategies.reports import RoundReport
from blackthorn.tasks.labelled import NATURAL
from blackthorn.tasks.least_squares import PROBLEMS
from blackthorn.tasks.noise_laws import NOISE_LAWS
from blackthorn.tasks.partitions import SCHEMES
from blackthorn.tasks.problem import TASK_NAMES, load_problem


@pytest.mark.parametrize(
    ("key", "names"),
    [
        ("problem", PROBLEMS),
        ("noise_law", NOISE_LAWS),
        ("partition", (*SCHEMES, NATURAL)),
        ("dtype", ("float32", "float64")),
    ],
)
def test_keys_allow_exactly_the_names_that_the_tasks_know(key: str, names: tuple[str, ...]) -> None:
    assert set(get_args(RunConfig.model_fields[key].annotation)) == set(names)


def test_every_task_of_the_catalogue_is_loaded_by_a_file_and_no_other() -> None:
    assert set(TASKS) == set(TASK_NAMES)


def test_an_unknown_task_or_dtype_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="task 'chess' is unknown: allowed are digits, mnist"):
        load_problem(make_config({}).model_copy(update={"task": "chess"}))
    config = make_config({}).model_copy(update={"dtype": "float16"})
    with pytest.raises(ValueError, match="dtype is 'float16': allowed are float32, float64"):
        load_problem(config)


def test_a_client_has_its_share_or_none() -> None:
    problem = load_problem(make_config({"num-clients": 4}))
    assert [problem.shard(i).num_examples for i in range(4)] == [
        shard.num_examples for shard in problem.shards()
    ]
    for client in (-1, 4):
        with pytest.raises(ValueError, match=f"client {client} has no share .* num-clients = 4"):
            problem.shard(client)


def test_label_flip_changes_labels_and_other_attacks_nothing() -> None:
    problem = load_problem(make_config({"num-clients": 4}))
    shard = problem.shard(1)
    assert problem.poisoned(shard, "all-ones") is shard
    flipped = problem.poisoned(shard, "label-flip")
    rng = np.random.default_rng(0)
    (x, y), (flipped_x, flipped_y) = shard.batch(rng, 0), flipped.batch(rng, 0)
    assert torch.equal(x, flipped_x)
    assert torch.equal(flipped_y, 9 - y)


def test_own_data_are_on_the_nodes() -> None:
    config = make_config({"task": "own-data", "input-shape": "3", "num-classes": 2})
    problem = load_problem(config)
    assert problem.task.on_nodes
    assert not problem.task.server_evaluates
    with pytest.raises(ValueError, match="the examples are on the nodes"):
        problem.shards()
    with pytest.raises(ValueError, match="not allowed in a simulation"):
        EngineGrid(config, problem)
    with pytest.raises(ValueError, match="needs the node's own examples"):
        load_node_client(config, {"partition-id": 0})


@pytest.mark.parametrize("attack", ["none", "all-ones", "label-flip"])
def test_float64_stays_float64_from_clients_to_model(attack: str) -> None:
    values: dict[str, Any] = {"dtype": "float64", "num-clients": 4, "num-server-rounds": 2}
    if attack != "none":
        values |= {"attack": attack, "num-byzantine": 1}
    config = make_config({**values, "local-steps": 2})
    problem = load_problem(config)
    assert all(value.dtype == torch.float64 for value in problem.state().values())
    grid: Any = EngineGrid(config, problem)
    if attack != "none":
        grid = AttackingGrid(grid, attack, fixed_corrupt(4, 1), 0, True, False)
    reports: list[RoundReport] = []
    build_strategy(config, [reports.append]).start(
        grid,
        ArrayRecord(problem.state()),
        num_rounds=2,
        train_config=ConfigRecord({"seed": 0}),
        evaluate_fn=lambda _round, _arrays: None,
    )
    for report in reports[-2:]:
        assert len(report.accepted) == 4
        assert report.model.dtype == torch.float64
        assert report.updates is not None
        assert report.updates.dtype == torch.float64
    metrics = problem.task.evaluate(problem.model, reports[-1].model)
    assert 0 <= metrics["accuracy"] <= 1
