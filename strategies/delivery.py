"""Sending a round's messages and collecting the replies, with a deadline that holds.

Flower's own `send_and_receive` pulls all replies in one call: a client that announces a reply and
never uploads it holds that call for minutes, and a reply that cannot be read raises out of it.
Here every reply is pulled on its own, in its own thread, and the deadline is ours; so is what a
reply may weigh (`flower_port/grids.py`).
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import grpc
from flwr.app import Message
from flwr.serverapp import Grid

from blackthorn.flower_port.grids import UNFINISHED, Allowance, ReplyRefused, pull_reply

from .link import LinkDown, call_within

LATE = "no reply by the deadline"
UNSENT = "the message could not be sent"
_SURPLUS = "enough others had answered"

# Polling is cheap (one small request a reply), but a large cohort must not flood the server.
_POLL_SECONDS = 0.1
_POLL_SECONDS_PER_MESSAGE = 0.004
# Between two looks at what the threads have found.
_ARRIVAL_SECONDS = 0.02


@dataclass(frozen=True)
class Delivery:
    """What came back from one client: a reply, or the reason why there is none."""

    client: int
    message: Message | None
    problem: str = ""
    # Nobody waits for this reply any more: there are enough without it.
    surplus: bool = False


@dataclass(frozen=True)
class Enough:
    """A round is over when `number` replies are in that pass `counts`."""

    number: int
    counts: Callable[[Delivery], bool]


def exchange(
    grid: Grid, messages: Sequence[Message], clients: Sequence[int], timeout: float
) -> list[Delivery]:
    """Send `messages` (one a client) and return one Delivery a client, at most `timeout` later.

    Never raises for what a client did: replies that are late, missing or cannot be read come
    back as a Delivery without message.
    """
    if messages and getattr(grid, "synchronous", False):
        return _answers(grid, messages, clients, timeout)
    awaited = send(grid, messages, clients, timeout)
    for reply in awaited:
        reply.wait()
    return [reply.delivery() for reply in awaited]


def exchange_until(
    grid: Grid,
    messages: Sequence[Message],
    clients: Sequence[int],
    timeout: float,
    enough: Enough,
) -> list[Delivery]:
    """As `exchange`, but no longer than until there are enough; the rest is surplus.

    Who answers first counts; in one process, where all answer at once, who was asked first. The
    Deliveries are by ascending client.
    """
    pending = send(grid, messages, clients, timeout)
    found: list[Delivery] = []
    good = 0
    while pending and good < enough.number:
        waiting = []
        for reply in pending:
            if good >= enough.number or not reply.over():
                waiting.append(reply)
                continue
            found.append(reply.delivery())
            good += enough.counts(found[-1])
        if len(waiting) == len(pending):
            time.sleep(_ARRIVAL_SECONDS)
        pending = waiting
    for reply in pending:
        reply.abandon()
        found.append(Delivery(reply.client, None, _SURPLUS, surplus=True))
    return sorted(found, key=lambda delivery: delivery.client)


def send(
    grid: Grid,
    messages: Sequence[Message],
    clients: Sequence[int],
    timeout: float,
    sending: float | None = None,
) -> "list[AwaitedReply]":
    """Send `messages` (one a client) and start to look for the replies, for `timeout` seconds.

    `sending`: so many of them for the sending (None: all). A grid with `synchronous = True` (in
    one process) is asked once and has answered then.
    """
    if not messages:
        return []
    deadline = time.monotonic() + timeout
    if getattr(grid, "synchronous", False):
        deliveries = _answers(grid, messages, clients, timeout)
        return [AwaitedReply(delivery.client, deadline, delivery) for delivery in deliveries]
    message_ids: list[str | None] = []

    def push() -> Iterable[str]:
        return grid.push_messages(messages)

    with contextlib.suppress(LinkDown):
        message_ids = list(call_within(grid, push, timeout if sending is None else sending))
    if len(message_ids) != len(messages):
        # Nothing tells which of them the server took.
        message_ids = [None] * len(messages)
    awaited = []
    for client, message, message_id in zip(clients, messages, message_ids, strict=True):
        unsent = None if message_id else Delivery(client, None, UNSENT)
        awaited.append(AwaitedReply(client, deadline, unsent))
        if message_id:
            awaited[-1].pull(grid, message, message_id, poll_interval(len(messages)))
    return awaited


def _answers(
    grid: Grid, messages: Sequence[Message], clients: Sequence[int], timeout: float
) -> list[Delivery]:
    """One Delivery a client, of a grid that has answered when it was asked."""
    replies = grid.send_and_receive(messages, timeout=timeout)
    return attribute_replies(replies, messages, clients)


def poll_interval(num_messages: int) -> float:
    """Seconds between two looks for one reply when `num_messages` are awaited."""
    return max(_POLL_SECONDS, num_messages * _POLL_SECONDS_PER_MESSAGE)


def attribute_replies(
    replies: Iterable[Message], messages: Sequence[Message], clients: Sequence[int]
) -> list[Delivery]:
    """One Delivery a client, for replies that came all at once to `messages` (one a client).

    Errors written by the SuperLink carry its own node id, so the message that a reply answers
    decides whose it is, and the node only where messages have no ids. A second reply does not
    count.
    """
    sent = list(zip(messages, clients, strict=True))
    by_message = {m.metadata.message_id: client for m, client in sent if m.metadata.message_id}
    by_node = {m.metadata.dst_node_id: client for m, client in sent}
    found: dict[int, Message] = {}
    for reply in replies:
        answered = reply.metadata.reply_to_message_id
        client = by_message.get(answered)
        if client is None and not (answered and by_message):
            client = by_node.get(reply.metadata.src_node_id)
        if client is not None:
            found.setdefault(client, reply)
    return [
        Delivery(client, found.get(client), "" if client in found else LATE) for client in clients
    ]


class AwaitedReply:
    """The reply to one message, looked for until the deadline in a thread of its own.

    A thread that is held by the grid is left behind: nobody waits for it beyond the deadline.
    """

    def __init__(self, client: int, deadline: float, result: Delivery | None = None) -> None:
        self.client = client
        self._deadline = deadline
        self._late = LATE
        self._result = result
        self._stop: BaseException | None = None
        self._settled = threading.Event()
        if result is not None:
            self._settled.set()

    def pull(self, grid: Grid, message: Message, message_id: str, interval: float) -> None:
        """Start to look for the reply to `message`, which the grid calls `message_id`."""
        arguments = (grid, message, message_id, interval)
        threading.Thread(target=self._look, args=arguments, daemon=True).start()

    def wait(self) -> None:
        """Until there is a result or the deadline has passed."""
        self._settled.wait(max(0.0, self._deadline - time.monotonic()))

    def over(self) -> bool:
        """Whether there is a result or the deadline has passed."""
        return self._settled.is_set() or time.monotonic() >= self._deadline

    def abandon(self) -> None:
        """Stop looking."""
        self._deadline = 0.0

    def delivery(self) -> Delivery:
        """What came, or that nothing did. Raises what the grid raises when the run is over."""
        if self._stop is not None:
            raise self._stop
        return self._result or Delivery(self.client, None, self._late)

    def _look(self, grid: Grid, message: Message, message_id: str, interval: float) -> None:
        allowance = Allowance.for_reply_to(message)
        while time.monotonic() < self._deadline:
            try:
                reply = pull_reply(
                    grid, message_id, allowance, self._deadline, self._note_announced
                )
                if reply is not None:
                    _check_answers(reply, message, message_id)
                    self._settle(Delivery(self.client, reply))
                    return
            except ReplyRefused as refusal:
                self._settle(Delivery(self.client, None, str(refusal)))
                return
            except grpc.RpcError:  # the SuperLink restarts, perhaps: the reply will be there later
                pass
            except Exception as error:  # whatever a client put into its reply ends here
                reason = f"the reply cannot be read: {type(error).__name__}: {error}"
                self._settle(Delivery(self.client, None, reason))
                return
            except BaseException as stop:  # Flower's way to say that the run was stopped
                self._stop = stop
                self._settled.set()
                return
            time.sleep(interval)

    def _note_announced(self) -> None:
        self._late = UNFINISHED

    def _settle(self, result: Delivery) -> None:
        self._result = result
        self._settled.set()


def _check_answers(reply: Message, message: Message, message_id: str) -> None:
    """ReplyRefused for a reply that was made for another message, or for another round.

    The link looks at what a client announces; the reply itself may be an old one.
    """
    answered, group = reply.metadata.reply_to_message_id, reply.metadata.group_id
    if answered and answered != message_id:
        raise ReplyRefused("the reply answers another message: it was sent before, or is forged")
    if reply.has_content() and group != message.metadata.group_id:
        raise ReplyRefused(
            f"the reply is for round {group[:20]!r}, expected {message.metadata.group_id!r}"
        )
