"""Flower's Fleet protocol over gRPC, for programs that are no SuperNodes.

One node's side of it (pull a message, announce a reply, upload it), and what its requests are made
of and signed with.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message

from .versions import with_grpc

with with_grpc():
    from flwr.client.grpc_rere_client.connection import grpc_request_response
    from flwr.client.grpc_rere_client.node_auth_client_interceptor import NodeAuthClientInterceptor
    from flwr.common.constant import PUBLIC_KEY_HEADER, SIGNATURE_HEADER, TIMESTAMP_HEADER
    from flwr.proto import fleet_pb2, message_pb2
    from flwr.proto.error_pb2 import Error
    from flwr.proto.fleet_pb2_grpc import FleetStub
    from flwr.proto.node_pb2 import Node
    from flwr.supercore.date import now
    from flwr.supercore.inflatable.inflatable_object import (
        InflatableObject,
        get_all_nested_objects,
        get_object_tree,
        iterate_object_tree,
        no_object_id_recompute,
    )
    from flwr.supercore.inflatable.inflatable_utils import (
        ObjectPullError,
        ObjectPushError,
        inflate_object_from_contents,
        pull_objects,
    )
    from flwr.supercore.primitives.asymmetric import (
        generate_key_pairs,
        public_key_to_bytes,
        sign_message,
    )
    from flwr.supercore.retry import make_simple_grpc_retry_invoker
    from flwr.supercore.run import RunNotRunningException

__all__ = [
    "METHODS",
    "Announcement",
    "Error",
    "Fleet",
    "FleetStub",
    "Keys",
    "Node",
    "ObjectPullError",
    "ObjectPushError",
    "connected",
    "fleet_pb2",
    "generate_key_pairs",
    "message_pb2",
    "now",
    "public_key_to_bytes",
    "signature",
    "signing",
]

Keys = tuple[ec.EllipticCurvePrivateKey, ec.EllipticCurvePublicKey]
# Before a method's name in a gRPC request.
METHODS = "/flwr.proto.Fleet/"
# A SuperLink that cannot be reached for so long is not waited for any longer.
PATIENCE_SECONDS = 60.0


@dataclass(frozen=True)
class Announcement:
    """A reply that the SuperLink was told of: `missing` are the parts it wants.

    `taken` is False where the SuperLink refused the reply.
    """

    run_id: int
    session: str
    objects: dict[str, InflatableObject]
    missing: list[str]
    upload_part: Callable[[int, str, str, bytes], None]

    @property
    def taken(self) -> bool:
        """Whether the SuperLink awaits the reply's parts: it names those it wants."""
        return bool(self.missing)

    def upload(self, object_id: str) -> None:
        """Upload one part. Raises ObjectPushError if the SuperLink does not store it."""
        content = self.objects[object_id].deflate()
        try:
            self.upload_part(self.run_id, self.session, object_id, content)
        except (grpc.RpcError, RunNotRunningException) as error:
            raise ObjectPushError(object_id, self.run_id, self.session) from error


def signature(keys: Keys) -> list[tuple[str, str | bytes]]:
    """The headers of a request that prove the key, now."""
    moment = now().isoformat()
    return [
        (PUBLIC_KEY_HEADER, public_key_to_bytes(keys[1])),
        (TIMESTAMP_HEADER, moment),
        (SIGNATURE_HEADER, sign_message(keys[0], moment.encode())),
    ]


def signing(channel: grpc.Channel, keys: Keys) -> grpc.Channel:
    """The channel with every call signed."""
    return grpc.intercept_channel(channel, NodeAuthClientInterceptor(*keys))


class Fleet:
    """A registered node's connection to the SuperLink."""

    def __init__(self, connection: tuple[Any, ...]) -> None:
        self.node_id: int = connection[0]
        self._receive, self._send = connection[1:3]
        self._pull, self._push, self._confirm = connection[5:8]

    def receive(self) -> Message | None:
        """The next message for this node with its content, None if there is none."""
        received = self._receive()
        if received is None:
            return None
        head, tree = received
        run_id, message_id = head.metadata.run_id, head.metadata.message_id
        contents = pull_objects(
            [part.object_id for part in iterate_object_tree(tree)],
            lambda object_id: self._pull(run_id, object_id),
            max_time=PATIENCE_SECONDS,
            initial_backoff=0.05,
        )
        self._confirm(run_id, message_id)
        message = inflate_object_from_contents(message_id, contents)
        if not isinstance(message, Message):
            raise TypeError(f"the SuperLink sent a {type(message).__name__}, not a message")
        message.metadata.__dict__["_message_id"] = message_id
        return message

    def announce(self, reply: Message, disguised_as: Message | None = None) -> Announcement:
        """Tell the SuperLink of `reply`, whose parts are to follow.

        With `disguised_as` the announcement's metadata are that reply's, its parts `reply`'s own.
        """
        with no_object_id_recompute():
            reply.metadata.__dict__["_message_id"] = reply.object_id
            head = reply
            if disguised_as is not None:
                head = disguised_as
                head.metadata.__dict__["_message_id"] = reply.object_id
            tree, objects = get_object_tree(reply), get_all_nested_objects(reply)
            try:
                missing, session = self._send(head, tree, 0.0)
            except RunNotRunningException:  # Flower's word for PERMISSION_DENIED
                missing, session = set(), ""
        # Children first: that is the order in which Flower's own nodes upload them.
        order = [object_id for object_id in objects if object_id in missing]
        return Announcement(reply.metadata.run_id, session, objects, order, self._push)

    def deliver(self, reply: Message, disguised_as: Message | None = None) -> bool:
        """Announce `reply` and upload all of it; False if the SuperLink refuses it."""
        announcement = self.announce(reply, disguised_as)
        for object_id in announcement.missing:
            announcement.upload(object_id)
        return announcement.taken


@contextmanager
def connected(
    address: str, root_certificates: bytes | None = None, keys: Keys | None = None
) -> Iterator[Fleet]:
    """Register a node (or be the one of `keys`) at the Fleet API of `address`; sign off later."""
    retry = make_simple_grpc_retry_invoker()
    retry.max_time = PATIENCE_SECONDS
    with grpc_request_response(
        address,
        root_certificates is None,
        retry,
        root_certificates=root_certificates,
        authentication_keys=keys,
    ) as connection:
        yield Fleet(connection)
