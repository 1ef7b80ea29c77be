"""Stable client ids over changing nodes: who is who, who is missing, no waiting for attackers."""

import logging
from typing import Any

import numpy as np
import pytest
from enrolling_nodes import LONG, SHORT, cannot, holds, queries, settle
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from memory_grid import (
    LOCAL_LR,
    Answer,
    MemoryGrid,
    initial_model,
    quadratic_app,
    runs,
    silence,
    trained,
    vector_of,
)

from blackthorn.strategies import GFedAvg, NotEnoughClients, RoundReport
from blackthorn.strategies.enrolment import Client, ClientRegistry
from blackthorn.strategies.enrolment_messages import read_enrolment
from blackthorn.strategies.screening import RejectedReply


def test_each_node_is_asked_once_for_its_client() -> None:
    grid = MemoryGrid({100: holds(2, num_examples=20), 101: holds(0, num_examples=5)})
    registry = ClientRegistry("query")
    assert settle(registry, grid) == [0, 2]
    assert registry[2] == Client(2, 100, 20)
    assert registry[0] == Client(0, 101, 5)
    assert registry.clients() == [0, 2]
    assert len(registry) == 2
    settle(registry, grid)
    assert queries(grid) == [100, 101]


def test_the_app_of_this_repository_s_form_enrols() -> None:
    app = quadratic_app(3, enrols={"client-id": 3, "num-examples": 17})
    registry = ClientRegistry("query")
    assert settle(registry, MemoryGrid({9: runs(app)})) == [3]
    assert registry[3] == Client(3, 9, 17)


def test_plain_apps_are_known_by_their_node_and_are_not_asked() -> None:
    grid = MemoryGrid({2**64 - 3: silence, 12: silence})
    registry = ClientRegistry("node")
    registry.refresh(grid, LONG)
    assert registry.clients() == registry.online() == [12, 2**64 - 3]
    assert registry[12] == Client(12, 12, None)
    assert grid.sent == []
    # A node's own id is no stable one: it does not outlive the connection.
    del grid.nodes[12]
    registry.refresh(grid, LONG)
    assert registry.clients() == [2**64 - 3]


def test_a_client_keeps_its_id_and_its_first_count_over_a_new_registration() -> None:
    grid = MemoryGrid({100: holds(7, num_examples=10)})
    registry = ClientRegistry("query")
    settle(registry, grid)
    grid.nodes = {}
    assert settle(registry, grid) == []
    assert registry.clients() == [7]  # the population to sample from stays
    grid.nodes = {200: holds(7, num_examples=10**6)}
    assert settle(registry, grid) == [7]
    assert registry[7] == Client(7, 200, 10)


def test_a_node_that_comes_back_under_its_id_is_not_asked_again() -> None:
    nodes = {100: holds(7, num_examples=10)}
    grid = MemoryGrid(nodes)
    registry = ClientRegistry("query")
    settle(registry, grid)
    grid.nodes = {}
    settle(registry, grid)
    grid.nodes = dict(nodes)
    assert settle(registry, grid) == [7]
    assert queries(grid) == [100]


def test_who_holds_a_client_is_said_where_a_run_goes_on_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """`blackthorn status` knows it from there."""
    before, after = ClientRegistry("query"), ClientRegistry("query")
    settle(before, MemoryGrid({100: holds(3)}))
    with caplog.at_level(logging.INFO, "blackthorn"):
        after.restore(before.values())
    assert [r.getMessage() for r in caplog.records] == ["client 3 is held by node 100"]


def test_a_second_node_with_the_same_id_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    grid = MemoryGrid({100: holds(1, num_examples=10)})
    registry = ClientRegistry("query")
    settle(registry, grid)
    grid.nodes[200] = holds(1, num_examples=99)
    with caplog.at_level(logging.WARNING, "blackthorn"):
        assert settle(registry, grid) == [1]
        settle(registry, grid)
    assert registry[1] == Client(1, 100, 10)
    assert queries(grid) == [100, 200]
    assert [r.getMessage() for r in caplog.records] == [
        "node 200 refused: client 1 is connected as node 100"
    ]


def test_a_refused_node_takes_over_when_the_other_is_gone() -> None:
    """A SuperNode that is killed and restarted is back before its old node counts as offline."""
    grid = MemoryGrid({100: holds(1, num_examples=10)})
    registry = ClientRegistry("query")
    settle(registry, grid)
    grid.nodes[200] = holds(1, num_examples=99)
    settle(registry, grid)
    del grid.nodes[100]
    assert settle(registry, grid) == [1]
    assert registry[1] == Client(1, 200, 10)
    assert queries(grid) == [100, 200]


def test_a_refused_node_that_leaves_is_forgotten() -> None:
    grid = MemoryGrid({100: holds(1), 200: holds(1)})
    registry = ClientRegistry("query")
    settle(registry, grid)
    del grid.nodes[200]
    settle(registry, grid)
    del grid.nodes[100]
    assert settle(registry, grid) == []
    assert registry[1].node_id == 100


LYING = {
    "another type": holds([1, 2]),
    "negative": holds(-1),
    "fraction": holds(1.5),
    "not a number": holds(float("nan")),
    "infinite": holds(float("inf")),
    "too large": holds(2**31),
    "far too large": holds(10**400),
    "insane count": holds(1, num_examples=1e30),
    "count of another type": holds(1, num_examples=[5]),
    "empty": lambda message: Message(RecordDict(), reply_to=message),
    "error": lambda message: Message(Error(2, "no\ndata"), reply_to=message),
}


@pytest.mark.parametrize("lie", LYING)
def test_lying_enrolments_enrol_nobody_and_stop_nobody(
    lie: str, caplog: pytest.LogCaptureFixture
) -> None:
    grid = MemoryGrid({100: LYING[lie], 101: holds(4)})
    registry = ClientRegistry("query")
    with caplog.at_level(logging.WARNING, "blackthorn"):
        assert settle(registry, grid) == [4]
    assert registry.clients() == [4]
    # It may try again, but not for ever.
    assert queries(grid).count(100) == 3
    reasons = [r.getMessage() for r in caplog.records]
    assert len(reasons) == 3
    assert all(r.startswith("node 100 did not enrol: ") and "\n" not in r for r in reasons)


def test_a_node_that_fails_at_first_enrols_later() -> None:
    calls = []

    def flaky(message: Message) -> Message | None:
        calls.append(message)
        if len(calls) == 1:
            return Message(Error(2, "still loading"), reply_to=message)
        return holds(6)(message)

    registry = ClientRegistry("query")
    assert settle(registry, MemoryGrid({100: flaky})) == [6]


def test_why_a_client_cannot_take_part_is_said_at_once_and_in_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    nodes = {100: holds(0), 101: cannot(1, "a.npz: x\nis bad"), 102: LYING["error"]}
    registry = ClientRegistry("query")
    with caplog.at_level(logging.WARNING, "blackthorn"), pytest.raises(NotEnoughClients) as caught:
        registry.wait_for(MemoryGrid(nodes), 3, 2, SHORT)
    assert str(caught.value) == (
        "1 of 3 clients connected within 1 s (start-timeout); missing: 1, 2; "
        "client 1: a.npz: x is bad; node 102: error 2: no data"
    )
    said = {record.getMessage() for record in caplog.records}
    assert said == {
        "client 1 on node 101 did not enrol: a.npz: x is bad",
        "node 102 did not enrol: error 2: no data",
    }


def test_a_client_that_comes_back_with_other_examples_enrols() -> None:
    """Under its key it is the same node; what was wrong with it is forgotten."""
    grid = MemoryGrid({101: cannot(1, "bad")})
    registry = ClientRegistry("key")
    assert settle(registry, grid) == []
    assert queries(grid).count(101) == 3
    grid.nodes = {}
    settle(registry, grid)
    grid.nodes = {101: holds(1)}
    assert settle(registry, grid) == [1]
    with pytest.raises(NotEnoughClients) as caught:
        registry.wait_for(grid, 2, 2, 0.0)
    assert str(caught.value).endswith("; missing: 0")


def test_nobody_speaks_for_a_client_that_is_there(caplog: pytest.LogCaptureFixture) -> None:
    grid = MemoryGrid({100: holds(1)})
    registry = ClientRegistry("query")
    settle(registry, grid)
    grid.nodes[200] = cannot(1, "bad")
    with caplog.at_level(logging.WARNING, "blackthorn"):
        assert settle(registry, grid) == [1]
    assert {r.getMessage() for r in caplog.records} == {"node 200 did not enrol: bad"}


def test_many_reasons_are_cut_short() -> None:
    nodes: dict[int, Answer] = {100 + i: cannot(i, f"bad {i}") for i in range(9)}
    with pytest.raises(NotEnoughClients) as caught:
        ClientRegistry("query").wait_for(MemoryGrid(nodes), 9, 1, SHORT)
    assert str(caught.value).endswith("; client 4: bad 4; and 4 more")


def test_a_client_that_declares_no_count_weighs_one_example() -> None:
    message = holds(5)(Message(RecordDict(), 100, "query"))
    assert message is not None
    assert read_enrolment(message) == (5, 1)


@pytest.mark.parametrize("client_id", [0, 2**31 - 1, 3.0])
def test_ids_that_are_allowed(client_id: float) -> None:
    message = holds(client_id, num_examples=2)(Message(RecordDict(), 100, "query"))
    assert message is not None
    assert read_enrolment(message) == (int(client_id), 2)


def test_an_answer_without_an_id() -> None:
    content = RecordDict({"m": MetricRecord({"num-examples": 3})})
    message = Message(content, reply_to=Message(RecordDict(), 100, "query"))
    with pytest.raises(RejectedReply, match="client-id"):
        read_enrolment(message)


def test_ids_beyond_the_population_are_refused() -> None:
    grid = MemoryGrid({100: holds(0), 101: holds(4), 102: holds(5), 103: holds(2**31 - 1)})
    registry = ClientRegistry("query", population=5)
    assert settle(registry, grid) == [0, 4]


# Where nodes authenticate, a node's id is that of its registered key.


def test_a_client_stays_with_its_key_over_reconnects(caplog: pytest.LogCaptureFixture) -> None:
    key = {100: holds(1, num_examples=10)}
    grid = MemoryGrid(key)
    registry = ClientRegistry("key")
    assert settle(registry, grid) == [1]
    grid.nodes = {200: holds(1, num_examples=99)}
    with caplog.at_level(logging.WARNING, "blackthorn"):
        assert settle(registry, grid) == []
        settle(registry, grid)
    assert registry[1] == Client(1, 100, 10)
    assert [r.getMessage() for r in caplog.records] == [
        "node 200 refused: client 1 belongs to the key of node 100"
    ]
    grid.nodes |= key
    assert settle(registry, grid) == [1]
    assert registry[1] == Client(1, 100, 10)
    assert queries(grid) == [100, 200]
    # Gone for good: the impostor's patience does not pay.
    del grid.nodes[100]
    assert settle(registry, grid) == []


def test_another_key_with_an_id_of_its_own_is_a_client() -> None:
    grid = MemoryGrid({100: holds(1)})
    registry = ClientRegistry("key")
    settle(registry, grid)
    grid.nodes = {200: holds(0)}
    assert settle(registry, grid) == [0]
    assert registry.clients() == [0, 1]


def test_ids_beyond_the_population_are_refused_with_keys_too() -> None:
    registry = ClientRegistry("key", population=2)
    assert settle(registry, MemoryGrid({100: holds(0), 101: holds(2)})) == [0]


@pytest.mark.parametrize("identity", ["key", "query"])
def test_two_live_nodes_with_one_id_are_one_client_in_a_round(identity: Any) -> None:
    """Only the node that enrolled first is sent a model, and only its update counts."""
    told: list[int] = []

    def node(client: int, enrols: int) -> Answer:
        answer = runs(quadratic_app(client, enrols={"client-id": enrols, "num-examples": 10}))

        def listen(message: Message) -> Message | None:
            if message.metadata.message_type == "train":
                told.append(message.metadata.dst_node_id)
            return answer(message)

        return listen

    reports: list[RoundReport] = []
    grid = MemoryGrid({100: node(0, 0), 101: node(1, 1)})
    strategy = GFedAvg(
        identity=identity, num_clients=2, local_rate=LOCAL_LR, observers=[reports.append]
    )
    config = ConfigRecord({})
    arrays = strategy_round(strategy, grid, 1, initial_model(), config)
    grid.nodes[200] = node(7, 1)  # another node that says it is client 1
    arrays = strategy_round(strategy, grid, 2, arrays, config)
    assert told == [100, 101, 100, 101]
    assert [report.accepted for report in reports] == [[0, 1], [0, 1]]
    before = vector_of(initial_model())
    for _ in range(2):
        before = (trained(before, 0) + trained(before, 1)) / 2
    np.testing.assert_allclose(vector_of(arrays), before, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("identity", "second"), [("key", [0]), ("query", [0, 1])])
def test_who_may_hold_the_client_of_a_node_that_is_away(identity: Any, second: list[int]) -> None:
    def node(client: int, enrols: int) -> Answer:
        return runs(quadratic_app(client, enrols={"client-id": enrols, "num-examples": 10}))

    reports: list[RoundReport] = []
    grid = MemoryGrid({100: node(0, 0), 101: node(1, 1)})
    strategy = GFedAvg(identity=identity, num_clients=2, observers=[reports.append])
    config = ConfigRecord({})
    arrays = strategy_round(strategy, grid, 1, initial_model(), config)
    grid.nodes = {100: grid.nodes[100], 200: node(7, 1)}
    strategy_round(strategy, grid, 2, arrays, config)
    assert [report.accepted for report in reports] == [[0, 1], second]


def strategy_round(
    strategy: GFedAvg, grid: MemoryGrid, number: int, arrays: ArrayRecord, config: ConfigRecord
) -> ArrayRecord:
    """One round in Flower's own order; the grid answers when it is asked."""
    messages = list(strategy.configure_train(number, arrays, config, grid))
    replies = grid.send_and_receive(messages)
    trained_arrays, _ = strategy.aggregate_train(number, replies)
    assert trained_arrays is not None
    return trained_arrays
