"""The guard's own calls, in JSON over gRPC, beside Flower's on ports that no client reaches.

/blackthorn.Guard/Report   for ServerApps: who the keys are, and what was refused
/blackthorn.Guard/Keys     for operators: say who a key is, lift a bar, forget a key
"""

import json
from collections.abc import Callable
from typing import Any

import grpc

from . import REPORT, flower
from .checks import Sizes
from .object_trees import announced_by_a_serverapp
from .records import Records, fingerprint

KEYS = "/blackthorn.Guard/Keys"
_PUSH_OBJECT, _PUSH_MESSAGES = "PushObject", "PushMessages"


class ForServerApps(grpc.ServerInterceptor):
    """Answers Report to who has a running ServerApp's token, and notes what the ServerApps send."""

    def __init__(self, state: flower.FlowerState, records: Records, sizes: Sizes) -> None:
        self._state = state
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
        nodes = {}
        for key, node_id in self._state.nodes().items():
            known = self._records.registration(key)
            nodes[str(node_id)] = {
                "key": known.name or fingerprint(key),
                "client_id": known.client_id,
                "max_examples": known.max_examples,
            }
        return json.dumps({"nodes": nodes, "refusals": self._records.refusals()}).encode()

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


class ForOperators(grpc.ServerInterceptor):
    """Answers Keys: {"action", "key" (PEM), "name", "client_id", "max_examples"}."""

    def __init__(self, records: Records) -> None:
        self._records = records

    def intercept_service(
        self, continuation: Callable[[Any], Any], details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler | None:
        """Keys' own handler; all others as they are."""
        if details.method == KEYS:
            return grpc.unary_unary_rpc_method_handler(self._keys)
        return continuation(details)

    def _keys(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        try:
            return json.dumps(self._carry_out(json.loads(request))).encode()
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
        changes = {
            field: int(asked[field])
            for field in ("client_id", "max_examples")
            if asked.get(field) is not None
        }
        known = self._records.register(key, str(asked["name"]), changes)
        return {"client_id": known.client_id, "max_examples": known.max_examples}
