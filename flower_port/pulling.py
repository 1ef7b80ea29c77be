"""Replies pulled within bounds.

Its sender decides neither how much of a reply the server downloads, nor how long it takes.

What a reply weighs is not known before it is pulled. Flower announces it as a tree of object ids,
which is its sender's word, or another's, who announced an equal object; only the contents, which
the ids are hashes of, say what it consists of. Objects and bytes are counted as they come; a reply
beyond its allowance is refused in mid-download, and the server is told to forget it. Otherwise the
link would keep it until the run ends.
"""

import json
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import grpc
from flwr.app import Array, Message
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import (
    get_object_body,
    get_object_head_values_from_object_content,
)

from .versions import NotThisFlower, installed

_BYTES_FOR_THE_REST = 2**20
_OBJECTS_FOR_THE_REST = 64
# Flower cuts arrays into chunks of 5 MiB, and lets a node's operator choose another size.
_SMALLEST_CHUNK = 2**20
_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 0.02, 0.1

UNFINISHED = "the reply was announced, but not uploaded by the deadline"


class ReplyRefused(ValueError):
    """The reply is not downloaded; the message is the reason."""


@dataclass(frozen=True)
class Allowance:
    """How many bytes and objects a reply may have."""

    num_bytes: int
    num_objects: int

    @classmethod
    def for_reply_to(cls, message: Message) -> "Allowance":
        """Twice the arrays that were sent, and a mebibyte for all that is not an array."""
        arrays = [a for record in message.content.array_records.values() for a in record.values()]
        num_bytes = 2 * sum(len(array.data) for array in arrays) + _BYTES_FOR_THE_REST
        num_objects = 4 * len(arrays) + num_bytes // _SMALLEST_CHUNK + _OBJECTS_FOR_THE_REST
        return cls(num_bytes, num_objects)


class GridAdapter:
    """A grid with no more than Flower promises: a reply is asked for as a whole.

    Right for a grid in this process, of Flower's simulation or of somebody's own.
    """

    # What is raised where the connection breaks; the same call may pass later.
    connection_errors: tuple[type[Exception], ...] = (grpc.RpcError, ConnectionError)

    def __init__(self, grid: Grid, is_closed: bool = False) -> None:
        """`is_closed`: whether Flower's simulation starts the clients. A SuperLink is reached by
        others, too, and so may be what a grid of somebody's own passes its messages on to."""
        self.grid = grid
        self.is_closed = is_closed

    def pull(
        self,
        message_id: str,
        allowance: Allowance,  # noqa: ARG002 (it is in this process already)
        deadline: float,  # noqa: ARG002
        announced: Callable[[], None] = lambda: None,  # noqa: ARG002
    ) -> Message | None:
        """The reply to `message_id`, None while there is none. Calls `announced` once there is.

        Of a SuperLink at most `allowance` is downloaded (ReplyRefused beyond), until `deadline` on
        the monotonic clock.
        """
        for reply in self.grid.pull_messages([message_id]):
            return reply
        return None

    def reason(self, error: Exception) -> str:
        """A connection error in a word."""
        # gRPC's word for what went wrong, such as UNAVAILABLE.
        code = error.code() if isinstance(error, grpc.Call) else None
        return code.name if code is not None else type(error).__name__

    def guard_report(self) -> dict[str, Any]:
        """What the SuperLink's guard says of keys and refusals; empty where there is no guard, or
        no answer now."""
        return {}


class SuperLinkGrid(GridAdapter, ABC):
    """A grid that is connected with a SuperLink, from which a reply is pulled object by object."""

    def __init__(self, grid: Any, flower: ModuleType) -> None:
        """`flower`: the module of Flower's that defines the grid, with what it is made of."""
        super().__init__(grid)
        self._grid, self._flower = grid, flower
        for name in (
            "PullAppMessagesRequest",
            "ConfirmMessageReceivedRequest",
            "inflate_object_from_contents",
        ):
            if not hasattr(flower, name):
                raise NotThisFlower(
                    f"flwr {installed()} is installed, and changed: no {flower.__name__}.{name}"
                )

    @abstractmethod
    def superlink(self) -> Any:
        """With the methods PullMessages, PullObject and ConfirmMessageReceived."""

    def pull(
        self,
        message_id: str,
        allowance: Allowance,
        deadline: float,
        announced: Callable[[], None] = lambda: None,
    ) -> Message | None:
        """What the grid's own `pull_messages` does for one message, with a limit to everything."""
        superlink, flower = self.superlink(), self._flower
        node, run_id = self._grid.node, self._grid.run.run_id
        answer = superlink.PullMessages(flower.PullAppMessagesRequest(message_ids=[message_id]))
        if not answer.message_object_trees:
            return None
        announced()
        tree = answer.message_object_trees[0]
        try:
            contents = _pull_contents(superlink, node, run_id, tree.object_id, allowance, deadline)
        finally:
            superlink.ConfirmMessageReceived(
                flower.ConfirmMessageReceivedRequest(
                    node=node, run_id=run_id, message_object_id=tree.object_id
                )
            )
        check_chunks(contents, allowance.num_bytes)
        reply = flower.inflate_object_from_contents(tree.object_id, contents)
        if not isinstance(reply, Message):
            raise ReplyRefused(f"the reply is a {type(reply).__name__}, not a message")
        reply.metadata.__dict__["_message_id"] = tree.object_id
        return reply


def _pull_contents(
    superlink: Any,
    node: Any,
    run_id: int,
    root: str,
    allowance: Allowance,
    deadline: float,
) -> dict[str, bytes]:
    """The message's content, and that of all it consists of, by object id."""
    contents: dict[str, bytes] = {}
    num_bytes = 0
    waiting, known = deque([root]), {root}
    while waiting:
        object_id = waiting.popleft()
        content = contents[object_id] = _pull_content(superlink, node, run_id, object_id, deadline)
        num_bytes += len(content)
        if num_bytes > allowance.num_bytes:
            raise ReplyRefused(
                f"the reply has more than the {allowance.num_bytes} bytes that are allowed"
            )
        children = dict.fromkeys(get_object_head_values_from_object_content(content)[1])
        waiting.extend(child for child in children if child not in known)
        known.update(children)
        if len(known) > allowance.num_objects:
            raise ReplyRefused(
                f"the reply has at least {len(known)} parts, expected at most "
                f"{allowance.num_objects}"
            )
    return contents


def check_chunks(contents: Mapping[str, bytes], most: int) -> None:
    """ReplyRefused where the arrays would have more than `most` bytes together.

    An array lists the chunks that it is put together from, and may list one of them many times.
    """
    total = 0
    for content in contents.values():
        kind, children, _ = get_object_head_values_from_object_content(content)
        if kind != Array.__qualname__:
            continue
        listed = json.loads(get_object_body(content, Array))["arraychunk_ids"]
        total += sum(len(contents[children[index]]) for index in listed)
        if total > most:
            raise ReplyRefused(
                f"the reply's arrays would have more than {most} bytes, which is what is allowed: "
                f"one lists {len(listed)} chunks and has {len(children)}"
            )


def _pull_content(superlink: Any, node: Any, run_id: int, object_id: str, deadline: float) -> bytes:
    """One object, waited for until it has been uploaded."""
    from flwr.proto.message_pb2 import PullObjectRequest

    request = PullObjectRequest(node=node, run_id=run_id, object_id=object_id)
    wait = _FIRST_WAIT_SECONDS
    while True:
        answer = superlink.PullObject(request)
        if not answer.object_found:
            raise ReplyRefused("a part of the reply is gone")
        if answer.object_available:
            return bytes(answer.object_content)
        left = deadline - time.monotonic()
        if left <= 0:
            raise ReplyRefused(UNFINISHED)
        time.sleep(min(wait, left))
        wait = min(2 * wait, _LONGEST_WAIT_SECONDS)
