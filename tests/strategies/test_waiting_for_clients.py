"""Waiting for clients: bounded, naming the missing, and held up by nobody."""

import logging
import threading
import time
from collections.abc import Iterator

import pytest
from enrolling_nodes import LONG, SHORT, holds, settle
from flwr.app import Message
from memory_grid import (
    Answer,
    MemoryGrid,
    silence,
)

from blackthorn.strategies import NotEnoughClients
from blackthorn.strategies.enrolment import ALONE, ClientRegistry


@pytest.fixture
def never() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


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


def test_who_does_not_say_who_it_is_keeps_nobody_from_being_told_of_the_wait(
    never: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    def held(message: Message) -> Message | None:
        never.wait(LONG)
        return holds(1)(message)

    caplog.set_level(logging.INFO, logger="blackthorn")
    registry = ClientRegistry("query", grace=0.1)
    with pytest.raises(NotEnoughClients):
        registry.wait_for(MemoryGrid({100: held, 101: holds(0)}), 2, 2, SHORT)
    assert registry.awaited() == {100}
    (told,) = [r.message for r in caplog.records if r.message.startswith("waiting for ")]
    assert told == "waiting for 2 clients, 1 are connected: 1 s (start-timeout) at most"


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


@pytest.mark.parametrize("there", [{}, {200: holds(0)}, {200: silence}, {100: holds(0)}])
def test_without_a_minimum_a_round_begins_at_once_whoever_is_connected(
    there: dict[int, Answer],
) -> None:
    registry = ClientRegistry("query", grace=LONG)
    settle(registry, MemoryGrid({100: holds(0), 101: holds(1)}))
    began = time.monotonic()
    assert began <= registry.wait_for_any(MemoryGrid(there), None, LONG, LONG) < began + LONG / 2
    assert time.monotonic() - began < LONG / 2


def test_without_a_minimum_nobody_is_said_once_until_somebody_is_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    nodes = {100: holds(0)}
    registry = ClientRegistry("query")
    settle(registry, MemoryGrid(nodes))
    with caplog.at_level(logging.WARNING, "blackthorn"):
        for there in ({}, {}, nodes, {}):
            registry.wait_for_any(MemoryGrid(there), None, LONG, LONG)
    assert [record.getMessage() for record in caplog.records] == [ALONE, ALONE]
