"""The probe takes the proxy that gRPC takes: both go through the same one, or both through none."""

import contextlib
import selectors
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest

from blackthorn.launch.federation.addresses import Address, free_loopback_ports
from blackthorn.launch.federation.certs import make
from blackthorn.launch.federation.probe import probe
from blackthorn.launch.federation.proxies import exemptions
from blackthorn.launch.processes.supervisor import NotYet

VARIABLES = "grpc_proxy", "https_proxy", "http_proxy", "no_grpc_proxy", "no_proxy", "HTTPS_PROXY"


@dataclass
class ConnectProxy:
    """Connects whoever asks, and keeps the heads of what it was asked; or refuses."""

    port: int
    heads: list[str] = field(default_factory=list)
    answer: str = "200 Connection established"

    def serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            head = b""
            while not head.endswith(b"\r\n\r\n") and (byte := connection.recv(1)):
                head += byte
            self.heads.append(head.decode())
            connection.sendall(f"HTTP/1.1 {self.answer}\r\n\r\n".encode())
            if self.answer.startswith("200"):
                port = int(head.split()[1].rpartition(b":")[2])
                with socket.create_connection(("127.0.0.1", port), 10) as server:
                    _join(connection, server)


def _join(one: socket.socket, other: socket.socket) -> None:
    with selectors.DefaultSelector() as ready:
        ready.register(one, selectors.EVENT_READ, other)
        ready.register(other, selectors.EVENT_READ, one)
        while True:
            for key, _ in ready.select():
                assert isinstance(key.fileobj, socket.socket)
                data = key.fileobj.recv(65_536)
                if not data:
                    return
                key.data.sendall(data)


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[ConnectProxy]:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = ConnectProxy(listener.getsockname()[1])

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    threading.Thread(target=one.serve, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield one


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs") / "certs"
    make(folder, ["localhost"], [])
    return folder


@pytest.fixture(scope="module")
def server(certs: Path) -> Iterator[Address]:
    pair = (certs / "server.key").read_bytes(), (certs / "server.pem").read_bytes()
    one = grpc.server(ThreadPoolExecutor(1))
    port = one.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
    one.start()
    yield Address("localhost", port)
    one.stop(None).wait(10)


def connect_by_grpc(address: Address, ca: Path) -> None:
    trust = grpc.ssl_channel_credentials(ca.read_bytes())
    # Otherwise it might go on with a connection of a channel before it.
    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.secure_channel(str(address), trust, options) as channel:
        grpc.channel_ready_future(channel).result(20)


# Of the environment; PROXY is ours. And whether that is the way.
@pytest.mark.parametrize(
    ("variables", "taken"),
    [
        ("", False),
        ("https_proxy=PROXY", True),
        ("http_proxy=PROXY", True),
        ("HTTPS_PROXY=PROXY", False),
        ("grpc_proxy=PROXY https_proxy=http://127.0.0.1:1", True),
        ("https_proxy=PROXY no_proxy=localhost", False),
        ("https_proxy=PROXY no_proxy=example.org,LOCALHOST", False),
        ("https_proxy=PROXY no_proxy=example.org,.localhost", False),
        ("https_proxy=PROXY no_proxy=example.org,host", True),
        ("https_proxy=PROXY no_proxy=*", True),
        ("https_proxy=PROXY no_proxy=127.0.0.0/8", True),
        ("https_proxy=PROXY no_grpc_proxy=example.org no_proxy=localhost", True),
        ("https_proxy=socks5://127.0.0.1:1", False),
        ("https_proxy=http://me:a%20word@PORT", True),
    ],
)
def test_the_probe_takes_the_proxy_that_grpc_takes(
    proxy: ConnectProxy,
    server: Address,
    certs: Path,
    monkeypatch: pytest.MonkeyPatch,
    variables: str,
    taken: bool,
) -> None:
    for variable in variables.split():
        name, _, value = variable.partition("=")
        value = value.replace("PROXY", f"http://127.0.0.1:{proxy.port}")
        monkeypatch.setenv(name, value.replace("PORT", f"127.0.0.1:{proxy.port}"))
    probe(server, certs / "ca.crt")
    by_us = [_said(head) for head in proxy.heads]
    # As our programs have it, in which gRPC dials.
    monkeypatch.setenv("no_grpc_proxy", exemptions())
    proxy.heads.clear()
    connect_by_grpc(server, certs / "ca.crt")
    assert by_us == [_said(head) for head in proxy.heads]
    assert len(by_us) == taken


def _said(head: str) -> tuple[str, list[str]]:
    """Where to, and with which credentials."""
    lines = head.split("\r\n")
    return lines[0].split()[1], [line for line in lines if line.lower().startswith("proxy-auth")]


def test_this_machine_needs_no_proxy(
    proxy: ConnectProxy, server: Address, certs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{proxy.port}")
    probe(Address("127.0.0.1", server.port), certs / "ca.crt")
    probe(server, certs / "ca.crt", proxied=False)
    assert proxy.heads == []


def test_a_proxy_that_refuses_or_does_not_answer_is_named(
    proxy: ConnectProxy, server: Address, certs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{proxy.port}")
    proxy.answer = "403 Forbidden"
    said = rf"the proxy 127\.0\.0\.1:{proxy.port} says 'HTTP/1\.1 403 Forbidden' to a connection"
    with pytest.raises(NotYet, match=said):
        probe(server, certs / "ca.crt")
    (nobody,) = free_loopback_ports(1)
    monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{nobody}")
    with pytest.raises(NotYet, match=rf"nobody answers at the proxy 127\.0\.0\.1:{nobody}"):
        probe(server, certs / "ca.crt")
