"""Everything of the guard that relies on what Flower does not promise.

Flower's SuperLink makes three gRPC servers with one function that its modules import by name. Here
the Fleet API's is made anew, with the guard's limits and interceptors; the ServerApps' and the
operators' get an interceptor that answers the guard's own calls.
"""

import concurrent.futures
import contextlib
import importlib
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import grpc

from ..versions import NotThisFlower, check_grpc
from . import clocks
from .connections import is_loopback
from .limits import Limits
from .object_trees import hear_all

_FLEET_MODULE = "flwr.superlink.cli.flower_superlink"
_RUNTIME_MODULE = "flwr.superlink.servicer.runtime.runtime_grpc"
_CONTROL_MODULE = "flwr.superlink.servicer.control.control_grpc"
_MAKE_SERVER = "generic_create_grpc_server"
# Refused with these, the SuperLink's Fleet API would be another one than the guard's.
_UNGUARDED = ("--fleet-api-type", "--enable-http-api")
# What gRPC itself may buffer beyond a request that the gate would refuse by its size.
_FRAMING = 64 * 1024
_LONGEST_FAULT = 100

PING_SECONDS = 10
FLEET = "/flwr.proto.Fleet/"


class FlowerState:
    """Flower's LinkState and object store, asked for what the guard must know of them."""

    def __init__(self, state_factory: Any, store_factory: Any) -> None:
        self._state_factory = state_factory
        self._store_factory = store_factory

    def node_of(self, key: bytes) -> int | None:
        """The node of a key that is registered."""
        found: int | None = self._state_factory.state().get_node_id_by_public_key(key)
        return found

    def nodes(self) -> dict[bytes, int]:
        """Every registered key's node."""
        found = self._state_factory.state().get_node_info()
        return {one.public_key: one.node_id for one in found if one.status != "unregistered"}

    def forget_who_is_there(self) -> None:
        """Nobody has spoken to this SuperLink yet, whatever the one before it heard.

        Messages under way still wait for their nodes as long as before. A node that was killed,
        too, is let in at once.
        """
        state = self._state_factory.state()
        if not hasattr(state, "session"):
            # In memory: nothing is left of a SuperLink before.
            return
        from flwr.server.superlink.linkstate.sql_linkstate import NodeModel, NodeStatus
        from sqlalchemy import update

        online = update(NodeModel).where(NodeModel.status == NodeStatus.ONLINE)
        with state.session() as session:
            session.execute(online.values(status=NodeStatus.OFFLINE))

    def heard(self, node_id: int) -> None:
        """A node has spoken: it is there, as if this had been a heartbeat."""
        state = self._state_factory.state()
        for node in state.get_node_info(node_ids=[node_id]):
            state.acknowledge_node_heartbeat(node_id, node.heartbeat_interval)

    def addressee(self, message_id: str) -> tuple[int, int, float] | None:
        """The node that a message was sent to, its run, and when it was sent (seconds since 1970);
        None for one that is not there."""
        state = self._state_factory.state()
        if hasattr(state, "message_ins_store"):
            message = state.message_ins_store.get(message_id)
            if message is None:
                return None
            head = message.metadata
            return head.dst_node_id, head.run_id, head.created_at
        row = state.get_valid_message_ins(message_id)
        if row is None:
            return None
        # SQLite has no unsigned integers.
        return row["dst_node_id"] % 2**64, row["run_id"] % 2**64, row["created_at"]

    def messages_to(self, node_id: int, before: float) -> Iterator[tuple[str, int, Any]]:
        """Id, run and object tree of what was sent to a node `before` a moment and not confirmed,
        as far as it is kept on disk: in memory nothing is left of a SuperLink before."""
        state, objects = self._state_factory.state(), self._store_factory.store()
        if not hasattr(state, "session"):
            return
        from flwr.server.superlink.linkstate.sql_linkstate import MessageInsModel as Sent
        from flwr.supercore.object_store.object_store import NoObjectInStoreError
        from flwr.supercore.utils import uint64_to_int64
        from sqlalchemy import select

        to_it = Sent.dst_node_id == uint64_to_int64(node_id), Sent.created_at <= before
        with state.session() as session:
            found = session.execute(select(Sent.message_id, Sent.run_id).where(*to_it)).all()
        for message_id, run_id in found:
            with contextlib.suppress(NoObjectInStoreError):
                yield message_id, run_id % 2**64, objects.get_object_tree(message_id)

    def has_run(self, run_id: int) -> bool:
        """Whether there is such a run, under way or ended."""
        return run_id in self._state_factory.state().get_run_status({run_id})

    def fault(self, message: Any) -> str | None:
        """Why Flower could not read an announced message: it raises what it says of it."""
        # Imported here: who only asks for the version has no need of it.
        from flwr.common.serde import message_from_proto

        try:
            message_from_proto(message)
        except Exception as error:
            return f"{error}"[:_LONGEST_FAULT]
        return None

    def is_task(self, token: str) -> bool:
        """Whether it is the token of a ServerApp that runs."""
        return self._state_factory.state().get_task_by_token(token) is not None


MakeInterceptor = Callable[[FlowerState], grpc.ServerInterceptor]


def install(
    limits: Limits,
    gate: MakeInterceptor,
    for_serverapps: MakeInterceptor,
    for_operators: MakeInterceptor,
    listening: Callable[[int, bool], None],
) -> None:
    """Put the guard into Flower's modules; `listening` is told the Fleet API's port, and whether
    nobody can read what goes over it.

    Raises NotThisFlower.
    """
    check_grpc()
    names = _FLEET_MODULE, _RUNTIME_MODULE, _CONTROL_MODULE
    fleet, runtime, control = (vars(importlib.import_module(name)) for name in names)
    for name, module in zip(names, (fleet, runtime, control), strict=True):
        if not callable(module.get(_MAKE_SERVER)):
            raise NotThisFlower(f"the installed flwr is changed: {name} has no {_MAKE_SERVER}")
    fleet[_MAKE_SERVER] = guarded(limits, gate, listening)
    for module, make in ((runtime, for_serverapps), (control, for_operators)):
        module[_MAKE_SERVER] = _with_interceptor(module[_MAKE_SERVER], make)


def guarded(
    limits: Limits, gate: MakeInterceptor, listening: Callable[[int, bool], None]
) -> Callable[..., grpc.Server]:
    """What makes the Fleet API's server in the place of Flower's own function."""

    def fleet(servicer_and_add_fn: tuple[Any, Any], server_address: str, **rest: Any) -> Any:
        servicer, add = servicer_and_add_fn
        state = FlowerState(servicer.state_factory, servicer.objectstore_factory)
        state.forget_who_is_there()
        hear_all()
        clocks.take_clocks_ahead()
        interceptors = _around(gate(state), rest.get("interceptors"))
        certificates = rest.get("certificates")
        server = _fleet_server(limits, server_address, certificates, interceptors)
        add(servicer, server)
        host, _, port = server.bound_address.rpartition(":")
        listening(int(port), certificates is not None or is_loopback(host.strip("[]")))
        return server

    return fleet


def check_arguments(arguments: Sequence[str]) -> None:
    """ValueError for an argument that would lead around the guard."""
    for option in _UNGUARDED:
        if any(argument.partition("=")[0] == option for argument in arguments):
            raise ValueError(f"{option} is not allowed: the guard knows the gRPC Fleet API alone")


def run_superlink() -> None:
    """Flower's own program with its own arguments."""
    entry: Callable[[], None] = vars(importlib.import_module(_FLEET_MODULE))["flower_superlink"]
    entry()


def cut_log_lines(most: int) -> None:
    """Let no line of Flower's log, or of gRPC's, have more than `most` characters."""
    importlib.import_module("flwr.common.logger")
    for name in ("flwr", "grpc._server", "grpc"):
        logger = logging.getLogger(name)
        logger.addFilter(_Cut(most))


def signed(
    continuation: Callable[[Any], Any], details: grpc.HandlerCallDetails
) -> grpc.RpcMethodHandler | str:
    """The method's handler; where Flower does not take the request's signature, why not."""
    try:
        handler = continuation(details)
    except Exception:  # a key, a signature or a time that cannot even be read
        return _UNSIGNED
    if handler is None:
        return "a method that the Fleet API does not have"
    if handler.request_deserializer is not None:
        return handler
    # Flower refuses with a handler that reads no request, and says why when it is called.
    try:
        handler.unary_unary(b"", _Refusing())
    except _Refused as refused:
        if "timestamp" in str(refused):
            return WrongClock(clocks.refusal(clocks.seconds_ahead(signed_time(details))))
    return _UNSIGNED


_UNSIGNED = "a signature that is not the key's"


class WrongClock(str):
    """Why a signature is not taken that is the key's own: its owner's clock is too far off."""


class _Refused(Exception):
    """With what a handler of Flower's would end a request."""


class _Refusing:
    """In the place of a request's context, for a handler that only refuses."""

    def __init__(self) -> None:
        self._code: grpc.StatusCode | None = None

    def abort(self, code: grpc.StatusCode, words: str) -> NoReturn:
        self._code = code
        raise _Refused(words)

    def code(self) -> grpc.StatusCode | None:
        return self._code


def done(method: str, context: grpc.ServicerContext) -> Any:
    """The answer to an object that was uploaded, or a message that was confirmed."""
    from flwr.proto.message_pb2 import ConfirmMessageReceivedResponse, PushObjectResponse

    context.set_code(grpc.StatusCode.OK)
    context.set_details("")
    return (
        PushObjectResponse(stored=True)
        if method == "PushObject"
        else ConfirmMessageReceivedResponse()
    )


def database_error() -> type[Exception]:
    """What is raised where the database does not answer in time."""
    from sqlalchemy.exc import OperationalError

    return OperationalError


def public_key(details: grpc.HandlerCallDetails) -> bytes:
    """The key that the request says it is signed with; empty where it names none."""
    from flwr.common.constant import PUBLIC_KEY_HEADER

    return _header(details.invocation_metadata, PUBLIC_KEY_HEADER)


def signed_time(details: grpc.HandlerCallDetails) -> bytes:
    """When the request says it was signed."""
    from flwr.common.constant import TIMESTAMP_HEADER

    return _header(details.invocation_metadata, TIMESTAMP_HEADER)


def task_token(metadata: Any) -> str:
    """The token of a ServerApp's call."""
    from flwr.supercore.constant import TASK_TOKEN_HEADER

    return _header(metadata, TASK_TOKEN_HEADER).decode(errors="replace")


def _header(metadata: Any, name: str) -> bytes:
    for key, value in metadata or ():
        if key == name:
            return value if isinstance(value, bytes) else value.encode()
    return b""


class StoreBusy(grpc.ServerInterceptor):
    """Says UNAVAILABLE where the database did not answer in time: the same call may pass later.

    Flower says INTERNAL, on which nodes, ServerApps and executors give up.
    """

    def intercept_service(
        self, continuation: Callable[[Any], Any], details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler | None:
        """The handler, whose OperationalError becomes UNAVAILABLE; streams are left alone."""
        handler = continuation(details)
        if handler is None or handler.unary_unary is None:
            return handler

        def patient(request: Any, context: grpc.ServicerContext) -> Any:
            try:
                return handler.unary_unary(request, context)
            except database_error():
                context.abort(grpc.StatusCode.UNAVAILABLE, "the server's database is busy")

        return grpc.unary_unary_rpc_method_handler(
            patient, handler.request_deserializer, handler.response_serializer
        )


def _fleet_server(
    limits: Limits,
    address: str,
    certificates: tuple[bytes, bytes, bytes] | None,
    interceptors: Sequence[grpc.ServerInterceptor],
) -> grpc.Server:
    """As Flower's own, but for the limits."""
    from flwr.supercore.address import is_port_in_use

    if is_port_in_use(address):
        sys.exit(f"Port in server address {address} is already in use.")
    streams = int(2 * limits.key_calls)
    options = [
        # One connection has one key, of whose requests there are no more.
        ("grpc.max_concurrent_streams", streams),
        ("grpc.max_receive_message_length", int(limits.request_bytes) + _FRAMING),
        ("grpc.max_send_message_length", -1),
        ("grpc.server_handshake_timeout_ms", int(1000 * limits.stranger_seconds)),
        ("grpc.keepalive_time_ms", 210_000),
        # A client may ping so often; after the second ping too many it is cut off.
        ("grpc.http2.min_ping_interval_without_data_ms", 1000 * PING_SECONDS),
        ("grpc.http2.max_ping_strikes", 2),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.keepalive_permit_without_calls", 0),
        # Two SuperLinks must not share a port.
        ("grpc.so_reuseport", 0),
    ]
    server = grpc.server(
        concurrent.futures.ThreadPoolExecutor(max_workers=1000, thread_name_prefix="fleet"),
        interceptors=interceptors,
        options=options,
    )
    if certificates is None:
        port = server.add_insecure_port(address)
    else:
        root, certificate, key = certificates
        credentials = grpc.ssl_server_credentials(((key, certificate),), root, False)
        port = server.add_secure_port(address, credentials)
    vars(server)["bound_address"] = f"{address.rpartition(':')[0]}:{port}"
    return server


def _with_interceptor(make_server: Callable[..., Any], make: MakeInterceptor) -> Callable[..., Any]:
    def wrapped(servicer_and_add_fn: tuple[Any, Any], **rest: Any) -> Any:
        servicer = servicer_and_add_fn[0]
        state = FlowerState(_factory(servicer, "state", "linkstate"), servicer.objectstore_factory)
        rest["interceptors"] = _around(make(state), rest.get("interceptors"))
        return make_server(servicer_and_add_fn=servicer_and_add_fn, **rest)

    return wrapped


def _around(ours: grpc.ServerInterceptor, flowers: Any) -> list[grpc.ServerInterceptor]:
    """Ours before Flower's, and StoreBusy behind the first, which translates errors."""
    first, *rest = flowers
    return [ours, first, StoreBusy(), *rest]


def _factory(servicer: Any, *names: str) -> Any:
    return next(v for n in names if (v := getattr(servicer, f"{n}_factory", None)) is not None)


class _Cut(logging.Filter):
    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if len(text) > self._most:
            record.msg = f"{text[: self._most]} ... ({len(text)} characters)"
            record.args = ()
        # A traceback can hold as much again.
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            text = f"{type(error).__name__}: {error}"
            record.exc_info = record.exc_text = None
            record.msg = f"{record.msg}: {text[: self._most]}"
        return True
