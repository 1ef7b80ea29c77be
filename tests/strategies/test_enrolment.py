"""Stable client ids over changing nodes: who is who, who is missing, no waiting for attackers."""

import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
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
from blackthorn.strategies.enrolment import Client, ClientRegistry, read_enrolment
from blackthorn.strategies.screening import RejectedReply

LONG = 60.0
SHORT = 1.0


@pytest.fixture
def never() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def holds(client_id: Any, **declared: Any) -> Answer:
    """A node that answers the query with this client id."""
    record = {"client-id": client_id, **{k.replace("_", "-"): v for k, v in declared.items()}}

    def answer(message: Message) -> Message:
        return Message(RecordDict({"metrics": MetricRecord(record)}), reply_to=message)

    return answer


def settle(registry: ClientRegistry, grid: MemoryGrid) -> list[int]:
    """Refresh until no node's answer is awaited; the clients that are connected then."""
    deadline = time.monotonic() + LONG
    asked = registry.refresh(grid, LONG)
    while registry.awaited() or asked:
        assert time.monotonic() < deadline
        time.sleep(0.002)
        asked = registry.refresh(grid, LONG)
    return registry.online()


def queries(grid: MemoryGrid) -> list[int]:
    """The nodes that were asked, in order."""
    assert all(m.metadata.message_type == "query" for m in grid.sent)
    return [m.metadata.dst_node_id for m in grid.sent]


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


def cannot(client_id: Any, problem: str) -> Answer:
    """A node that answers that its client cannot take part."""

    def answer(message: Message) -> Message:
        metrics = MetricRecord({"client-id": client_id})
        config = ConfigRecord({"problem": problem})
        return Message(RecordDict({"m": metrics, "c": config}), reply_to=message)

    return answer


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


def test_refreshing_waits_for_nobody(never: threading.Event) -> None:
    def held(message: Message) -> Message | None:
        never.wait(LONG)
        return holds(1)(message)

    grid = MemoryGrid({100: held, 101: holds(0)})
    registry = ClientRegistry("query")
    began = time.monotonic()
    assert registry.refresh(grid, LONG) == {100, 101}
    while registry.online() != [0]:
        registry.refresh(grid, LONG)
    assert time.monotonic() - began < LONG / 2
    assert registry.awaited() == {100}
    never.set()
    assert settle(registry, grid) == [0, 1]


def test_waiting_ends_when_all_are_there_although_one_node_never_answers() -> None:
    grid = MemoryGrid({100: silence, 101: holds(0), 102: holds(1)})
    registry = ClientRegistry("query")
    began = time.monotonic()
    registry.wait_for(grid, 2, 1, LONG)
    assert time.monotonic() - began < LONG / 2
    assert registry.online() == [0, 1]


def test_clients_that_connect_while_others_are_waited_for() -> None:
    """A node that never answers must not keep the server from seeing those who come later."""

    class Growing(MemoryGrid):
        looks = 0

        def get_node_ids(self) -> list[int]:
            self.looks += 1
            if self.looks == 4:
                self.nodes |= {101: holds(0), 102: holds(1)}
            return super().get_node_ids()

    registry = ClientRegistry("query")
    began = time.monotonic()
    registry.wait_for(Growing({100: silence}), 2, 1, LONG)
    assert time.monotonic() - began < LONG / 2
    assert registry.online() == [0, 1]


def test_waiting_is_bounded_and_names_the_missing() -> None:
    grid = MemoryGrid({100: holds(0), 101: holds(2), 102: silence})
    began = time.monotonic()
    with pytest.raises(NotEnoughClients) as caught:
        ClientRegistry("query").wait_for(grid, 5, 3, SHORT)
    assert SHORT <= time.monotonic() - began < SHORT + 5
    assert (
        str(caught.value) == "2 of 5 clients connected within 1 s (start-timeout); missing: 1, 3, 4"
    )


def test_a_long_list_of_the_missing_is_cut_short() -> None:
    with pytest.raises(NotEnoughClients) as caught:
        ClientRegistry("query").wait_for(MemoryGrid({}), 1000, 1, 0.0)
    assert str(caught.value).endswith(" 18, 19 and 980 more")
    assert len(str(caught.value)) < 200


def test_a_run_goes_on_with_fewer_if_there_are_enough(caplog: pytest.LogCaptureFixture) -> None:
    registry = ClientRegistry("query")
    with caplog.at_level(logging.WARNING, "blackthorn"):
        registry.wait_for(MemoryGrid({100: holds(0), 101: holds(2)}), 4, 2, SHORT)
    assert registry.online() == [0, 2]
    assert caplog.records[-1].getMessage() == (
        "2 of 4 clients connected within 1 s (start-timeout); missing: 1, 3; going on with those"
    )


def test_nobody_at_all_is_too_few_whatever_the_minimum() -> None:
    with pytest.raises(NotEnoughClients, match="0 of 2 clients"):
        ClientRegistry("node").wait_for(MemoryGrid({}), 2, 0, 0.0)


def test_a_round_with_enough_clients_begins_at_once() -> None:
    grid = MemoryGrid({100: holds(0), 101: holds(1), 102: silence})
    registry = ClientRegistry("query")
    registry.wait_for(grid, 2, 1, LONG)
    grid.nodes[103] = silence
    began = time.monotonic()
    registry.wait_for_any(grid, 2, LONG, LONG)
    # Two nodes never say who they are, but nobody is missing.
    assert time.monotonic() - began < LONG / 2
    assert registry.online() == [0, 1]


def test_a_round_without_clients_waits_until_somebody_comes() -> None:
    class Returning(MemoryGrid):
        looks = 0

        def get_node_ids(self) -> list[int]:
            self.looks += 1
            return [200] if self.looks > 5 else []

    registry = ClientRegistry("query")
    settle(registry, MemoryGrid({100: holds(0)}))
    grid = Returning({200: holds(0)})
    registry.wait_for_any(grid, 1, LONG, LONG)
    assert registry.online() == [0]
    assert registry[0].node_id == 200


def test_a_run_with_nobody_pauses_says_so_and_ends(caplog: pytest.LogCaptureFixture) -> None:
    registry = ClientRegistry("query")
    settle(registry, MemoryGrid({100: holds(0)}))
    began = time.monotonic()
    with (
        caplog.at_level(logging.WARNING, "blackthorn"),
        pytest.raises(NotEnoughClients, match=r"nobody .* connected for 1 s \(start-timeout\)$"),
    ):
        registry.wait_for_any(MemoryGrid({}), 1, 0.1, SHORT)
    assert SHORT <= time.monotonic() - began < SHORT + 5
    assert [record.getMessage() for record in caplog.records] == [
        "nobody is connected: the run pauses, for 1 s (start-timeout) at most"
    ]


def test_with_somebody_a_round_waits_no_longer_than_it_is_told() -> None:
    registry = ClientRegistry("query")
    settle(registry, MemoryGrid({100: holds(0), 101: holds(1)}))
    began = time.monotonic()
    registry.wait_for_any(MemoryGrid({100: holds(0)}), 2, SHORT, LONG)
    assert SHORT <= time.monotonic() - began < LONG / 2


def test_a_new_node_has_a_moment_to_be_a_client_that_is_missing() -> None:
    """After a restart of the server all clients are back under new ids: not one round for one."""
    registry = ClientRegistry("query")
    settle(registry, MemoryGrid({100: holds(0), 101: holds(1)}))
    looks = []

    def slow(message: Message) -> Message | None:
        looks.append(message)
        return holds(1)(message) if len(looks) > 20 else None

    registry.wait_for_any(MemoryGrid({200: holds(0), 201: slow}), 1, LONG, LONG)
    assert registry.online() == [0, 1]


def test_the_moment_ends() -> None:
    registry = ClientRegistry("query", grace=0.2)
    settle(registry, MemoryGrid({100: holds(0), 101: holds(1)}))
    grid = MemoryGrid({100: holds(0), 201: silence})
    began = time.monotonic()
    registry.wait_for_any(grid, 1, LONG, LONG)
    assert 0.2 <= time.monotonic() - began < 5.2
    assert registry.online() == [0]
    # The silent node had its moment.
    registry.grace = LONG
    began = time.monotonic()
    registry.wait_for_any(grid, 1, LONG, LONG)
    assert time.monotonic() - began < LONG / 2


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
