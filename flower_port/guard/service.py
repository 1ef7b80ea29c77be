"""The guard's own calls, in JSON over gRPC, beside Flower's on ports that no client reaches.

/blackthorn.Guard/Report   for ServerApps: who the keys are, and what was refused
/blackthorn.Guard/Keys     for operators: say who a key is, lift a bar, forget a key
"""

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from . import REPORT, flower
from .audit import AuditLog
from .checks import Sizes
from .object_trees import announced_by_a_serverapp
from .records import Records, fingerprint

KEYS = "/blackthorn.Guard/Keys"
_PUSH_OBJECT, _PUSH_MESSAGES = "PushObject", "PushMessages"


class ForServerApps(grpc.ServerInterceptor):
    """Answers Report to who has a running ServerApp's token, and notes what the ServerApps send.
    `is_private`: whether nobody can read what goes between nodes and the Fleet port."""

    def __init__(
        self,
        state: flower.FlowerState,
        records: Records,
        sizes: Sizes,
        is_private: Callable[[], bool],
    ) -> None:
        self._state = state
        self._is_private = is_private
        self._records = records
        self._sizes = sizes

    def intercept_service(
        self, continuation: Callable[[Any], Any], details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler | None:
        """Report's own handler; the others' with what they send noted on the way."""
        if details.method == REPORT:
            return grpc.unary_unary_rpc_method_handler(self._report)
        handler = continuation(details)
        if handler is not None and details.method.endswith(f"/{_PUSH_OBJECT}"):
            return self._noting(handler)
        if handler is not None and details.method.endswith(f"/{_PUSH_MESSAGES}"):
            return _trusting(handler)
        return handler

    def _report(self, _request: bytes, context: grpc.ServicerContext) -> bytes:
        if not self._state.is_task(flower.task_token(context.invocation_metadata())):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "not the token of a running ServerApp")
        nodes, registered = {}, self._state.nodes()
        by_print = {fingerprint(key): node_id for key, node_id in registered.items()}
        for key, node_id in registered.items():
            known = self._records.registration(key)
            nodes[str(node_id)] = {
                "key": known.name or fingerprint(key),
                "client_id": known.client_id,
                "max_examples": known.max_examples,
                "replaces": by_print.get(known.replaces),
            }
        report = {
            "nodes": nodes,
            "refusals": self._records.refusals(),
            "is_private": self._is_private(),
        }
        return json.dumps(report).encode()

    def _noting(self, handler: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
        def note(request: Any, context: grpc.ServicerContext) -> Any:
            response = handler.unary_unary(request, context)
            self._sizes.note(request.object_id, len(request.object_content))
            return response

        return grpc.unary_unary_rpc_method_handler(
            note, handler.request_deserializer, handler.response_serializer
        )


def _trusting(handler: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
    def trust(request: Any, context: grpc.ServicerContext) -> Any:
        with announced_by_a_serverapp():
            return handler.unary_unary(request, context)

    return grpc.unary_unary_rpc_method_handler(
        trust, handler.request_deserializer, handler.response_serializer
    )


# Calls of the Control API that only look.
_LOOKS = ("List", "Get", "Show", "Stream", "Pull")


def _changes_nothing(method: str) -> bool:
    return method.startswith(_LOOKS)


def _numbers(message: Any) -> dict[str, int]:
    """The run and the node that a call or its answer names."""
    fields = {"run": "run_id", "node": "node_id"}
    return {name: int(getattr(message, field, 0)) for name, field in fields.items()}


class ForOperators(grpc.ServerInterceptor):
    """Answers Keys: {"action", "key" (PEM), "name", "client_id", "max_examples", "replaces" (PEM)},
    and writes down what changes who takes part and what runs."""

    def __init__(self, state: flower.FlowerState, records: Records, audit: AuditLog) -> None:
        self._state = state
        self._records = records
        self._audit = audit

    def intercept_service(
        self, continuation: Callable[[Any], Any], details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler | None:
        """Keys' own handler; that of what changes something with a line of the audit log; all
        others as they are."""
        if details.method == KEYS:
            return grpc.unary_unary_rpc_method_handler(self._keys)
        handler = continuation(details)
        method = details.method.rpartition("/")[2]
        if handler is None or handler.unary_unary is None or _changes_nothing(method):
            return handler
        return grpc.unary_unary_rpc_method_handler(
            self._audited(method, handler.unary_unary),
            handler.request_deserializer,
            handler.response_serializer,
        )

    def _audited(self, method: str, serve: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def carry_out(request: Any, context: grpc.ServicerContext) -> Any:
            about = self._about(request)
            with self._writing(context, method, **about) as write:
                try:
                    response = serve(request, context)
                except BaseException:
                    write("refused", **about)
                    raise
                done = "done" if getattr(response, "success", True) else "refused"
                about |= {name: str(n) for name, n in _numbers(response).items() if n}
                write(done, **about)
                return response

        return carry_out

    @contextlib.contextmanager
    def _writing(
        self, context: grpc.ServicerContext, event: str, **about: Any
    ) -> Iterator[Callable[..., None]]:
        """`write(outcome, **about)`, once it is written that somebody asked for the event: what
        cannot be written down is not done."""

        def write(outcome: str, **about: Any) -> None:
            try:
                append(event, by=context.peer(), outcome=outcome, **about)
            except OSError as error:
                words = f"{outcome}, but the audit log cannot be written: {error.strerror}"
                context.abort(grpc.StatusCode.INTERNAL, words)

        with contextlib.ExitStack() as stack:
            try:
                append = stack.enter_context(self._audit.open())
                append(event, by=context.peer(), outcome="asked", **about)
            except OSError as error:
                words = f"not done: the audit log cannot be written: {error.strerror}"
                context.abort(grpc.StatusCode.INTERNAL, words)
            yield write

    def _about(self, request: Any) -> dict[str, str]:
        """Whom a call is about, in the words of the audit log."""
        about = {name: str(number) for name, number in _numbers(request).items() if number}
        key: bytes = getattr(request, "public_key", b"")
        if not key and "node" in about:
            known = {str(node): key for key, node in self._state.nodes().items()}
            key = known.get(about["node"], b"")
        if key:
            about |= {"key": fingerprint(key), "name": self._records.registration(key).name}
        return about

    def _keys(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        try:
            asked = json.loads(request)
            if asked["action"] == "list":
                return json.dumps(self._carry_out(asked)).encode()
            about = {name: asked.get(name) for name in ("name", "client_id", "max_examples")}
            for name in ("key", "replaces"):
                about[name] = fingerprint(asked[name].encode()) if asked.get(name) else None
            with self._writing(context, f"key {asked['action']}", **about) as write:
                answer = json.dumps(self._carry_out(asked)).encode()
                write("done", **about)
                return answer
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise
        except OSError as error:
            context.abort(grpc.StatusCode.INTERNAL, f"{error.strerror}: {error.filename}")
            raise

    def _carry_out(self, asked: dict[str, Any]) -> dict[str, Any]:
        action = asked["action"]
        if action == "list":
            return {"refusals": self._records.refusals()}
        key = asked["key"].encode()
        if action == "lift":
            return {"lifted": self._records.lift(key)}
        if action == "forget":
            self._records.forget(key)
            return {}
        if action != "register":
            raise ValueError(f"action {action!r} is not allowed: list, lift, forget or register")
        changes: dict[str, Any] = {
            field: int(asked[field])
            for field in ("client_id", "max_examples")
            if asked.get(field) is not None
        }
        if asked.get("replaces"):
            changes["replaces"] = fingerprint(asked["replaces"].encode())
        known = self._records.register(key, str(asked["name"]), changes)
        return {"client_id": known.client_id, "max_examples": known.max_examples}
