"""Sending a round's messages and collecting the replies, with a deadline that holds.

Flower's own `send_and_receive` pulls all replies in one call: a client that announces a reply and
never uploads it holds that call for minutes, and a reply that cannot be decoded raises out of it.
Here every reply is pulled on its own, in its own thread, and the deadline is ours.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from flwr.app import Message
from flwr.serverapp import Grid

# Polling is cheap (one small request a reply), but a large cohort must not flood the server.
_POLL_SECONDS = 0.1
_POLL_SECONDS_PER_MESSAGE = 0.004


@dataclass(frozen=True)
class Delivery:
    """What came back from one client: a reply, or the reason why there is none."""

    client: int
    message: Message | None
    problem: str = ""


def exchange(
    grid: Grid, messages: Sequence[Message], clients: Sequence[int], timeout: float
) -> list[Delivery]:
    """Send `messages` (one a client) and return one Delivery a client, at most `timeout` later.

    Never raises for what a client did: replies that are late, missing or cannot be decoded come
    back as a Delivery without message. A grid with `synchronous = True` (in one process) answers
    at once and is asked once.
    """
    if not messages:
        return []
    if getattr(grid, "synchronous", False):
        return _exchange_at_once(grid, messages, clients, timeout)
    deadline = time.monotonic() + timeout
    message_ids = list(grid.push_messages(messages))
    if len(message_ids) != len(messages):
        return [Delivery(client, None, "the message could not be sent") for client in clients]
    pulls = [
        _Pull(grid, client, message_id, deadline, poll_interval(len(messages)))
        for client, message_id in zip(clients, message_ids, strict=True)
    ]
    for pull in pulls:
        pull.start()
    for pull in pulls:
        pull.join(max(0.0, deadline - time.monotonic()))
    return [pull.delivery() for pull in pulls]


def poll_interval(num_messages: int) -> float:
    """Seconds between two looks for one reply when `num_messages` are awaited."""
    return max(_POLL_SECONDS, num_messages * _POLL_SECONDS_PER_MESSAGE)


def _exchange_at_once(
    grid: Grid, messages: Sequence[Message], clients: Sequence[int], timeout: float
) -> list[Delivery]:
    client_of_node = {
        message.metadata.dst_node_id: client
        for message, client in zip(messages, clients, strict=True)
    }
    replies: dict[int, Message] = {}
    for reply in grid.send_and_receive(messages, timeout=timeout):
        client = client_of_node.get(reply.metadata.src_node_id)
        if client is not None:
            replies.setdefault(client, reply)
    return [
        Delivery(client, replies[client]) if client in replies else Delivery(client, None, LATE)
        for client in clients
    ]


LATE = "no reply by the deadline"


class _Pull:
    """Waits for the reply to one message. A thread that never returns is left behind."""

    def __init__(
        self, grid: Grid, client: int, message_id: str | None, deadline: float, interval: float
    ) -> None:
        self._grid = grid
        self._client = client
        self._message_id = message_id
        self._deadline = deadline
        self._interval = interval
        self._result: Delivery | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout: float) -> None:
        self._thread.join(timeout)

    def delivery(self) -> Delivery:
        return self._result or Delivery(self._client, None, LATE)

    def _run(self) -> None:
        if not self._message_id:
            self._result = Delivery(self._client, None, "the message could not be sent")
            return
        while time.monotonic() < self._deadline:
            try:
                replies = list(self._grid.pull_messages([self._message_id]))
            except Exception as error:  # whatever a client put into its reply ends here
                reason = f"the reply cannot be decoded: {type(error).__name__}: {error}"
                self._result = Delivery(self._client, None, " ".join(reason.split())[:300])
                return
            if replies:
                self._result = Delivery(self._client, replies[0])
                return
            time.sleep(self._interval)
