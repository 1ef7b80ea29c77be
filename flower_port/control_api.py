"""What the SuperLink's Control API says about runs and nodes, asked in-process over gRPC.

`flwr list` answers the same questions at the price of a new Python that imports Flower.
"""

import json
from dataclasses import dataclass
from typing import Any

import grpc
from flwr.common.constant import Status, SubStatus
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    ListRunsRequest,
    RegisterNodeRequest,
    StopRunRequest,
    StreamLogsRequest,
    UnregisterNodeRequest,
)
from flwr.proto.control_pb2_grpc import ControlStub
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

_CALL_SECONDS = 10.0


@dataclass(frozen=True)
class RunStatus:
    """`state`: pending, starting, running or finished; a finished run has an `outcome`."""

    state: str
    outcome: str
    details: str

    @property
    def running(self) -> bool:
        """Whether its ServerApp is at work: neither waiting for one nor finished."""
        return self.state == Status.RUNNING

    @property
    def finished(self) -> bool:
        """Whether it is over, however it went; `outcome` tells how."""
        return self.state == Status.FINISHED

    @property
    def completed(self) -> bool:
        """Whether its ServerApp ended without an error."""
        return self.finished and self.outcome == SubStatus.COMPLETED

    @property
    def stopped(self) -> bool:
        """An operator has ended it."""
        return self.finished and self.outcome == SubStatus.STOPPED

    def __str__(self) -> str:
        return f"{self.state}:{self.outcome}" if self.outcome else self.state


class ControlApi:
    """A connection to the Control API at `address`. Every call takes at most ten seconds.

    `ca` holds the certificates that vouch for the server; None: no TLS.
    """

    def __init__(self, address: str, ca: bytes | None = None, name: str = "") -> None:
        """`name`: what the certificate is for, where that is not the address."""
        self._channel = _channel(address, ca, name)
        self._stub = ControlStub(self._channel)

    def status(self, run_id: int) -> RunStatus:
        """Raises KeyError for an unknown run and grpc.RpcError without a SuperLink."""
        try:
            reply = self._stub.ListRuns(ListRunsRequest(run_id=run_id), timeout=_CALL_SECONDS)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.NOT_FOUND:
                raise KeyError(f"the SuperLink knows no run {run_id}") from error
            raise
        return _status(reply.run_dict[run_id])

    def runs(self) -> dict[int, RunStatus]:
        """All runs that the SuperLink knows, the newest last."""
        runs = self._stub.ListRuns(ListRunsRequest(), timeout=_CALL_SECONDS).run_dict
        newest_last = sorted(runs, key=lambda run_id: runs[run_id].pending_at)
        return {run_id: _status(runs[run_id]) for run_id in newest_last}

    def stop(self, run_id: int) -> bool:
        """Whether this call stopped the run; False if it had finished before."""
        request = StopRunRequest(run_id=run_id)
        try:
            return bool(self._stub.StopRun(request, timeout=_CALL_SECONDS).success)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.FAILED_PRECONDITION:
                return False
            raise

    def log(self, run_id: int, seconds: float = 2.0) -> str:
        """The ServerApp's output so far; of a run in progress, what arrives in `seconds`."""
        return self.new_log(run_id, 0.0, seconds)[0]

    def new_log(self, run_id: int, after: float, seconds: float) -> tuple[str, float]:
        """The ServerApp's output since `after`, and the value of `after` for what comes next.

        Of a run in progress, what arrives in `seconds`.
        """
        parts: list[str] = []
        request = StreamLogsRequest(run_id=run_id, after_timestamp=after)
        try:
            for part in self._stub.StreamLogs(request, timeout=seconds):
                parts.append(part.log_output)
                after = part.latest_timestamp
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.DEADLINE_EXCEEDED:
                raise
        return "".join(parts), after

    def run_ids(self) -> list[int]:
        """All runs that the SuperLink knows, the newest last."""
        return list(self.runs())

    def register(self, public_key: bytes) -> int:
        """Let the node with this key (PEM) take part; its node id. grpc.RpcError if it does."""
        request = RegisterNodeRequest(public_key=public_key)
        return int(self._stub.RegisterNode(request, timeout=_CALL_SECONDS).node_id)

    def unregister(self, node_id: int) -> None:
        """Never again let the node take part."""
        self._stub.UnregisterNode(UnregisterNodeRequest(node_id=node_id), timeout=_CALL_SECONDS)

    def guard(self, action: str, **fields: Any) -> dict[str, Any] | None:
        """What the SuperLink's guard answers (guard/service.py); None where it has none.

        Raises ValueError with its reason if it does not do so.
        """
        call = self._channel.unary_unary("/blackthorn.Guard/Keys")
        try:
            answer = call(json.dumps({"action": action, **fields}).encode(), timeout=_CALL_SECONDS)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.UNIMPLEMENTED:
                return None
            if error.code() == grpc.StatusCode.INVALID_ARGUMENT:
                raise ValueError(error.details()) from error
            raise
        found: dict[str, Any] = json.loads(answer)
        return found

    def nodes(self) -> list[Any]:
        """Flower's NodeInfo of every node that is registered or connected."""
        return list(self._stub.ListNodes(ListNodesRequest(), timeout=_CALL_SECONDS).nodes_info)

    def online_nodes(self) -> int:
        """How many SuperNodes are registered and alive."""
        return sum(node.status == "online" for node in self.nodes())

    def close(self) -> None:
        """Close the connection; no call is possible afterwards."""
        self._channel.close()


def is_serving(health_address: str) -> bool:
    """Whether the gRPC health service there answers SERVING within a second."""
    with _channel(health_address, None) as channel:
        try:
            reply = HealthStub(channel).Check(HealthCheckRequest(), timeout=1.0)
        except grpc.RpcError:
            return False
    return bool(reply.status == HealthCheckResponse.SERVING)


def _status(run: Any) -> RunStatus:
    return RunStatus(run.status.status, run.status.sub_status, run.status.details)


def _channel(address: str, ca: bytes | None, name: str = "") -> grpc.Channel:
    # gRPC would send even loopback traffic through the proxy that http_proxy names.
    options: list[tuple[str, Any]] = [("grpc.enable_http_proxy", 0)]
    if name:
        options.append(("grpc.ssl_target_name_override", name))
    if ca is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(ca), options=options)
