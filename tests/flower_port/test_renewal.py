"""A server goes on while its certificate is renewed, and what does not fit is not shown to anybody.

The server is gRPC's own, the connections are real, and what is shown is read by Python's ssl.
"""

import shutil
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from dated_certificates import federation, redate_server

from blackthorn.flower_port.guard.renewal import Renewal
from blackthorn.flower_port.guard.server_certificate import Unfit
from blackthorn.launch.federation.certs import make

DAY = timedelta(days=1)


@dataclass
class Served:
    """A server whose certificate lies in `certs`; `said` is what its operator was told."""

    certs: Path
    renewal: Renewal
    port: int
    said: list[str] = field(default_factory=list)

    def shown(self) -> int:
        """The serial number of what a new connection is shown."""
        pem = ssl.get_server_certificate(("127.0.0.1", self.port), timeout=30)
        return x509.load_pem_x509_certificate(pem.encode()).serial_number

    def on_disk(self) -> int:
        pem = (self.certs / "server.pem").read_bytes()
        return x509.load_pem_x509_certificate(pem).serial_number

    def channel(self) -> grpc.Channel:
        trust = grpc.ssl_channel_credentials((self.certs / "ca.crt").read_bytes())
        # Or gRPC would give it the connection of another channel.
        own = [("grpc.use_local_subchannel_pool", 1)]
        return grpc.secure_channel(f"localhost:{self.port}", trust, own)


class Echo(grpc.GenericRpcHandler):
    """Answers any call with the connection over which it came."""

    def service(self, _details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return grpc.unary_unary_rpc_method_handler(lambda _, context: context.peer().encode())


def peer(channel: grpc.Channel) -> str:
    """The connection over which the channel's calls come in."""
    told: bytes = channel.unary_unary("/test/Echo")(b"", timeout=30)
    return told.decode()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    certs, said = federation(tmp_path / "certs"), list[str]()
    files = certs / "server.pem", certs / "server.key", certs / "ca.crt"
    renewal = Renewal(*files, "localhost", said.append)
    server = grpc.server(ThreadPoolExecutor(2), handlers=[Echo()])
    port = server.add_secure_port("localhost:0", renewal.credentials())
    server.start()
    yield Served(certs, renewal, port, said)
    server.stop(None).wait(10)


def test_a_renewed_pair_is_shown_to_new_connections_and_old_ones_go_on(served: Served) -> None:
    before = served.shown()
    assert before == served.on_disk()
    with served.channel() as old:
        connection = peer(old)
        make(served.certs, [], [], renew=True)
        served.renewal.look()
        assert (served.shown(), served.said) == (before, [])
        served.renewal.look()
        assert served.shown() == served.on_disk() != before
        (line,) = served.said
        assert line.startswith(f"{served.certs / 'server.pem'} was renewed, and is good until ")
        assert peer(old) == connection
        with served.channel() as new:
            assert peer(new) != connection
    served.renewal.look()
    assert len(served.said) == 1


def test_a_pair_that_is_half_written_is_left_alone(served: Served, tmp_path: Path) -> None:
    """Between two looks each file may be another one: only what stays is looked at."""
    before, other = served.shown(), federation(tmp_path / "other")
    shutil.copy(other / "server.key", served.certs / "server.key")
    served.renewal.look()
    make(served.certs, [], [], renew=True)
    served.renewal.look()
    assert (served.shown(), served.said) == (before, [])
    served.renewal.look()
    assert served.shown() == served.on_disk() != before


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda certs: (certs / "server.key").write_text("no key"), "server.key is not a private"),
        (lambda certs: (certs / "server.pem").unlink(), "server.pem cannot be read: No such file"),
        (lambda certs: redate_server(certs, -9 * DAY, -2 * DAY), "server.pem expired on "),
        (lambda certs: redate_server(certs, DAY, 9 * DAY), "server.pem is not good before "),
        (
            lambda certs: make(certs, ["other.example.org", "::3"], [], renew=True),
            "which is for other.example.org, ::3, localhost",
        ),
        (
            lambda certs: shutil.copy(federation(certs / "x") / "server.key", certs / "server.key"),
            "server.key is not the key of ",
        ),
        (
            lambda certs: shutil.copy(federation(certs / "x") / "ca.crt", certs / "ca.crt"),
            "do not take ",
        ),
    ],
    ids=["garbage", "gone", "expired", "too early", "name", "key", "authority"],
)
def test_what_does_not_fit_is_said_once_and_the_pair_before_stays(
    tmp_path: Path, spoil: object, words: str
) -> None:
    assert callable(spoil)
    certs, said = tmp_path / "certs", list[str]()
    make(certs, ["fl.example.org"], [])
    files = certs / "server.pem", certs / "server.key", certs / "ca.crt"
    renewal = Renewal(*files, "fl.example.org", said.append)
    server = grpc.server(ThreadPoolExecutor(1))
    served = Served(certs, renewal, server.add_secure_port("localhost:0", renewal.credentials()))
    server.start()
    try:
        before = served.shown()
        spoil(certs)
        for _ in range(4):
            renewal.look()
        (line,) = said
        assert words in line, line
        assert line.endswith("; the certificate before stays in use until its files fit")
        assert served.shown() == before
        with pytest.raises(Unfit):
            Renewal(*files, "fl.example.org")
    finally:
        server.stop(None).wait(10)
