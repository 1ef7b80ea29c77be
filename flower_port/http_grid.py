"""The grid of Flower 1.42: HTTP between ServerApp and SuperLink. No guard is there."""

import importlib
from typing import Any

import httpx

from .pulling import SuperLinkGrid


class HttpGridAdapter(SuperLinkGrid):
    """Flower's HttpGrid, by its client, whose methods are those of gRPC's stub."""

    connection_errors = (httpx.HTTPError,)

    def __init__(self, grid: Any) -> None:
        super().__init__(grid, importlib.import_module("flwr.superlink.grid.http_grid"))

    def superlink(self) -> Any:
        """The client; connects where the grid is not."""
        return self._grid._runtime_client

    def reason(self, error: Exception) -> str:
        """The server's status, or what kept the request from it."""
        if isinstance(error, httpx.HTTPStatusError):
            return f"HTTP {error.response.status_code}"
        return type(error).__name__
