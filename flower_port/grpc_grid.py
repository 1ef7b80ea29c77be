"""The grid of Flower 1.33 and 1.34: gRPC between ServerApp and SuperLink."""

import json
from typing import Any

import grpc
from flwr.superlink.grid import grpc_grid

from .guard import REPORT
from .pulling import SuperLinkGrid

_REPORT_SECONDS = 2.0


class GrpcGridAdapter(SuperLinkGrid):
    """Flower's GrpcGrid, by its stub and its channel."""

    connection_errors = (grpc.RpcError,)

    def __init__(self, grid: Any) -> None:
        super().__init__(grid, grpc_grid)

    def superlink(self) -> Any:
        """The stub; connects where the grid is not."""
        return self._grid._stub

    def guard_report(self) -> dict[str, Any]:
        """The guard's answer on the grid's own channel."""
        channel = self._grid._channel
        return report_of_guard(channel) if isinstance(channel, grpc.Channel) else {}


def report_of_guard(channel: grpc.Channel) -> dict[str, Any]:
    """What the guard behind `channel` says; empty where there is none, or no answer in time."""
    try:
        report = json.loads(channel.unary_unary(REPORT)(b"", timeout=_REPORT_SECONDS))
    except (grpc.RpcError, ValueError):
        return {}
    return report if isinstance(report, dict) else {}
