"""A run: what the clients are told, whom it waits for, Flower's own loop, options."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp.strategy import Strategy
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from memory_grid import (
    DIMENSION,
    MemoryGrid,
    centre,
    initial_model,
    quadratic_app,
    runs,
    vector_of,
)
from rounds_by_hand import LONG, NODES, Diary, attacker, by_hand, close, honest_grid, outlier, run

from blackthorn.strategies import (
    FederatedStrategy,
    GFedAvg,
    LocalRate,
    NotEnoughClients,
    Rage,
    ServerStep,
)

# What the clients are told, and when.


def test_what_the_messages_say() -> None:
    grid = honest_grid(3)
    config = ConfigRecord({"seed": 5, "local-lr": 99.0})
    strategy = GFedAvg(local_rate=LocalRate(0.5, 0.5), num_clients=3)
    strategy.start(grid, initial_model(), num_rounds=2, timeout=17.0, train_config=config)
    orders = [m for m in grid.sent if m.metadata.message_type == "train"]
    assert [m.metadata.dst_node_id for m in orders] == sorted(NODES[:3]) * 2
    for position, message in enumerate(orders):
        server_round = position // 3 + 1
        told = dict(message.content.config_records["config"])
        assert len(str(told.pop("nonce"))) == 32
        assert (
            told.pop("round-series") == orders[0].content.config_records["config"]["round-series"]
        )
        assert told == {
            "seed": 5,
            "local-lr": 0.5**server_round,
            "rounds-begun": server_round,
            "server-round": server_round,
            "client-id": message.metadata.dst_node_id,
        }
        assert message.metadata.ttl == 17.0
        assert message.metadata.group_id == str(server_round)
        assert get_all_nested_objects(message)  # Flower can send it, large ids included
    assert dict(config) == {"seed": 5, "local-lr": 99.0}
    # Nobody works on an evaluation that is over either.
    asked = [m for m in grid.sent if m.metadata.message_type == "evaluate"]
    assert len(asked) == 6
    assert {m.metadata.ttl for m in asked} == {17.0}


def test_the_run_waits_for_its_clients_and_says_who_is_missing() -> None:
    apps = [quadratic_app(i, 10, {"client-id": i}) for i in (0, 2)]
    grid = MemoryGrid({NODES[i]: runs(app) for i, app in enumerate(apps)})
    strategy = GFedAvg(identity="query", num_clients=4, min_replies=3, start_timeout=1.5)
    with pytest.raises(NotEnoughClients, match=r"2 of 4 clients connected.*missing: 1, 3"):
        run(strategy, grid)


def test_a_run_whose_clients_are_all_gone_does_not_go_on_for_its_other_rounds() -> None:
    class Leaving(MemoryGrid):
        def get_node_ids(self) -> list[int]:
            # All leave once they have answered the second round.
            trained = [m for m in self.sent if m.metadata.message_type == "train"]
            return super().get_node_ids() if len(trained) < 6 else []

    diary = Diary()
    strategy = GFedAvg(num_clients=3, start_timeout=0.5, observers=[diary])
    with pytest.raises(NotEnoughClients, match=r"nobody has been connected for 0.5 s"):
        run(strategy, Leaving(honest_grid(3).nodes), rounds=50)
    assert [report.server_round for report in diary.reports] == [1, 2]


def test_a_client_keeps_its_place_when_its_node_registers_anew() -> None:
    apps = [quadratic_app(i, 10, {"client-id": i}) for i in range(3)]

    class Restarting(MemoryGrid):
        def push_messages(self, messages: Any) -> list[str]:
            sent = list(messages)
            ids = super().push_messages(sent)
            if sent[0].metadata.group_id == "1" and sent[0].metadata.message_type == "train":
                self.later = {NODES[0]: 4, NODES[1]: 5, NODES[2]: 6}
            return ids

        def get_node_ids(self) -> list[int]:
            for old, new in getattr(self, "later", {}).items():
                if old in self.nodes:
                    self.nodes[new] = self.nodes.pop(old)
            return super().get_node_ids()

    grid = Restarting({NODES[i]: runs(app) for i, app in enumerate(apps)})
    diary = Diary()
    strategy = GFedAvg(identity="query", num_clients=3, min_replies=3, observers=[diary])
    close(run(strategy, grid), by_hand([range(3)] * 3)[-1])
    assert [report.invited for report in diary.reports] == [[0, 1, 2]] * 3
    assert [report.rejected for report in diary.reports] == [[]] * 3


def test_a_second_run_of_the_same_strategy_begins_anew() -> None:
    step = ServerStep(momentum=0.5)
    lrs, diary = [0.5, 0.25, 0.125], Diary()
    rate = LocalRate(0.5, 0.5)
    strategy = GFedAvg(local_rate=rate, server_step=step, num_clients=5, observers=[diary])
    expected = by_hand([range(5)] * 3, local_lrs=lrs, momentum=0.5)[-1]
    for _ in range(2):
        close(run(strategy, honest_grid()), expected)
    assert [report.local_lr for report in diary.reports] == lrs * 2


# Flower's own loop.


@pytest.mark.parametrize("message_ids", [True, False])
def test_flower_s_own_loop_drives_the_same_run(message_ids: bool) -> None:
    step = ServerStep(server_lr=0.5, momentum=0.8)
    strategy = GFedAvg(local_rate=LocalRate(0.5, 0.5), server_step=step, num_clients=6)
    grid = honest_grid(message_ids=message_ids)
    grid.nodes[NODES[5]] = attacker("nan")
    result = Strategy.start(strategy, grid, initial_model(), num_rounds=3, timeout=LONG)
    lrs = [0.5, 0.25, 0.125]
    expected = by_hand([range(5)] * 3, local_lrs=lrs, server_lr=0.5, momentum=0.8)
    close(result.arrays, expected[-1])
    assert dict(result.train_metrics_clientapp[3]) == {
        "invited": 6,
        "accepted": 5,
        "rejected": 1,
        "filtered": 0,
    }
    # The attacker evaluates like the others.
    loss = np.mean([0.5 * np.sum((expected[-1] - centre(i)) ** 2) for i in range(6)])
    assert result.evaluate_metrics_clientapp[3]["loss"] == pytest.approx(loss, rel=1e-4)


def test_flower_s_own_loop_with_rage_and_a_server_that_evaluates() -> None:
    grid = honest_grid()
    grid.nodes[NODES[5]] = outlier(5)
    result = Strategy.start(
        Rage(num_corrupt=1, num_clients=6),
        grid,
        initial_model(),
        num_rounds=2,
        timeout=LONG,
        evaluate_fn=lambda _, arrays: MetricRecord({"first": vector_of(arrays)[0]}),
    )
    expected = by_hand([range(5)] * 2)
    close(result.arrays, expected[-1])
    assert result.evaluate_metrics_serverapp[1]["first"] == pytest.approx(expected[0][0], abs=1e-5)


def test_in_flower_s_own_loop_too_few_replies_leave_the_model() -> None:
    result = Strategy.start(
        Rage(num_corrupt=2, num_clients=5), honest_grid(), initial_model(), 2, LONG
    )
    np.testing.assert_array_equal(vector_of(result.arrays), np.arange(DIMENSION) / 4)


# Options.


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GFedAvg(weighting="examples"), "weighting = 'examples'"),  # type: ignore[arg-type]
        (lambda: GFedAvg(identity="name"), "identity = 'name'"),  # type: ignore[arg-type]
        (lambda: GFedAvg(evaluate_every=0), "evaluate_every = 0"),
        (lambda: GFedAvg(local_rate=0.0), "local rate = 0.0"),
        (lambda: Rage(), "either num_corrupt or corrupt_fraction"),
        (lambda: Rage(1, corrupt_fraction=0.1), "either num_corrupt or corrupt_fraction"),
        (lambda: Rage(-1), "num_corrupt = -1"),
        (lambda: Rage(corrupt_fraction=1 / 3), "corrupt_fraction = 0.333"),
        (lambda: Rage(corrupt_fraction=0.4), "less than a third"),
        (lambda: Rage(corrupt_fraction=0.7), "corrupt_fraction = 0.7"),
        (lambda: Rage(1, stop="soon"), "stop = 'soon'"),  # type: ignore[arg-type]
        (lambda: Rage(1, average="median"), "average = 'median'"),  # type: ignore[arg-type]
        (lambda: Rage(1, coordinates=0), "coordinates = 0"),
        (lambda: Rage(1, aggregator=GFedAvg()._aggregate), "aggregator is not allowed"),
    ],
)
def test_options_that_make_no_sense_are_refused_at_once(
    make: Callable[[], FederatedStrategy], message: str
) -> None:
    with pytest.raises(ValueError) as caught:
        make()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_option_is_a_type_error() -> None:
    with pytest.raises(TypeError):
        GFedAvg(num_client=3)  # type: ignore[call-arg]


def test_aggregating_before_anything_was_sent() -> None:
    with pytest.raises(RuntimeError, match="no model yet"):
        GFedAvg().aggregate_train(1, [])


def test_an_empty_model_is_refused() -> None:
    with pytest.raises(ValueError, match="no floating-point parameter"):
        GFedAvg().start(honest_grid(), ArrayRecord(), num_rounds=1)
