"""Flower's real Fleet API over gRPC in this process, with a guard or without, and a run that waits.

The state is Flower's own, in memory or in SQLite; nodes and messages are put there directly, as
the Control API and a ServerApp would.
"""

import contextlib
import importlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto import fleet_pb2, message_pb2
from flwr.proto.node_pb2 import Node as NodeProto
from flwr.server.superlink.fleet.grpc_rere.node_auth_server_interceptor import (
    NodeAuthServerInterceptor,
)
from flwr.supercore.constant import NOOP_FEDERATION_ID
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
from flwr.superlink.config_loader import (
    get_federation_manager,
    get_objectstore_linkstate_factories,
)

from blackthorn.attacks.rogue.server_attacks import Peer
from blackthorn.flower_port.fleet import Keys
from blackthorn.flower_port.guard import flower
from blackthorn.flower_port.guard.checks import Sizes
from blackthorn.flower_port.guard.connections import Connections
from blackthorn.flower_port.guard.gate import Gate
from blackthorn.flower_port.guard.limits import Limits
from blackthorn.flower_port.guard.records import Records
from blackthorn.launch.federation.addresses import LOOPBACK, free_loopback_ports
from blackthorn.launch.federation.certs import make

MEMORY = ":flwr-in-memory:"
_HEARTBEAT_SECONDS = 5.0


@dataclass
class Fleet:
    """The API's address, its state, and what the guard wrote down (None: there is no guard)."""

    address: str
    ca: bytes | None
    state: Any
    records: Records | None
    sizes: Sizes
    run_id: int
    is_private: bool
    sent: list[str] = field(default_factory=list)

    def node(self) -> Peer:
        """A registered node with a key of its own, which is connected."""
        keys: Keys = generate_key_pairs()
        key = public_key_to_bytes(keys[1])
        node_id = self.state.create_node("", "", key, 60.0)
        peer = Peer(self.address, self.ca, keys, node_id)
        self.activate(peer)
        return peer

    def activate(self, peer: Peer) -> None:
        """The node connects, as far as it is let."""
        request = fleet_pb2.ActivateNodeRequest(
            public_key=peer.public_key(), heartbeat_interval=60.0
        )
        with peer.stub() as stub:
            stub.ActivateNode(request, timeout=20)

    def stranger(self) -> Peer:
        """Who has a key that nobody registered."""
        return Peer(self.address, self.ca, generate_key_pairs(), 4711)

    def content(self, num_parameters: int = 1000, of: int | None = None) -> RecordDict:
        """What a message has in it: the next one, or the one after so many."""
        of = len(self.sent) if of is None else of
        rng = np.random.default_rng(of)
        model = rng.standard_normal(num_parameters).astype(np.float32)
        return RecordDict(
            {
                "arrays": ArrayRecord({"w": Array(model), "b": Array(model[:10].copy())}),
                "config": ConfigRecord({"server-round": of + 1}),
            }
        )

    def send(self, peer: Peer, num_parameters: int = 1000) -> str:
        """A train message for the node, as a ServerApp sends it; its id."""
        message = Message(
            self.content(num_parameters), peer.node_id, "train", ttl=600.0, group_id="1"
        )
        with no_object_id_recompute():
            head = message.metadata.__dict__
            head.update(_run_id=self.run_id, _src_node_id=1)
            head.update(_message_id=message.object_id)
            tree, objects = get_object_tree(message), get_all_nested_objects(message)
            session = self.state.start_session(self.run_id)
            bare = Message(RecordDict(), peer.node_id, "train", ttl=600.0, group_id="1")
            bare.metadata.__dict__.update(vars(message.metadata))
            stored, missing = self.state.store_message_and_object_tree(bare, tree, session)
            assert stored
            for object_id in missing:
                content_of = objects[object_id].deflate()
                assert self.state.store_object(self.run_id, session, object_id, content_of)
                self.sizes.note(object_id, len(content_of))
            self.sent.append(message.object_id)
            return message.object_id

    def pull(self, peer: Peer, stub: Any = None) -> message_pb2.Message:
        """The node pulls its next message (over `stub`, or a connection of its own)."""
        with peer.stub() if stub is None else contextlib.nullcontext(stub) as stub:
            request = fleet_pb2.PullMessagesRequest(node=NodeProto(node_id=peer.node_id))
            response = stub.PullMessages(request, timeout=20)
        message = response.messages_list[0]
        peer.order = message.metadata
        return message

    def answer(
        self,
        peer: Peer,
        num_parameters: int = 1000,
        content: RecordDict | None = None,
        ahead: float = 0.0,
    ) -> None:
        """The node, whose clock is `ahead` by seconds, pulls a message, answers it as a SuperNode
        would, and uploads the answer."""
        with peer.stub() as stub:
            order = message_from_proto(self.pull(peer, stub))
            head, tree, objects = answer_to(order, num_parameters, content)
            # Its maker has what is left of the message's time, by the clock that dates it.
            head.metadata.created_at += ahead
            head.metadata.ttl -= ahead
            node = NodeProto(node_id=peer.node_id)
            request = fleet_pb2.PushMessagesRequest(
                node=node, messages_list=[head], message_object_trees=[tree]
            )
            pushed = stub.PushMessages(request, timeout=20)
            for object_id in pushed.objects_to_push:
                upload = message_pb2.PushObjectRequest(
                    node=node,
                    run_id=self.run_id,
                    object_id=object_id,
                    object_content=objects[object_id].deflate(),
                    session_id=pushed.session_id,
                )
                assert stub.PushObject(upload, timeout=20).stored

    def refused(self, peer: Peer | None = None) -> dict[str, int]:
        """How often what was refused of the peer's key, or of strangers."""
        assert self.records is not None
        key = self.records.name(peer.public_key()) if peer is not None else "unknown keys"
        found = [entry for entry in self.records.refusals() if entry["key"] == key]
        return {entry["kind"]: entry["count"] for entry in found}


def answer_to(
    order: Message, num_parameters: int = 1000, content: RecordDict | None = None
) -> tuple[message_pb2.Message, message_pb2.ObjectTree, dict[str, Any]]:
    """An honest answer: its announcement, its tree, and its objects."""
    if content is None:
        weights = np.random.default_rng(num_parameters).standard_normal(num_parameters)
        arrays = ArrayRecord({"w": Array(weights.astype(np.float32))})
        content = RecordDict({"arrays": arrays})
    reply = Message(content, reply_to=order)
    with no_object_id_recompute():
        reply.metadata.__dict__["_message_id"] = reply.object_id
        tree, objects = get_object_tree(reply), get_all_nested_objects(reply)
        bare = Message(RecordDict(), reply_to=order)
        bare.metadata.__dict__.update(vars(reply.metadata))
    return message_to_proto(bare), tree, objects


@contextlib.contextmanager
def fleet(
    folder: Path,
    *,
    guarded: bool = True,
    database: str | None = None,
    tls: bool = True,
    limits: Limits | None = None,
    bind: str = LOOPBACK,
) -> Iterator[Fleet]:
    """A Fleet API with node authentication; the run is under way."""
    limits = limits or Limits()
    certificates = _certificates(folder) if tls else None
    stores, states = get_objectstore_linkstate_factories(
        database or str(folder / "superlink.db"), get_federation_manager()
    )
    state = states.state()
    sizes = Sizes()
    records = Records(folder / "guard", int(limits.offences)) if guarded else None
    # The package holds a function of the same name.
    module = vars(importlib.import_module("flwr.superlink.cli.flower_superlink"))
    make_server = module["generic_create_grpc_server"]
    if records is not None:
        connections = Connections(limits, records.refuse)
        module["generic_create_grpc_server"] = flower.guarded(
            limits,
            lambda seen: Gate(limits, seen, records, connections, sizes),
            connections.watch,
        )
    try:
        server = module["_run_fleet_api_grpc_rere"](
            f"{bind}:{free_loopback_ports(1)[0]}",
            states,
            stores,
            True,
            certificates,
            [NodeAuthServerInterceptor(states)],
        )
    finally:
        module["generic_create_grpc_server"] = make_server
    is_private = records is not None and connections.is_private
    port = server.bound_address.rpartition(":")[2]
    host = "localhost" if tls else LOOPBACK
    ca = (folder / "certs" / "ca.crt").read_bytes() if tls else None
    run_id, task_id = _running_run(state)
    try:
        with _living(state, task_id):
            yield Fleet(f"{host}:{port}", ca, state, records, sizes, run_id, is_private)
    finally:
        server.stop(0).wait(10)


def _certificates(folder: Path) -> tuple[bytes, bytes, bytes]:
    certs = folder / "certs"
    if not certs.exists():
        make(certs, ["localhost"], [])
    ca, certificate, key = (
        (certs / name).read_bytes() for name in ("ca.crt", "server.pem", "server.key")
    )
    return ca, certificate, key


def _running_run(state: Any) -> tuple[int, int]:
    """The ids of a run that is under way, and of its ServerApp's task."""
    run_id: int = state.create_run(
        "app", "1", "hash", {}, NOOP_FEDERATION_ID, None, "aid", "flwr-serverapp"
    )
    assert run_id
    (task,) = state.get_tasks(run_ids=[run_id])
    assert state.claim_task(task.task_id) and state.activate_task(task.task_id)
    return run_id, task.task_id


@contextlib.contextmanager
def _living(state: Any, task_id: int) -> Iterator[None]:
    """The ServerApp of the task lives, however long its messages take."""
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(_HEARTBEAT_SECONDS):
            state.acknowledge_task_heartbeat(task_id)

    beating = threading.Thread(target=beat, name="heartbeat", daemon=True)
    beating.start()
    try:
        yield
    finally:
        ended.set()
        beating.join()
