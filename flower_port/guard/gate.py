"""Whose request it is, how many of its key are under way, and whether it arrives in time.

gRPC's Python server calls an interceptor when the headers of a request are there, and gives the
request a thread only then: in that thread it would wait for the rest for ever. So whoever has no
registered key is sent to a few threads of their own, a key has no more than its share, and a
request that is not whole in time is cancelled.
"""

import concurrent.futures
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError

from . import clocks, flower
from .checks import Node, Refused, Sizes
from .connections import Connections
from .deadlines import Deadlines
from .limits import Limits
from .records import Records
from .status_codes import CONFIRMS, denied, failed

# A connection is closed when so many requests on it were refused for want of a key.
_REFUSALS_A_CONNECTION = 20
_REFRESH_SECONDS = 2.0
_LARGEST_KEY = 4096
_REFUSERS = 2
_UPLOADS = "PushObject"
_QUESTION = "PullMessages"
# What a key that is not registered may ask: to be.
_INTRODUCTION = "RegisterNode"

Serve = Callable[[Iterator[bytes], grpc.ServicerContext], Any]

_NOT_REGISTERED = "a key that is not registered"
_BUSY = "the server's database is busy"


@dataclass
class _Key:
    """A registered key: its node, and what of it is under way."""

    node: Node
    # Whether it has asked this SuperLink for messages.
    heard: bool = False
    # Whether the operator was told that its clock is ahead.
    clock_told: bool = False
    under_way: int = 0
    # Requests that may be made at once (a bucket that is filled by so many a second).
    budget: float = 0.0
    filled: float = field(default_factory=time.monotonic)


class Gate(grpc.ServerInterceptor):
    """The outermost interceptor of the Fleet API."""

    def __init__(
        self,
        limits: Limits,
        state: flower.FlowerState,
        records: Records,
        connections: Connections,
        sizes: Sizes,
    ) -> None:
        self._limits = limits
        self._state = state
        self._records = records
        self._connections = connections
        self._sizes = sizes
        self._deadlines = Deadlines()
        self._lock = threading.Lock()
        self._keys: dict[bytes, _Key] = {}
        self._strangers = 0
        self._refusals: dict[str, int] = defaultdict(int)
        self._began = time.time()
        threads = concurrent.futures.ThreadPoolExecutor
        self._stranger_threads = threads(int(limits.stranger_calls), thread_name_prefix="strangers")
        # A refusal is an answer that needs no request: it never waits.
        self._refusing_threads = threads(_REFUSERS, thread_name_prefix="refusals")
        self._refresh_wanted = threading.Event()
        self._refresh_wanted.set()
        threading.Thread(target=self._refresh, name="keys", daemon=True).start()

    def intercept_service(
        self,
        continuation: Callable[[Any], Any],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        """Runs in gRPC's own thread: nothing here may wait, not even for the database."""
        if not details.method.startswith(flower.FLEET):
            return continuation(details)
        method = details.method.removeprefix(flower.FLEET)
        key = flower.public_key(details)
        if not 0 < len(key) <= _LARGEST_KEY:
            return self._refuse_stranger("no key")
        barred = self._records.registration(key).barred
        with self._lock:
            known = self._keys.get(key)
        if known is None:
            return self._stranger(method, key, continuation, details)
        handler = flower.signed(continuation, details)
        if isinstance(handler, str):
            # Anybody may know a public key: most of it says nothing about its owner.
            owned = isinstance(handler, flower.WrongClock)
            return self._refuse_stranger(handler, key if owned else b"")
        if barred:
            return self._refuse_barred(key, known, barred)
        with self._lock:
            if known.under_way >= self._limits.key_calls:
                return self._refuse_key(method, key, known)
            known.under_way += 1

        def serve(requests: Iterator[bytes], context: grpc.ServicerContext) -> Any:
            if not context.add_callback(lambda: self._done(known)):
                self._done(known)
                return None
            self._connections.spoke(context.peer(), key)
            ahead = clocks.seconds_ahead(flower.signed_time(details))
            if ahead > clocks.NOTED_SECONDS:
                clocks.tell_the_client(ahead, context)
                if not known.clock_told:
                    known.clock_told = True
                    clocks.tell_the_operator(self._records.name(key), ahead)
            return self._serve_key(method, key, known, handler, requests, context)

        return _handler(serve, handler.response_serializer)

    def _serve_key(
        self,
        method: str,
        key: bytes,
        known: _Key,
        handler: grpc.RpcMethodHandler,
        requests: Iterator[bytes],
        context: grpc.ServicerContext,
        seconds: float | None = None,
    ) -> Any:
        try:
            wait = self._limits.request_seconds if seconds is None else seconds
            body = self._deadlines.read(requests, context, wait)
            limits = self._limits
            most = limits.request_bytes if method == _UPLOADS else limits.announcement_bytes
            self._keep_pace(known)
            request = self._parse(handler, body, most)
            self._check_introduction(key, request)
            known.node.before(method, request)
            if known.node.is_done(method, request):
                return flower.done(method, context)
        except Refused as refusal:
            words = f"{method}: {refusal}"
            node = known.node.node_id
            self._records.refuse(refusal.kind, words, key, node, refusal.offence)
            code = grpc.StatusCode.UNAUTHENTICATED if refusal.away else denied(method)
            context.abort(code, words)
        except flower.database_error():
            _abort(context, grpc.StatusCode.UNAVAILABLE, _BUSY)
        if method == _QUESTION and not known.heard:
            self._hear(known, context)
        response = self._answer(method, key, known.node.node_id, handler, request, context)
        known.node.after(method, request, response)
        return response

    def _hear(self, known: _Key, context: grpc.ServicerContext) -> None:
        """After a restart its next heartbeat may be half a minute away."""
        try:
            self._state.heard(known.node.node_id)
        except Exception:  # whatever the database says, it is not this key's doing
            _abort(context, grpc.StatusCode.UNAVAILABLE, _BUSY)
        known.heard = True

    def _stranger(
        self,
        method: str,
        key: bytes,
        continuation: Callable[[Any], Any],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        """A key that is not known to be registered: it may have been a moment ago."""
        self._refresh_wanted.set()
        with self._lock:
            if self._strangers >= 2 * self._limits.stranger_calls:
                return self._refuse_busy()
            self._strangers += 1
        handler = flower.signed(continuation, details)
        if isinstance(handler, str):
            with self._lock:
                self._strangers -= 1
            return self._refuse_stranger(handler)

        def serve(requests: Iterator[bytes], context: grpc.ServicerContext) -> Any:
            try:
                return self._introduce(method, key, handler, requests, context)
            finally:
                with self._lock:
                    self._strangers -= 1

        return _handler(serve, handler.response_serializer, self._stranger_threads)

    def _introduce(
        self,
        method: str,
        key: bytes,
        handler: grpc.RpcMethodHandler,
        requests: Iterator[bytes],
        context: grpc.ServicerContext,
    ) -> Any:
        seconds = self._limits.stranger_seconds
        if (node_id := self._look_up(key, context)) is not None:
            known = self._know(key, node_id)
            self._connections.spoke(context.peer(), key)
            return self._serve_key(method, key, known, handler, requests, context, seconds)
        if method != _INTRODUCTION:
            self._turn_away(context, _NOT_REGISTERED)
        try:
            body = self._deadlines.read(requests, context, seconds)
            request = self._parse(handler, body, self._limits.stranger_bytes)
            self._check_introduction(key, request)
        except Refused as refusal:
            self._records.refuse(refusal.kind, f"{method}: {refusal}")
            context.abort(grpc.StatusCode.PERMISSION_DENIED, str(refusal))
        return self._answer(method, b"", 0, handler, request, context)

    def _answer(
        self,
        method: str,
        key: bytes,
        node: int,
        handler: grpc.RpcMethodHandler,
        request: Any,
        context: grpc.ServicerContext,
    ) -> Any:
        """What Flower answers; an error that it did not foresee is one line, and names the key."""
        try:
            response = handler.unary_unary(request, context)
        except Exception as error:
            code = context.code()
            if code is not None:  # Flower has refused the request itself
                if code == grpc.StatusCode.UNAUTHENTICATED and self._is_gone(key, node):
                    self._forget(key)
                if not key:
                    self._records.refuse("unauthenticated", f"{method}: {_NOT_REGISTERED}")
                elif code == grpc.StatusCode.INTERNAL:
                    self._records.refuse("failed request", f"{method}: it failed", key, node)
                elif code == grpc.StatusCode.PERMISSION_DENIED:
                    if method == CONFIRMS:
                        return flower.done(method, context)  # its run is over
                    context.set_code(denied(method))
                raise
            what = f"{method}: {type(error).__name__}: {error}"[:200]
            self._records.refuse("failed request", what, key, node)
            context.abort(failed(method, grpc.StatusCode.INTERNAL), "the request cannot be served")
        if method == "UnregisterNode":
            self._forget(key)
        return response

    def _parse(self, handler: grpc.RpcMethodHandler, body: bytes, most: float) -> Any:
        if len(body) > most:
            raise Refused("size", f"a request of {len(body)} bytes, at most {most:.0f} are taken")
        try:
            return handler.request_deserializer(body)
        except DecodeError as error:
            raise Refused("shape", "a request that cannot be read") from error

    def _check_introduction(self, key: bytes, request: Any) -> None:
        if getattr(request, "public_key", key) != key:
            raise Refused("other's key", "a key in the request that did not sign it")

    def _keep_pace(self, known: _Key) -> None:
        """Wait where a key asks more often than it may; it holds up nobody else."""
        rate = self._limits.key_calls_a_second
        with self._lock:
            now = time.monotonic()
            known.budget = min(rate, known.budget + rate * (now - known.filled)) - 1
            known.filled = now
            owed = -known.budget / rate
        if owed > 0:
            time.sleep(min(owed, 1.0))

    def _look_up(self, key: bytes, context: grpc.ServicerContext) -> int | None:
        try:
            return self._state.node_of(key)
        except Exception:  # whatever the database says, it is not this key's doing
            _abort(context, grpc.StatusCode.UNAVAILABLE, _BUSY)

    def _is_gone(self, key: bytes, node_id: int) -> bool:
        """Whether the key is no longer that node's: a new one would have new shares."""
        try:
            return self._state.node_of(key) != node_id
        except Exception:  # the database is busy: it is seen at the key's next request
            return False

    def _know(self, key: bytes, node_id: int) -> _Key:
        with self._lock:
            known = self._keys.get(key)
            if known is None or known.node.node_id != node_id:
                node = Node(node_id, self._limits, self._sizes, self._state, self._began)
                rate = self._limits.key_calls_a_second
                known = self._keys[key] = _Key(node, budget=rate)
            return known

    def _forget(self, key: bytes) -> None:
        with self._lock:
            self._keys.pop(key, None)

    def _refresh(self) -> None:
        """Know the registered keys before they come: a stranger's flood must not keep them out."""
        while True:
            self._refresh_wanted.wait()
            self._refresh_wanted.clear()
            try:
                nodes = self._state.nodes()
            except Exception:  # the database is busy: it is asked again
                self._refresh_wanted.set()
                nodes = {}
            for key, node_id in nodes.items():
                self._know(key, node_id)
            time.sleep(_REFRESH_SECONDS)

    def _done(self, known: _Key) -> None:
        with self._lock:
            known.under_way -= 1

    def _refuse_key(self, method: str, key: bytes, known: _Key) -> grpc.RpcMethodHandler:
        what = f"more than {self._limits.key_calls:g} requests at a time"
        self._records.refuse("requests at a time", what, key, known.node.node_id)
        return self._refusal(failed(method, grpc.StatusCode.RESOURCE_EXHAUSTED), what)

    def _refuse_barred(self, key: bytes, known: _Key, why: str) -> grpc.RpcMethodHandler:
        what = f"its key is barred ({why}) until the operator lifts it: blackthorn register --lift"
        self._records.refuse("barred", what, key, known.node.node_id)
        return self._refusal(grpc.StatusCode.UNAUTHENTICATED, what)

    def _refuse_busy(self) -> grpc.RpcMethodHandler:
        what = "the server has too many requests of keys that are not registered"
        self._records.refuse("requests at a time", what)
        return self._refusal(grpc.StatusCode.UNAVAILABLE, what)

    def _refuse_stranger(self, what: str, owner: bytes = b"") -> grpc.RpcMethodHandler:
        def serve(_requests: Iterator[bytes], context: grpc.ServicerContext) -> Any:
            self._turn_away(context, what, owner)

        return _handler(serve, None, self._refusing_threads)

    def _turn_away(self, context: grpc.ServicerContext, what: str, owner: bytes = b"") -> NoReturn:
        """End a request without a registered key's signature, and the connection after some of
        them; `owner` is the key whose clock alone is wrong."""
        peer = context.peer()
        with self._lock:
            if len(self._refusals) > 10_000:
                self._refusals.clear()
            self._refusals[peer] += 1
            often = self._refusals[peer] >= _REFUSALS_A_CONNECTION
        if owner:
            self._records.refuse("clock", what, owner)
        else:
            self._records.refuse("unauthenticated", what)
        if often:
            self._connections.cut(peer)
        _abort(context, grpc.StatusCode.UNAUTHENTICATED, what)

    def _refusal(self, code: grpc.StatusCode, what: str) -> grpc.RpcMethodHandler:
        def serve(_requests: Iterator[bytes], context: grpc.ServicerContext) -> Any:
            context.abort(code, what)

        return _handler(serve, None, self._refusing_threads)


def _abort(context: grpc.ServicerContext, code: grpc.StatusCode, what: str) -> NoReturn:
    context.abort(code, what)
    raise AssertionError("abort raises")


def _handler(
    serve: Serve,
    serializer: Callable[[Any], bytes] | None,
    threads: concurrent.futures.ThreadPoolExecutor | None = None,
) -> grpc.RpcMethodHandler:
    """`serve` is called before the request is there, and reads it as bytes."""
    if threads is not None:
        vars(serve)["experimental_thread_pool"] = threads
    return grpc.stream_unary_rpc_method_handler(
        serve, request_deserializer=None, response_serializer=serializer
    )
