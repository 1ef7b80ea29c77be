"""Grids that have all replies when they were asked: simulated clients, and their attackers."""

import importlib
import time
from collections.abc import Iterable, Sequence
from uuid import uuid4

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from .grids import Run
from .transports import LATE, AwaitedReply, Delivery, Transport

CLIENT_APP_RAISED = 2  # Flower's code for a ClientApp that raised an exception


class SynchronousGrid(Grid, Transport):
    """A grid that has all replies when it was asked: `send_and_receive` gives them in one call."""

    def __init__(self) -> None:
        as_a_task()
        self._run = Run.create_empty(1)
        self._replies: dict[str, Message] = {}

    def send(
        self,
        messages: Sequence[Message],
        clients: Sequence[int],
        seconds: float,
        sending: float | None = None,  # noqa: ARG002 (nothing is sent)
    ) -> list[AwaitedReply]:
        """The replies, which are all there."""
        deadline = time.monotonic() + seconds
        replies = self.send_and_receive(messages, timeout=seconds) if messages else []
        answers = attribute_replies(replies, messages, clients)
        return [AwaitedReply(answer.client, deadline, answer) for answer in answers]

    def node_ids(self, seconds: float) -> set[int]:  # noqa: ARG002 (nothing here waits)
        """All nodes."""
        return set(self.get_node_ids())

    def set_run(self, run: Run) -> None:
        """Set the run this grid works for."""
        self._run = run

    @property
    def run(self) -> Run:
        """The run this grid works for."""
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """A message to one node (Flower's older form of `Message(...)`)."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Answer the messages at once and keep the replies until they are pulled."""
        sent = list(messages)
        ids = [str(uuid4()) for _ in sent]
        by_node = {reply.metadata.src_node_id: reply for reply in self.send_and_receive(sent)}
        for message_id, message in zip(ids, sent, strict=True):
            self._replies[message_id] = by_node[message.metadata.dst_node_id]
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """The replies to `message_ids`, each once."""
        return [self._replies.pop(i) for i in message_ids if i in self._replies]


def as_a_task() -> None:
    """Let messages be made in this process, which no SuperLink has given a task.

    Flower from 1.38 on asks whose task a new message is of, and takes none that has no answer.
    """
    try:
        identity = importlib.import_module("flwr.supercore.task_identity").TaskIdentity
    except ModuleNotFoundError:
        return
    for name in ("run_id", "node_id", "task_id"):
        if getattr(identity, f"_{name}") is None:
            setattr(identity, name, 0)


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
