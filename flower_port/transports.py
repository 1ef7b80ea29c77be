"""How a round's messages reach the nodes, and one Delivery a client comes back by a deadline.

A Transport is what a strategy sends through: a grid that has all replies when it was asked
(`synchronous.py`: the engine, simulated attackers), or Flower's own grids behind PullingTransport.

Flower's own `send_and_receive` pulls all replies in one call: a client that announces a reply and
never uploads it holds that call for minutes, and a reply that cannot be read raises out of it; a
call that finds no SuperLink is repeated for ever. PullingTransport pulls every reply on its own, in
its own thread, and every call comes back in time; what a reply may weigh is bounded too
(`pulling.py`).
"""

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from flwr.app import Message
from flwr.serverapp import Grid

from .grids import adapter_of
from .pulling import UNFINISHED, Allowance, GridAdapter, ReplyRefused

LATE = "no reply by the deadline"
UNSENT = "the message could not be sent"
_SURPLUS = "enough others had answered"

T = TypeVar("T")


class LinkDown(RuntimeError):
    """The SuperLink has not answered in time."""


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
    """A round is over when `number` replies are in that pass `counts`, which sees each once."""

    number: int
    counts: Callable[[Delivery], bool]


@dataclass(frozen=True)
class Polling:
    """Seconds between two looks: for one reply (`each` more for every one that is awaited, so that
    a large cohort does not flood the server), at what the threads have found, for new nodes, and
    between two tries of a call whose connection broke."""

    reply: float = 0.1
    each: float = 0.004
    arrival: float = 0.02
    nodes: float = 0.5
    retry: float = 0.5

    def interval(self, num_messages: int) -> float:
        """Seconds between two looks for one reply when `num_messages` are awaited."""
        return max(self.reply, num_messages * self.each)


class AwaitedReply:
    """The reply to one message, for which somebody may wait until the deadline."""

    def __init__(self, client: int, deadline: float, result: Delivery | None = None) -> None:
        self.client = client
        self._deadline = deadline
        self._late = LATE
        self._result = result
        self._stop: BaseException | None = None
        self._settled = threading.Event()
        if result is not None:
            self._settled.set()

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


class Transport(ABC):
    """Carries messages to the nodes; what a client does never raises out of it."""

    polling = Polling()

    @abstractmethod
    def send(
        self,
        messages: Sequence[Message],
        clients: Sequence[int],
        seconds: float,
        sending: float | None = None,
    ) -> list[AwaitedReply]:
        """Send `messages` (one a client) and look for the replies, for `seconds` from now.

        `sending`: so many of them for the sending (None: all).
        """

    @abstractmethod
    def node_ids(self, seconds: float) -> set[int]:
        """Who is connected. Raises LinkDown where that is not known within `seconds`."""

    @property
    def is_closed(self) -> bool:
        """Whether no program but this run's own, on this machine, can be behind it.

        False unless a subclass says so: whoever passes messages on asks what it passes them to
        (`transport_of(grid).is_closed`).
        """
        return False

    def guard_report(self) -> dict[str, Any]:
        """What the SuperLink's guard says of keys and refusals; empty where there is none."""
        return {}

    def exchange(
        self,
        messages: Sequence[Message],
        clients: Sequence[int],
        seconds: float,
        enough: Enough | None = None,
    ) -> list[Delivery]:
        """Send `messages` (one a client); one Delivery a client, in their order, by the deadline.

        Replies that are late, missing or cannot be read come back as a Delivery without message.
        With `enough` it takes no longer than until there are enough: who answers first counts (in
        one process, where all answer at once, who was asked first), and the rest is surplus.
        """
        pending = self.send(messages, clients, seconds)
        if enough is None:
            for reply in pending:
                reply.wait()
            return [reply.delivery() for reply in pending]
        found: dict[int, Delivery] = {}
        good = 0
        while pending and good < enough.number:
            waiting = []
            for reply in pending:
                if good >= enough.number or not reply.over():
                    waiting.append(reply)
                    continue
                found[reply.client] = reply.delivery()
                good += enough.counts(found[reply.client])
            if len(waiting) == len(pending):
                time.sleep(self.polling.arrival)
            pending = waiting
        for reply in pending:
            reply.abandon()
            found[reply.client] = Delivery(reply.client, None, _SURPLUS, surplus=True)
        return [found[client] for client in clients]


def transport_of(grid: Grid | Transport) -> Transport:
    """`grid` itself where it is a transport, else with every reply pulled on its own.

    Raises NotThisFlower for a grid of Flower's that is not known.
    """
    return grid if isinstance(grid, Transport) else PullingTransport(grid)


class PullingTransport(Transport):
    """Flower's own grids (gRPC, HTTP, its simulation's), looked at as often as `polling` says."""

    def __init__(self, grid: Grid, polling: Polling | None = None) -> None:
        self.grid = grid
        self.polling = polling or Polling()
        self._adapter = adapter_of(grid)

    def send(
        self,
        messages: Sequence[Message],
        clients: Sequence[int],
        seconds: float,
        sending: float | None = None,
    ) -> list[AwaitedReply]:
        """Every reply in a thread of its own. One that is held by the grid is left behind: nobody
        waits for it beyond the deadline."""
        if not messages:
            return []
        deadline = time.monotonic() + seconds
        message_ids: list[str | None] = []
        with contextlib.suppress(LinkDown):
            message_ids = list(
                self._call(
                    lambda: self.grid.push_messages(messages),
                    seconds if sending is None else sending,
                )
            )
        if len(message_ids) != len(messages):
            # Nothing tells which of them the server took.
            message_ids = [None] * len(messages)
        interval = self.polling.interval(len(messages))
        awaited: list[AwaitedReply] = []
        for client, message, message_id in zip(clients, messages, message_ids, strict=True):
            if message_id:
                awaited.append(
                    _PulledReply(client, deadline, self._adapter, message, message_id, interval)
                )
            else:
                awaited.append(AwaitedReply(client, deadline, Delivery(client, None, UNSENT)))
        return awaited

    def node_ids(self, seconds: float) -> set[int]:
        """Who is connected, as the SuperLink knows it."""
        return set(self._call(self.grid.get_node_ids, seconds))

    @property
    def is_closed(self) -> bool:
        """True over Flower's own simulation alone: what a grid of somebody's own passes messages
        on to is not known, and a SuperLink has a port that others reach."""
        return self._adapter.is_closed

    def guard_report(self) -> dict[str, Any]:
        """What the guard says, over the grid's own channel."""
        return self._adapter.guard_report()

    def _call(self, call: Callable[[], T], seconds: float) -> T:
        """What `call` to the grid returns or raises, repeated where the connection breaks.

        Raises LinkDown after `seconds`; a call that is still held then is left behind in its
        thread.
        """
        attempt = _Attempt(call, time.monotonic() + seconds, self.polling.retry, self._adapter)
        threading.Thread(target=attempt.run, daemon=True).start()
        if not attempt.ended.wait(seconds) or attempt.connection_error is not None:
            reason = f": {attempt.connection_error}" if attempt.connection_error else ""
            raise LinkDown(f"the SuperLink has not answered within {seconds:g} s{reason}")
        if attempt.error is not None:
            raise attempt.error
        return attempt.results[0]


class _Attempt(Generic[T]):
    """One call in a thread of its own."""

    def __init__(
        self, call: Callable[[], T], deadline: float, retry: float, adapter: GridAdapter
    ) -> None:
        self._call = call
        self._deadline = deadline
        self._retry = retry
        self._adapter = adapter
        self.ended = threading.Event()
        self.results: list[T] = []
        self.error: BaseException | None = None
        self.connection_error: str | None = None

    def run(self) -> None:
        try:
            while not self._tried():
                time.sleep(self._retry)
        except BaseException as error:  # Flower's way to say that the run was stopped, too
            self.error = error
        self.ended.set()

    def _tried(self) -> bool:
        """Whether it makes no sense to try once more."""
        try:
            self.results = [self._call()]
        except self._adapter.connection_errors as error:
            self.connection_error = self._adapter.reason(error)
            return time.monotonic() >= self._deadline
        self.connection_error = None
        return True


class _PulledReply(AwaitedReply):
    """Looks for the reply to `message`, which the grid calls `message_id`, every so often."""

    def __init__(
        self,
        client: int,
        deadline: float,
        adapter: GridAdapter,
        message: Message,
        message_id: str,
        interval: float,
    ) -> None:
        super().__init__(client, deadline)
        arguments = (adapter, message, message_id, interval)
        threading.Thread(target=self._look, args=arguments, daemon=True).start()

    def _look(
        self, adapter: GridAdapter, message: Message, message_id: str, interval: float
    ) -> None:
        allowance = Allowance.for_reply_to(message)
        while time.monotonic() < self._deadline:
            try:
                reply = adapter.pull(message_id, allowance, self._deadline, self._note_announced)
                if reply is not None:
                    _check_answers(reply, message, message_id)
                    self._settle(Delivery(self.client, reply))
                    return
            except ReplyRefused as refusal:
                self._settle(Delivery(self.client, None, str(refusal)))
                return
            except (
                adapter.connection_errors
            ):  # the SuperLink restarts, perhaps: the reply will be there later
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
