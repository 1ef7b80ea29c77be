"""A port on which a server or a client shows how it is, by HTTP: read-only, and nothing waits.

It has no login and no TLS: on loopback, unless an operator says otherwise.
"""

import contextlib
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from typing import Annotated

import typer

from blackthorn.settings.config import ConfigError

from .addresses import LOOPBACK, Address, host_of

# Requests that are served at a time; more are hung up on.
_AT_A_TIME = 8
_REQUEST_SECONDS = 5.0
MetricsBind = Annotated[
    str,
    typer.Option(help="Address that --metrics-port listens on: it has no login and no TLS."),
]
METRICS_BIND = LOOPBACK
# Prometheus' text format.
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True)
class Page:
    """What a path answers."""

    body: bytes
    status: int = 200
    kind: str = "text/plain; charset=utf-8"


Pages = Mapping[str, Callable[[], Page]]


def web_address(port: int, bind: str) -> Address | None:
    """Where --metrics-port and --metrics-bind say, None for port 0. Raises ConfigError."""
    if not 0 <= port < 65536:
        raise ConfigError(f"--metrics-port {port} is not allowed: 1 to 65535, or 0 for none")
    host = host_of(bind, "--metrics-bind")
    if not host:
        raise ConfigError("--metrics-bind is empty: an address of this machine")
    return Address(host, port) if port else None


def healthz(problem: Callable[[], str]) -> Callable[[], Page]:
    """A page that says ok, or with status 503 what is wrong."""

    def page() -> Page:
        said = problem()
        return Page(f"{said or 'ok'}\n".encode(), 503 if said else 200)

    return page


@contextlib.contextmanager
def web_port(
    address: Address | None, pages: Pages, *, wanted: bool, say: Callable[[str], None]
) -> Iterator[None]:
    """Serve `pages` as long as the block lasts, and say where; nothing, where `address` is None.

    Where it cannot be had and was not `wanted`, that is said. ConfigError where it was.
    """
    if address is None:
        yield
        return
    try:
        server = _server_class(address)((address.host, address.port), _handler(pages))
    except OSError as error:
        why = f"{address} cannot be listened on: {error.strerror or error}"
        if wanted:
            raise ConfigError(f"--metrics-bind/--metrics-port: {why}") from error
        say(f"there is no /metrics and no /healthz: {why} (--metrics-port names another)")
        yield
        return
    threading.Thread(target=server.serve_forever, name="web port", daemon=True).start()
    say(f"/metrics and /healthz are at http://{address}")
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


def _server_class(address: Address) -> type["_Server"]:
    return _Server6 if ":" in address.host else _Server


class _Server(socketserver.ThreadingTCPServer):
    """HTTPServer's own looks the machine's name up, for which it may wait."""

    daemon_threads = True
    allow_reuse_address = True
    # Nobody waits for somebody who reads slowly.
    block_on_close = False

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._free = threading.BoundedSemaphore(_AT_A_TIME)
        super().__init__(address, handler)

    def process_request(self, request, client_address) -> None:  # type: ignore[no-untyped-def]
        """In a thread of its own, where one is free."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request, client_address) -> None:  # type: ignore[no-untyped-def]
        """The thread's work."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """Nothing: who hangs up in the middle is no news."""


class _Server6(_Server):
    address_family = socket.AF_INET6


def _handler(pages: Pages) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = _REQUEST_SECONDS
        server_version, sys_version = "blackthorn", ""

        def do_GET(self) -> None:
            make = pages.get(self.path.partition("?")[0])
            page = make() if make is not None else Page(_index(pages), 404)
            self.send_response(page.status)
            self.send_header("Content-Type", page.kind)
            self.send_header("Content-Length", str(len(page.body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(page.body)

        do_HEAD = do_GET

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    return Handler


def _index(pages: Pages) -> bytes:
    return f"there is nothing here: {', '.join(sorted(pages))}\n".encode()
