"""What a registered node may ask: what is its own, and no more than its message needs.

A node answers messages. So the guard remembers which messages each node pulled, how many objects
and bytes they had, and which objects the node announced in its answer; everything that a node
says of itself is compared with that.
"""

import hashlib
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from .clocks import by_our_clock
from .limits import Limits

SUPERLINK = 1
_HEX = frozenset("0123456789abcdef")
_ID_LENGTH = 64
_LONGEST_WORD = 256
# Of a message that this SuperLink did not hand out itself: it was started again in between.
_UNKNOWN_OBJECTS = 4096
_SIZES_REMEMBERED = 50_000
_LONGEST_HEAD = 2**20


class Refused(Exception):
    """A request is refused. `kind` is the word under which it is counted.

    `offence`: no honest program sends it. `away`: the node has to connect anew.
    """

    def __init__(self, kind: str, what: str, offence: bool = True, away: bool = False) -> None:
        super().__init__(what)
        self.kind = kind
        self.offence = offence
        self.away = away


class Store(Protocol):
    """What the checks ask of Flower's state."""

    def addressee(self, message_id: str) -> tuple[int, int, float] | None:
        """The node that a message was sent to, its run, and when, in seconds since 1970; None for
        one that is not there."""

    def messages_to(self, node_id: int, before: float) -> Iterable[tuple[str, int, Any]]:
        """Id, run and object tree of what was sent to a node `before` a moment, in seconds since
        1970, as far as it is kept on disk."""

    def has_run(self, run_id: int) -> bool:
        """Whether there is such a run, under way or ended."""

    def fault(self, message: Any) -> str | None:
        """Why Flower could not read an announced message."""


@dataclass
class Order:
    """A message that a node pulled. `objects` are its ids until it was answered; `taken`: the node
    has confirmed that it has them all."""

    run_id: int
    num_objects: int
    objects: frozenset[str] | None = None
    answer: str = ""
    # How often the answer was announced and taken: a node does so again whose connection broke.
    times: int = 0
    taken: bool = False


@dataclass
class Answer:
    """A reply that was announced: its objects with what each consists of, and its bytes so far.

    `there`: those that Flower has already, of another's message or answer.
    """

    run_id: int
    most_bytes: float
    objects: dict[str, tuple[str, ...]]
    there: frozenset[str] = frozenset()
    sizes: dict[str, int] = field(default_factory=dict)

    def num_bytes(self) -> int:
        """Bytes that the node has uploaded of it, beside those that were there."""
        return sum(self.sizes.values())


class Sizes:
    """How many bytes the objects have that the ServerApps sent."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._largest = 0

    def note(self, object_id: str, num_bytes: int) -> None:
        """Remember an object's size; of too many the oldest is forgotten."""
        with self._lock:
            self._sizes[object_id] = num_bytes
            if len(self._sizes) > _SIZES_REMEMBERED:
                self._sizes.popitem(last=False)

    def total(self, objects: Iterable[str] | None) -> int:
        """Bytes of a message; of one that is not known, of the largest that is."""
        with self._lock:
            if objects is None:
                return self._largest
            total = sum(self._sizes.get(object_id, 0) for object_id in objects)
            self._largest = max(self._largest, total)
            return total


class Node:
    """What one node pulled and announced. Its requests may come in several threads."""

    def __init__(
        self, node_id: int, limits: Limits, sizes: Sizes, store: Store, began: float
    ) -> None:
        self.node_id = node_id
        self._limits = limits
        self._sizes = sizes
        self._store = store
        # What was sent before, another SuperLink may have handed out.
        self._began = began
        self._lock = threading.Lock()
        self._orders: OrderedDict[str, Order] = OrderedDict()
        self._answers: OrderedDict[str, Answer] = OrderedDict()
        self._looked_back = False

    def before(self, method: str, request: Any) -> None:
        """Raises Refused for a request that is not this node's to make."""
        if method not in _NAMELESS and _node_named(request) != self.node_id:
            # So asks who is honest, too, where a key was registered anew: at a server with another
            # state. Flower's SuperNode ends when it is sent away, and is started again.
            what = f"a request that says it is node {_node_named(request)}'s: connect anew"
            raise Refused("another node", what, offence=False, away=True)
        check = _CHECKS.get(method)
        if check is not None:
            with self._lock:
                check(self, request)

    def after(self, method: str, request: Any, response: Any) -> None:
        """Remember the messages that it was given, and that its announcement was taken; what is
        the other nodes' alone is taken from the answer."""
        with self._lock:
            if method == "PullMessages":
                self._pulled(response)
            elif method == "PushMessages":
                self._announced_to_flower(request.messages_list[0].metadata, response)
            elif method == "GetRun":
                # Of all nodes together: less one's own it is the others', round by round.
                for told in ("bytes_sent", "bytes_recv", "clientapp_runtime"):
                    response.run.ClearField(told)
                response.run.status.ClearField("details")

    def _pulled(self, response: Any) -> None:
        pairs = zip(response.messages_list, response.message_object_trees, strict=False)
        for message, tree in pairs:
            self._remember(message.metadata.message_id, message.metadata.run_id, tree)

    def _announced_to_flower(self, metadata: Any, response: Any) -> None:
        """Have the node upload all objects of its answer.

        Flower asks for those alone that it has not: anybody who guesses what another was sent, or
        has answered, would be told whether it is there.
        """
        order = self._orders.get(metadata.reply_to_message_id)
        if order is not None:
            order.times += 1
        answer = self._answers.get(metadata.message_id)
        if answer is not None:
            answer.there = frozenset(answer.objects) - set(response.objects_to_push)
            response.objects_to_push[:] = list(answer.objects)

    def is_done(self, method: str, request: Any) -> bool:
        """Whether Flower has nothing to do for a request that is this node's to make: it has the
        object, or no longer has the message that is confirmed.

        Refused that, a SuperNode would forget the message, but not the answer that it may have by
        then: it would send that one as the next message's, and so be one late for ever.
        """
        with self._lock:
            if method == "PushObject":
                # The same object may be of several answers: the last asked Flower last.
                answers = [a for a in self._answers.values() if request.object_id in a.objects]
                return bool(answers) and request.object_id in answers[-1].there
            asked: str = getattr(request, "message_object_id", "")
            return bool(asked) and asked not in self._orders and not self._store.addressee(asked)

    def _remember(self, message_id: str, run_id: int, tree: Any) -> None:
        ids = frozenset(_ids(tree))
        self._orders[message_id] = Order(run_id, len(ids), ids)
        while len(self._orders) > self._limits.key_messages:
            self._orders.popitem(last=False)

    def _check_push(self, request: Any) -> None:
        if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
            raise Refused("shape", f"{len(request.messages_list)} answers at once, allowed is 1")
        message, tree = request.messages_list[0], request.message_object_trees[0]
        metadata = message.metadata
        by_our_clock(metadata)
        self._check_source(metadata)
        self._check_words(message, request.clientapp_runtime_list)
        if metadata.message_id != tree.object_id:
            raise Refused("shape", "the answer's id is not that of its objects")
        order = self._order(metadata)
        if order.answer and order.answer != metadata.message_id:
            raise Refused("second answer", "a second answer to one message")
        if order.times > self._limits.announcements:
            what = f"an answer that was announced {order.times} times before"
            raise Refused("repeated answer", what, offence=False)
        most = int(self._limits.objects_factor * order.num_objects + self._limits.objects_more)
        objects = flatten(tree, most, int(self._limits.object_depth))
        self._announce(metadata, order, objects)

    def _check_source(self, metadata: Any) -> None:
        if metadata.src_node_id != self.node_id:
            raise Refused("source", f"a message that says it is node {metadata.src_node_id}'s")
        if metadata.dst_node_id != SUPERLINK or not metadata.reply_to_message_id:
            raise Refused("instruction", "a message that is no answer: nodes send nothing else")

    def _check_words(self, message: Any, runtimes: Any) -> None:
        metadata = message.metadata
        words = (metadata.message_type, metadata.group_id, metadata.message_id)
        if max(map(len, words)) > _LONGEST_WORD:
            raise Refused("shape", f"a word of more than {_LONGEST_WORD} characters")
        if -math.inf < metadata.ttl < 0:
            # It has what is left of its message's time.
            what = "an answer that comes after the time that its message had (round-timeout)"
            raise Refused("late answer", what, offence=False)
        numbers = [metadata.ttl, metadata.created_at, *runtimes]
        if len(runtimes) > 1 or not all(math.isfinite(n) and n >= 0 for n in numbers):
            raise Refused("shape", "a time that is not finite, or negative")
        if message.content.ByteSize():
            raise Refused("shape", "content in the announcement: it is uploaded afterwards")
        fault = self._store.fault(message)
        if fault:
            raise Refused("shape", f"what is no message: {fault}")

    def _order(self, metadata: Any) -> Order:
        """The message that is answered; Refused for one that this node was not sent."""
        asked = metadata.reply_to_message_id
        order = self._orders.get(asked)
        if order is None:
            found = self._store.addressee(asked) if len(asked) <= _LONGEST_WORD else None
            if found is None:
                what = "an answer to a message that is not there: it has expired, or never was"
                raise Refused("no message", what, offence=False)
            node_id, run_id, sent = found
            if node_id != self.node_id:
                raise Refused("other's message", f"an answer to a message to node {node_id}")
            if sent > self._began:
                what = "an answer to a message that it was not given"
                raise Refused("no message", what, offence=False)
            order = self._orders[asked] = Order(run_id, _UNKNOWN_OBJECTS)
        if metadata.run_id != order.run_id:
            raise Refused("other's message", "an answer in another run than its message's")
        return order

    def _announce(self, metadata: Any, order: Order, objects: dict[str, tuple[str, ...]]) -> None:
        if metadata.message_id not in self._answers:
            budget = self._limits.bytes_factor * self._sizes.total(order.objects)
            if order.num_objects == _UNKNOWN_OBJECTS and not budget:
                budget = math.inf
            most = budget + self._limits.bytes_more
            self._answers[metadata.message_id] = Answer(metadata.run_id, most, objects)
        order.answer, order.objects = metadata.message_id, None
        while len(self._answers) > self._limits.open_answers:
            self._answers.popitem(last=False)

    def _check_object(self, request: Any) -> None:
        answer = self._announced(request.object_id, request.run_id)
        content = request.object_content
        answer.sizes[request.object_id] = len(content)
        if answer.num_bytes() > answer.most_bytes:
            raise Refused("bytes", f"an answer of more than {answer.most_bytes:.0f} bytes")
        if set(answer.objects[request.object_id]) != head_children(content):
            raise Refused("object tree", "an object consists of others than was announced")
        if hashlib.sha256(content).hexdigest() != request.object_id:
            raise Refused("object", "an object that is not what its id says")

    def _announced(self, object_id: str, run_id: int) -> Answer:
        for answer in self._answers.values():
            if object_id in answer.objects and answer.run_id == run_id:
                return answer
        raise Refused("object", "an object that no open answer of this node has")

    def _check_run(self, request: Any) -> None:
        """Flower looks up the run before it looks whether there is one."""
        if not self._store.has_run(request.run_id):
            raise Refused("no run", f"there is no run {request.run_id}", offence=False)

    def _check_pull(self, request: Any) -> None:
        """Flower gives every object to everybody, and ids follow from contents, which differ by a
        client's id alone: any node could ask who was sent a message, or what it answered."""
        self._check_run(request)
        if self._is_own(request):
            return
        if not self._looked_back:
            # This SuperLink may have been started anew while the node took a message.
            self._looked_back = True
            for message_id, run_id, tree in self._store.messages_to(self.node_id, self._began):
                if message_id not in self._orders:
                    self._remember(message_id, run_id, tree)
            if self._is_own(request):
                return
        what = "an object of no message that this node is taking"
        raise Refused("other's object", what, offence=False)

    def _is_own(self, request: Any) -> bool:
        return any(
            request.object_id in (order.objects or ()) and request.run_id == order.run_id
            for order in self._orders.values()
            if not order.taken
        )

    def _check_confirm(self, request: Any) -> None:
        """Flower deletes what is confirmed, so that it must be this node's."""
        self._check_run(request)
        order = self._orders.get(request.message_object_id)
        if order is not None:
            order.taken = True
            return
        found = self._store.addressee(request.message_object_id)
        if found is not None and found[0] != self.node_id:
            raise Refused("other's message", f"to confirm a message to node {found[0]}")


_CHECKS: dict[str, Callable[[Node, Any], None]] = {
    "PushMessages": Node._check_push,
    "PushObject": Node._check_object,
    "PullObject": Node._check_pull,
    "ConfirmMessageReceived": Node._check_confirm,
}


# What is asked with a key in place of a node.
_NAMELESS = "RegisterNode", "ActivateNode"


def _node_named(request: Any) -> int:
    """The node that a request says it is."""
    if hasattr(request, "node_id"):
        return int(request.node_id)
    return int(request.node.node_id)


def flatten(tree: Any, most: int, depth: int) -> dict[str, tuple[str, ...]]:
    """The objects of an ObjectTree, and of which others each consists.

    Raises Refused for more than `most` objects (equal ones count as often as they occur, since
    Flower visits each), for more than `depth` levels, and where one id has different parts: Flower
    would multiply them.
    """
    found: dict[str, tuple[str, ...]] = {}
    waiting = [(tree, 1)]
    count = 0
    while waiting:
        part, level = waiting.pop()
        count += 1
        if count > most:
            total = sum(1 for _ in _ids(tree))
            raise Refused("object tree", f"{total} object ids, at most {most} are taken")
        if level > depth:
            raise Refused("object tree", f"objects in more than {depth} levels")
        if len(part.object_id) != _ID_LENGTH or not _HEX.issuperset(part.object_id):
            raise Refused("object tree", "an object id that is no SHA-256")
        children = tuple(child.object_id for child in part.children)
        if len(set(children)) != len(children):
            raise Refused("object tree", "an object that consists of one part twice")
        if found.setdefault(part.object_id, children) != children:
            raise Refused("object tree", "an object that consists of different parts")
        waiting.extend((child, level + 1) for child in part.children)
    return found


def _ids(tree: Any) -> Iterable[str]:
    waiting = [tree]
    while waiting:
        part = waiting.pop()
        yield part.object_id
        waiting.extend(part.children)


def head_children(content: bytes) -> set[str]:
    """The ids in an object's head: `CLASS ID,ID,... LENGTH` before a zero byte."""
    end = content.find(b"\x00", 0, _LONGEST_HEAD)
    words = content[: max(end, 0)].decode("utf-8", errors="replace").split(" ")
    if len(words) != 3:
        raise Refused("object", "an object without a head")
    return {word for word in words[1].split(",") if word}
