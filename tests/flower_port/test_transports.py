"""Replies that are late, missing, broken or come twice: one Delivery a client, by the deadline."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from flwr.app import Error, Message, MetricRecord, RecordDict
from memory_grid import Answer, MemoryGrid, silence

from blackthorn.flower_port.synchronous import SynchronousGrid, attribute_replies
from blackthorn.flower_port.transports import LATE, Delivery, Polling

# Far more than any test needs, far less than a test that waits for what never comes.
LONG = 60.0
SHORT = 1.0
# A deadline holds if it is over by no more than this.
TOLERANCE = 5.0


@pytest.fixture
def never() -> Iterator[threading.Event]:
    """An event that is set when the test is over, so that no thread outlives it for long."""
    event = threading.Event()
    yield event
    event.set()


def echo(message: Message) -> Message:
    """A node that answers with its own id."""
    content = RecordDict({"m": MetricRecord({"node": message.metadata.dst_node_id})})
    return Message(content, reply_to=message)


def orders(*nodes: int) -> list[Message]:
    return [Message(RecordDict(), node, "train") for node in nodes]


def node_of(result: Delivery) -> object:
    return None if result.message is None else result.message.content["m"]["node"]


def blocked_by(event: threading.Event) -> Answer:
    """A node whose reply holds the pull: it was announced and is never uploaded."""

    def answer(message: Message) -> Message:
        event.wait(LONG)
        return echo(message)

    return answer


def raising(error: BaseException) -> Answer:
    def answer(message: Message) -> Message:
        del message
        raise error

    return answer


def took(call: Callable[[], list[Delivery]]) -> tuple[list[Delivery], float]:
    began = time.monotonic()
    return call(), time.monotonic() - began


def test_every_client_gets_its_own_reply() -> None:
    grid = MemoryGrid({10: echo, 11: echo, 12: echo})
    results, seconds = took(lambda: grid.exchange(orders(12, 10, 11), [2, 0, 1], LONG))
    assert [r.client for r in results] == [2, 0, 1]
    assert [node_of(r) for r in results] == [12, 10, 11]
    assert seconds < LONG / 2


def test_nobody_to_ask() -> None:
    assert MemoryGrid({}).exchange([], [], LONG) == []


def test_a_reply_that_never_comes() -> None:
    grid = MemoryGrid({10: echo, 11: silence})
    results, seconds = took(lambda: grid.exchange(orders(10, 11), [0, 1], SHORT))
    assert node_of(results[0]) == 10
    assert results[1] == Delivery(1, None, LATE)
    assert SHORT <= seconds < SHORT + TOLERANCE


def test_a_pull_that_blocks_stops_nobody(never: threading.Event) -> None:
    grid = MemoryGrid({10: blocked_by(never), 11: echo})
    results, seconds = took(lambda: grid.exchange(orders(10, 11), [0, 1], SHORT))
    assert results[0] == Delivery(0, None, LATE)
    assert node_of(results[1]) == 11
    assert seconds < SHORT + TOLERANCE


def test_a_reply_that_is_late_does_not_count_afterwards(never: threading.Event) -> None:
    grid = MemoryGrid({10: blocked_by(never)})
    awaited = grid.send(orders(10), [0], 0.05)
    awaited[0].wait()
    assert awaited[0].over()
    assert awaited[0].delivery().problem == LATE


def test_a_reply_that_comes_at_the_third_look() -> None:
    looks = []

    def slow(message: Message) -> Message | None:
        looks.append(message)
        return echo(message) if len(looks) == 3 else None

    results, seconds = took(lambda: MemoryGrid({10: slow}).exchange(orders(10), [0], LONG))
    assert node_of(results[0]) == 10
    assert len(looks) == 3
    assert seconds < LONG / 2


def test_a_pull_that_raises_is_the_client_s_problem_alone() -> None:
    grid = MemoryGrid({10: raising(ValueError("bad\nchunk")), 11: echo})
    results, seconds = took(lambda: grid.exchange(orders(10, 11), [0, 1], LONG))
    assert results[0].message is None
    assert results[0].problem == "the reply cannot be read: ValueError: bad\nchunk"
    assert node_of(results[1]) == 11
    assert seconds < LONG / 2


def test_a_stopped_run_is_told_to_the_caller() -> None:
    """Flower raises a BaseException out of a pull when the run was stopped."""

    class Stopped(BaseException):
        pass

    grid = MemoryGrid({10: raising(Stopped("stopped")), 11: echo})
    began = time.monotonic()
    with pytest.raises(Stopped):
        grid.exchange(orders(10, 11), [0, 1], LONG)
    assert time.monotonic() - began < LONG / 2


def test_only_the_first_of_two_replies_counts() -> None:
    class Twice(MemoryGrid):
        def pull_messages(self, message_ids: object) -> list[Message]:
            del message_ids
            return [echo(orders(10)[0]), echo(orders(99)[0])]

    results = Twice({10: echo}).exchange(orders(10), [0], LONG)
    assert [node_of(r) for r in results] == [10]


def test_an_error_reply_is_delivered() -> None:
    grid = MemoryGrid({10: lambda message: Message(Error(8, "died"), reply_to=message)})
    results = grid.exchange(orders(10), [0], LONG)
    assert results[0].message is not None
    assert results[0].message.error == Error(8, "died")


def test_messages_that_the_server_does_not_take() -> None:
    grid = MemoryGrid({10: echo, 11: echo})
    grid.unreachable = {10}
    results, seconds = took(lambda: grid.exchange(orders(10, 11), [0, 1], LONG))
    assert results[0] == Delivery(0, None, "the message could not be sent")
    assert node_of(results[1]) == 11
    assert seconds < LONG / 2


def test_a_server_that_takes_some_and_does_not_say_which() -> None:
    class Forgetful(MemoryGrid):
        def push_messages(self, messages: object) -> list[str]:
            del messages
            return ["one of them"]

    results, seconds = took(lambda: Forgetful({}).exchange(orders(10, 11), [0, 1], LONG))
    assert [r.problem for r in results] == ["the message could not be sent"] * 2
    assert seconds < LONG / 2


def test_sending_waits_for_nobody(never: threading.Event) -> None:
    grid = MemoryGrid({10: blocked_by(never), 11: echo})
    began = time.monotonic()
    held, answered = grid.send(orders(10, 11), [0, 1], LONG)
    assert time.monotonic() - began < LONG / 2
    answered.wait()
    assert answered.over()
    assert node_of(answered.delivery()) == 11
    assert not held.over()
    never.set()
    held.wait()
    assert node_of(held.delivery()) == 10


def test_the_grid_is_not_flooded_by_a_large_cohort() -> None:
    polling = Polling()
    for cohort in (1, 25, 100, 3000):
        interval = polling.interval(cohort)
        assert interval >= 0.1
        assert cohort / interval <= 250.1  # looks a second
    assert polling.interval(10) == 0.1


class Synchronous(SynchronousGrid):
    """A grid that answers the whole cohort in one call, and refuses single pulls."""

    def __init__(self, grid: MemoryGrid) -> None:
        super().__init__()
        self.grid = grid

    def get_node_ids(self) -> list[int]:
        return self.grid.get_node_ids()

    def pull_messages(self, message_ids: object) -> list[Message]:
        raise AssertionError(f"asked for the single replies {message_ids}")

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> list[Message]:
        self.timeout = timeout
        return list(reversed(self.grid.send_and_receive(messages)))


@pytest.mark.parametrize("message_ids", [True, False])
def test_a_synchronous_grid_is_asked_once(message_ids: bool) -> None:
    nodes = {10: echo, 11: silence, 12: echo}
    grid = Synchronous(MemoryGrid(nodes, message_ids=message_ids))
    results = grid.exchange(orders(10, 11, 12), [0, 1, 2], 7.5)
    assert [node_of(r) for r in results] == [10, None, 12]
    assert results[1] == Delivery(1, None, LATE)
    assert len(grid.grid.sent) == 3
    assert grid.timeout == 7.5


def sent_orders(*nodes: int) -> list[Message]:
    messages = orders(*nodes)
    for message in messages:
        message.metadata.__dict__["_message_id"] = f"to {message.metadata.dst_node_id}"
    return messages


def test_an_error_of_the_superlink_belongs_to_the_client_that_was_asked() -> None:
    messages = sent_orders(10, 11)
    error = Message(Error(5, "gone"), reply_to=messages[1])
    error.metadata.__dict__["_src_node_id"] = 1
    results = attribute_replies([error, echo(messages[0])], messages, [0, 1])
    assert node_of(results[0]) == 10
    assert results[1].message is error


def test_the_message_answered_decides_and_not_the_node_that_claims_to_answer() -> None:
    messages = sent_orders(10, 11)
    forged = echo(messages[1])
    forged.metadata.__dict__["_src_node_id"] = 10
    results = attribute_replies([forged, echo(messages[0])], messages, [0, 1])
    assert [node_of(r) for r in results] == [10, 11]


def test_replies_to_other_messages_belong_to_nobody() -> None:
    messages = sent_orders(10)
    stranger = echo(sent_orders(12)[0])
    earlier = echo(messages[0])
    earlier.metadata.__dict__["_reply_to_message_id"] = "of the round before"
    results = attribute_replies([stranger, earlier], messages, [0])
    assert results == [Delivery(0, None, LATE)]


def test_of_two_replies_the_first_counts_however_they_came() -> None:
    for messages in (sent_orders(10), orders(10)):
        first, second = echo(messages[0]), echo(messages[0])
        results = attribute_replies([first, second], messages, [0])
        assert results[0].message is first
