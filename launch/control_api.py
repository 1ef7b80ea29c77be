"""What the SuperLink's Control API says about runs and nodes, asked in-process over gRPC.

`flwr list` answers the same questions at the price of a new Python that imports Flower.
"""

from dataclasses import dataclass

import grpc
from flwr.common.constant import Status, SubStatus
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    ListRunsRequest,
    StopRunRequest,
    StreamLogsRequest,
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
    def finished(self) -> bool:
        return self.state == Status.FINISHED

    @property
    def completed(self) -> bool:
        return self.finished and self.outcome == SubStatus.COMPLETED

    def __str__(self) -> str:
        return f"{self.state}:{self.outcome}" if self.outcome else self.state


class ControlApi:
    """A connection to the Control API at `address`. Every call takes at most ten seconds."""

    def __init__(self, address: str) -> None:
        self._channel = _loopback_channel(address)
        self._stub = ControlStub(self._channel)

    def status(self, run_id: int) -> RunStatus:
        """Raises KeyError for an unknown run and grpc.RpcError without a SuperLink."""
        try:
            reply = self._stub.ListRuns(ListRunsRequest(run_id=run_id), timeout=_CALL_SECONDS)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.NOT_FOUND:
                raise KeyError(f"the SuperLink knows no run {run_id}") from error
            raise
        status = reply.run_dict[run_id].status
        return RunStatus(status.status, status.sub_status, status.details)

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
        parts: list[str] = []
        request = StreamLogsRequest(run_id=run_id, after_timestamp=0.0)
        try:
            parts.extend(
                part.log_output for part in self._stub.StreamLogs(request, timeout=seconds)
            )
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.DEADLINE_EXCEEDED:
                raise
        return "".join(parts)

    def online_nodes(self) -> int:
        """How many SuperNodes are registered and alive."""
        reply = self._stub.ListNodes(ListNodesRequest(), timeout=_CALL_SECONDS)
        return sum(node.status == "online" for node in reply.nodes_info)

    def close(self) -> None:
        self._channel.close()


def is_serving(health_address: str) -> bool:
    """Whether the gRPC health service there answers SERVING within a second."""
    with _loopback_channel(health_address) as channel:
        try:
            reply = HealthStub(channel).Check(HealthCheckRequest(), timeout=1.0)
        except grpc.RpcError:
            return False
    return bool(reply.status == HealthCheckResponse.SERVING)


def _loopback_channel(address: str) -> grpc.Channel:
    # gRPC would send even loopback traffic through the proxy that http_proxy names.
    return grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)])
