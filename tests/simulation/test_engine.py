"""The in-process engine against the ClientApp of a deployment, message by message."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.serverapp.strategy import Strategy

from blackthorn import attacks
from blackthorn.attacks import AttackingGrid, fixed_corrupt
from blackthorn.client_app.clientapp import app
from blackthorn.server_app.build import build_strategy
from blackthorn.settings.config import RunConfig, make_config, to_mapping
from blackthorn.simulation.engine import EngineGrid
from blackthorn.strategies import GFedAvg, RoundContext
from blackthorn.tasks.problem import Problem, load_problem

TOLERANCE = 1e-5


def configuration(**values: Any) -> RunConfig:
    given = {key.replace("_", "-"): value for key, value in values.items()}
    return make_config({"num-clients": 5, "local-steps": 4, "batch-size": 16, "seed": 3, **given})


def orders(
    grid: EngineGrid, problem: Problem, kind: str = "train", local_lr: float = 0.25
) -> list[Message]:
    """One message a node, in no particular order, as a strategy writes them in round 7."""
    rule = (
        build_strategy(grid.config)
        .local_rule(RoundContext(1, local_lr, torch.zeros(1)))
        .sent.record()
    )
    messages = []
    for client, node in reversed(list(enumerate(grid.get_node_ids()))):
        config = ConfigRecord({"server-round": 7, "local-lr": local_lr, "client-id": client})
        arrays = ArrayRecord(problem.state())
        content = RecordDict({"arrays": arrays, "config": config, "rule": rule})
        messages.append(Message(content, node, kind, group_id="7"))
    return messages


def answered(config: RunConfig, message: Message, client: int, **node_config: Any) -> Message:
    """The answer of the ClientApp on a node of its own."""
    node = {"partition-id": client, "num-partitions": config.num_clients, **node_config}
    context = Context(1, message.metadata.dst_node_id, node, RecordDict(), to_mapping(config))
    return app(message, context)


def update(message: Message, reply: Message) -> np.ndarray:
    """w_i - w, float64."""
    sent = message.content.array_records["arrays"]
    parts = [
        array.numpy().astype(np.float64) - sent[name].numpy().astype(np.float64)
        for name, array in arrays_of(reply).items()
    ]
    return np.concatenate([part.reshape(-1) for part in parts])


def arrays_of(reply: Message) -> ArrayRecord:
    return reply.content.array_records["arrays"]


def assert_same(message: Message, engine: Message, client: Message) -> None:
    assert list(arrays_of(engine)) == list(arrays_of(client))
    found, expected = update(message, engine), update(message, client)
    assert np.linalg.norm(expected) > 1e-3
    assert np.linalg.norm(found - expected) <= TOLERANCE * np.linalg.norm(expected)
    ours, theirs = (dict(r.content.metric_records["metrics"]) for r in (engine, client))
    assert ours.keys() == theirs.keys()
    assert ours["num-examples"] == theirs["num-examples"]
    assert ours["train-loss"] == pytest.approx(theirs["train-loss"], rel=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"model": "logistic", "batch_size": 0, "weight_decay": 0.01},
        {"model": "cnn", "local_steps": 2},
        {"partition": "dirichlet", "dirichlet_alpha": 0.3},
        {"algorithm": "fat-clipping-pr", "clip_norm": 0.1},
        {"algorithm": "fat-clipping-pi", "clip_norm": 0.1},
    ],
)
def test_the_engine_trains_as_the_client_app_does(options: dict[str, Any]) -> None:
    config = configuration(**options)
    problem = load_problem(config)
    grid = EngineGrid(config, problem)
    messages = orders(grid, problem)
    replies = list(grid.send_and_receive(messages))
    assert len(replies) == 5
    for client, message, reply in zip([4, 3, 2, 1, 0], messages, replies, strict=True):
        assert reply.metadata.src_node_id == message.metadata.dst_node_id
        assert_same(message, reply, answered(config, message, client))


def test_every_client_and_every_round_has_updates_of_its_own() -> None:
    """Otherwise the comparison above could not tell one client from another."""
    config = configuration()
    problem = load_problem(config)
    grid = EngineGrid(config, problem)
    messages = orders(grid, problem)
    replies = list(grid.send_and_receive(messages))
    updates = [update(m, r) for m, r in zip(messages, replies, strict=True)]
    for first, second in itertools.pairwise(updates):
        assert np.linalg.norm(first - second) > 0.01 * np.linalg.norm(first)
    later = orders(grid, problem)
    for message in later:
        message.content.config_records["config"]["server-round"] = 8
    reply, *_ = grid.send_and_receive(later)
    again = update(later[0], reply)
    assert np.linalg.norm(again - updates[0]) > 0.01 * np.linalg.norm(again)


def test_a_client_s_result_does_not_depend_on_who_else_takes_part() -> None:
    config = configuration()
    problem = load_problem(config)
    grid = EngineGrid(config, problem)
    messages = orders(grid, problem)
    together = list(grid.send_and_receive(messages))
    for message, reply in zip(messages, together, strict=True):
        (alone,) = grid.send_and_receive([message])
        assert_same(message, reply, alone)


def test_enrolment_is_the_client_app_s() -> None:
    config = configuration(partition="dirichlet", dirichlet_alpha=0.3)
    problem = load_problem(config)
    grid = EngineGrid(config, problem)
    messages = orders(grid, problem, "query")
    for client, message, reply in zip(
        [4, 3, 2, 1, 0], messages, grid.send_and_receive(messages), strict=True
    ):
        expected = answered(config, message, client).content.metric_records["metrics"]
        assert dict(reply.content.metric_records["metrics"]) == dict(expected)
        assert expected["client-id"] == client


def test_label_flip_in_the_engine_is_what_a_poisoned_node_does() -> None:
    config = configuration(num_byzantine=2, attack="label-flip")
    problem = load_problem(config)
    engine = EngineGrid(config, problem)
    grid = AttackingGrid(engine, "label-flip", fixed_corrupt(5, 2), seed=3)
    messages = orders(engine, problem)
    honest = list(engine.send_and_receive(orders(engine, problem)))
    lying = attacks.byzantine_app(app, "label-flip")
    for client, message, reply, truth in zip(
        [4, 3, 2, 1, 0], messages, grid.send_and_receive(messages), honest, strict=True
    ):
        poison = {"poison": "label-flip"} if client >= 3 else {}
        assert_same(message, reply, answered(config, message, client, **poison))
        difference = np.linalg.norm(update(message, reply) - update(message, truth))
        length = np.linalg.norm(update(message, truth))
        assert difference > 0.1 * length if client >= 3 else difference <= TOLERANCE * length
        if client >= 3:
            node = {"partition-id": client, "num-partitions": 5}
            context = Context(1, 9, dict(node), RecordDict(), to_mapping(config))
            assert_same(message, reply, lying(message, context))
            assert context.node_config == node


def test_flipped_labels_are_the_classes_in_reverse() -> None:
    config = configuration()
    problem = load_problem(config)
    shard: Any = problem.shards()[0]
    poisoned: Any = problem.poisoned(shard, "label-flip")
    assert (poisoned.examples.y == 9 - shard.examples.y).all()
    assert (poisoned.examples.x == shard.examples.x).all()


def test_pushed_messages_are_answered_once() -> None:
    config = configuration()
    problem = load_problem(config)
    grid = EngineGrid(config, problem)
    messages = orders(grid, problem)
    ids = list(grid.push_messages(messages))
    assert len(set(ids)) == 5
    (reply,) = grid.pull_messages([ids[2]])
    assert_same(messages[2], reply, answered(config, messages[2], 2))
    assert list(grid.pull_messages([ids[2]])) == []
    assert len(list(grid.pull_messages(ids))) == 4


def test_the_engine_learns_the_same_under_flower_s_own_loop() -> None:
    config = configuration()
    problem = load_problem(config)
    initial = ArrayRecord(problem.state())
    found = []
    for start in (Strategy.start, GFedAvg.start):
        strategy = GFedAvg(local_rate=0.25, num_clients=5)
        # Nobody holds examples out here: the evaluation has no result, and ends nothing.
        result = start(strategy, EngineGrid(config, problem), initial, num_rounds=2)
        assert result.evaluate_metrics_clientapp == {}
        found.append({name: array.numpy() for name, array in result.arrays.items()})
    for name, first in initial.items():
        np.testing.assert_allclose(found[0][name], found[1][name], rtol=1e-5, atol=1e-7)
        assert not np.allclose(found[0][name], first.numpy())


def test_data_of_the_nodes_own_cannot_be_simulated() -> None:
    config = configuration(task="own-data", input_shape="1,8,8", num_classes=10)
    with pytest.raises(ValueError, match="the examples are on the nodes"):
        EngineGrid(config, load_problem(config))
