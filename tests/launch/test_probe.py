"""What the probe says of servers that are not as they should be; the peers are real sockets."""

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from blackthorn.launch.federation import certificates
from blackthorn.launch.federation.addresses import Address, free_loopback_ports
from blackthorn.launch.federation.certs import make
from blackthorn.launch.federation.probe import Refused, probe
from blackthorn.launch.processes.supervisor import NotYet


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    make(folder / "ours", ["fl.example.org"], [])
    make(folder / "theirs", ["fl.example.org"], [])
    return folder


@contextlib.contextmanager
def grpc_server(folder: Path | None) -> Iterator[Address]:
    """A gRPC server without services; without TLS where there is no folder."""
    from concurrent.futures import ThreadPoolExecutor

    server = grpc.server(ThreadPoolExecutor(1))
    if folder is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        pair = (folder / "server.key").read_bytes(), (folder / "server.pem").read_bytes()
        credentials = grpc.ssl_server_credentials([pair])
        port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    try:
        yield Address("127.0.0.1", port)
    finally:
        server.stop(None).wait(10)


@contextlib.contextmanager
def tcp_server(answer: Callable[[socket.socket], None]) -> Iterator[Address]:
    """A server that gives its first connection to `answer`."""

    def serve() -> None:
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            with connection:
                answer(connection)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield Address("127.0.0.1", listener.getsockname()[1])
        finally:
            listener.close()
            thread.join(10)


def test_a_server_as_it_should_be_is_let_pass(certs: Path) -> None:
    with grpc_server(certs / "ours") as address:
        probe(address, certs / "ours" / "ca.crt")
    with grpc_server(None) as address:
        probe(address, None)


def test_another_authority_is_named(certs: Path) -> None:
    with (
        grpc_server(certs / "ours") as address,
        pytest.raises(Refused, match=r"is not the server that --ca .*/theirs/ca\.crt vouches for"),
    ):
        probe(address, certs / "theirs" / "ca.crt")


def test_tls_on_one_side_only_is_said(certs: Path) -> None:
    with grpc_server(certs / "ours") as address, pytest.raises(Refused, match=r"wants TLS"):
        probe(address, None)
    with grpc_server(None) as address, pytest.raises(Refused, match=r"does not speak TLS"):
        probe(address, certs / "ours" / "ca.crt")


def test_a_certificate_for_another_name_is_said(certs: Path) -> None:
    def answer(connection: socket.socket) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certs / "named" / "server.pem", certs / "named" / "server.key")
        context.wrap_socket(connection, server_side=True).close()

    (certs / "named").mkdir()
    make_for_a_name_alone(certs / "named")
    with (
        tcp_server(answer) as address,
        pytest.raises(
            Refused, match=r"certificate is not for 127\.0\.0\.1: .* --host 127\.0\.0\.1"
        ),
    ):
        probe(address, certs / "named" / "ca.crt")


def make_for_a_name_alone(folder: Path) -> None:
    """A certificate that the loopback address is not in, as ours always is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certificates, "LOOPBACK_NAMES", ())
        make(folder, ["fl.example.org"], [])


def test_where_nobody_answers_it_may_be_tried_again() -> None:
    (port,) = free_loopback_ports(1)
    with pytest.raises(NotYet, match=r"nobody answers at 127\.0\.0\.1"):
        probe(Address("127.0.0.1", port), None)
    with pytest.raises(NotYet, match=r"name nowhere\.invalid cannot be resolved"):
        probe(Address("nowhere.invalid", 9092), None)


def test_a_ca_that_cannot_be_read_is_said(certs: Path, tmp_path: Path) -> None:
    (tmp_path / "ca.crt").write_text("nothing")
    with (
        grpc_server(certs / "ours") as address,
        pytest.raises(Refused, match="is not a certificate that can be read"),
    ):
        probe(address, tmp_path / "ca.crt")
