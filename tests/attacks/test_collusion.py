"""The colluders' service over real gRPC: who gets what and when, and the same lies as simulated."""

import datetime
import ipaddress
import logging
import runpy
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import grpc
import numpy as np
import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from memory_grid import MemoryGrid
from process_watch import until

from blackthorn import attacks
from blackthorn.attacks import AttackingGrid, byzantine_app
from blackthorn.attacks.collusion import (
    Accomplices,
    CollusionFailed,
    CollusionServer,
    Rendezvous,
    parts,
)
from blackthorn.attacks.collusion.collusion_pb2 import Header, Part
from blackthorn.attacks.collusion.rendezvous import Update
from blackthorn.attacks.flwr_clientapp import main
from blackthorn.attacks.round_config import number
from blackthorn.server_app.build import server_rule
from blackthorn.settings.config import make_config

LONG = 60.0
Result = TypeVar("Result")


@pytest.fixture
def service() -> Iterator[Callable[..., Accomplices]]:
    """Starts a service for so many colluders; the tests talk to it over loopback."""
    servers: list[CollusionServer] = []

    def start(num_colluders: int, patience: float = LONG) -> Accomplices:
        server = CollusionServer(Rendezvous(num_colluders, patience), num_colluders)
        servers.append(server.__enter__())
        return Accomplices(server.address, timeout=LONG)

    yield start
    for server in servers:
        server.__exit__(None, None, None)


def together(calls: Sequence[Callable[[], Result]]) -> list[Result]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(LONG) for future in [pool.submit(call) for call in calls]]


def vector(client: int, size: int = 3, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(size, dtype=dtype) + 100 * client


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_everybody_gets_everybody_s_update(
    service: Callable[..., Accomplices], dtype: torch.dtype
) -> None:
    accomplices = service(3)
    clients = [9, 2, 5]
    calls = [partial(accomplices.share, "run", 1, c, vector(c, dtype=dtype)) for c in clients]
    expected = torch.stack([vector(c, dtype=dtype) for c in (2, 5, 9)])
    for (updates, row), place in zip(together(calls), (2, 0, 1), strict=True):
        assert row == place
        assert updates.dtype == dtype
        assert torch.equal(updates, expected)


def test_updates_of_ten_million_numbers_pass(service: Callable[..., Accomplices]) -> None:
    accomplices = service(2)
    large = [torch.rand(10_000_000, generator=torch.Generator().manual_seed(s)) for s in (1, 2)]
    calls = [partial(accomplices.share, "run", 1, c, large[c]) for c in (0, 1)]
    for updates, row in together(calls):
        assert torch.equal(updates[row], large[row])
        assert torch.equal(updates[1 - row], large[1 - row])


def test_rounds_and_runs_are_apart(service: Callable[..., Accomplices]) -> None:
    accomplices = service(1)
    for run, server_round in (("a", 1), ("a", 2), ("b", 1)):
        updates, row = accomplices.share(run, server_round, 4, vector(server_round))
        assert row == 0
        assert torch.equal(updates, vector(server_round).unsqueeze(0))


def test_who_does_not_come_is_waited_for_no_longer_than_said(
    service: Callable[..., Accomplices],
) -> None:
    accomplices = service(3, patience=1.0)
    began = time.monotonic()
    results = together([partial(accomplices.share, "run", 1, c, vector(c)) for c in (0, 1)])
    assert 0.9 <= time.monotonic() - began < LONG / 2
    for updates, _ in results:
        assert torch.equal(updates, torch.stack([vector(0), vector(1)]))
    # Too late for the round: it learns what the others did, who learn nothing of it.
    began = time.monotonic()
    late, row = accomplices.share("run", 1, 7, vector(7))
    assert time.monotonic() - began < 0.9
    assert row == 2
    assert torch.equal(late, torch.stack([vector(0), vector(1), vector(7)]))


def test_a_service_that_waits_too_long_is_given_up(service: Callable[..., Accomplices]) -> None:
    patient = service(2)
    began = time.monotonic()
    with pytest.raises(CollusionFailed, match="DEADLINE_EXCEEDED"):
        Accomplices(patient.address, timeout=0.5).share("run", 1, 0, vector(0))
    assert time.monotonic() - began < LONG / 2


def test_a_service_that_is_away_is_named_with_grpc_s_reason() -> None:
    with pytest.raises(CollusionFailed, match=r"127\.0\.0\.1:1 fails: UNAVAILABLE"):
        Accomplices("127.0.0.1:1", timeout=LONG).share("run", 1, 0, vector(0))


def test_updates_of_different_models_are_refused(service: Callable[..., Accomplices]) -> None:
    accomplices = service(2, patience=0.0)
    accomplices.share("run", 1, 0, vector(0))
    with pytest.raises(CollusionFailed, match=r"INVALID_ARGUMENT .*16 bytes of float32; client 0"):
        accomplices.share("run", 1, 1, vector(1, size=4))


def header(dtype: str = "float32", num_bytes: int = 4) -> Part:
    announced = Header(run="r", round=1, client=0, dtype=dtype, num_bytes=num_bytes)
    return Part(header=announced)


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        ([Part(data=b"1234")], "data without a header"),
        ([header(dtype="object")], "dtype is 'object'"),
        ([header(num_bytes=2**40)], "allowed are at most"),
        ([header(), Part(data=b"12")], "ends after 2 of 4 bytes"),
        ([header(), Part(data=b"12345")], "more than the 4 bytes"),
        ([header(), Part(data=b"")], "ends after 0 of 4 bytes"),
    ],
)
def test_malformed_streams_are_refused(
    service: Callable[..., Accomplices], sent: list[Part], words: str
) -> None:
    with grpc.insecure_channel(service(1).address) as channel:
        call = channel.stream_stream(
            parts.METHOD,
            request_serializer=Part.SerializeToString,
            response_deserializer=Part.FromString,
        )
        with pytest.raises(grpc.RpcError) as refusal:
            list(call(iter(sent), timeout=LONG))
    assert refusal.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert words in refusal.value.details()


def test_only_two_rounds_are_kept() -> None:
    rendezvous = Rendezvous(1, 0.0)
    for server_round in range(100):
        rendezvous.share("run", server_round, 0, Update("float32", b"1234"))
    assert list(rendezvous._gatherings) == [("run", 98), ("run", 99)]


def test_who_waits_in_a_round_that_is_dropped_goes_on_after_its_patience() -> None:
    rendezvous, update = Rendezvous(2, 1.0), Update("float32", b"1234")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(rendezvous.share, "run", 0, 5, update)
        until(lambda: len(rendezvous._gatherings) == 1)
        for server_round in (1, 2):
            with ThreadPoolExecutor(2) as pair:
                posts = [
                    pair.submit(rendezvous.share, "run", server_round, c, update) for c in (1, 2)
                ]
            assert all(list(post.result()) == [1, 2] for post in posts)
        assert waiting.result(LONG) == {5: update}


@pytest.mark.parametrize(("colluders", "patience"), [(0, 1.0), (1, -1.0), (1, float("nan"))])
def test_a_rendezvous_without_colluders_or_of_negative_patience_is_refused(
    colluders: int, patience: float
) -> None:
    with pytest.raises(ValueError, match="allowed are"):
        Rendezvous(colluders, patience)


def test_over_tls_only_who_trusts_its_certificate_gets_through() -> None:
    certificate, key = self_signed()
    server = CollusionServer(Rendezvous(1, 0.0), 1, "127.0.0.1:0", certificate, key)
    with server:
        trusting = Accomplices(server.address, root_certificates=certificate, timeout=LONG)
        updates, _ = trusting.share("run", 1, 0, vector(0))
        assert torch.equal(updates[0], vector(0))
        with pytest.raises(CollusionFailed, match="UNAVAILABLE"):
            Accomplices(server.address, timeout=LONG).share("run", 1, 0, vector(0))
        other, _ = self_signed()
        with pytest.raises(CollusionFailed, match="UNAVAILABLE"):
            Accomplices(server.address, other, LONG).share("run", 1, 0, vector(0))


def self_signed() -> tuple[bytes, bytes]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "collusion")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return certificate.public_bytes(pem), private


def test_the_generated_code_is_that_of_the_proto_file(repository: Path, tmp_path: Path) -> None:
    folder = repository / "attacks" / "collusion"
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", str(folder)]
    command += [f"--python_out={tmp_path}", f"--pyi_out={tmp_path}", "collusion.proto"]
    subprocess.run(command, check=True, timeout=LONG)
    for name in ("collusion_pb2.py", "collusion_pb2.pyi"):
        assert (tmp_path / name).read_text() == (folder / name).read_text()


def test_the_service_is_a_program_that_says_where_it_listens() -> None:
    command = [sys.executable, "-u", "-m", "blackthorn.attacks.collusion", "--colluders", "1"]
    command += ["--listen", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            address = process.stdout.readline().split()[-1]
            updates, _ = Accomplices(address, timeout=LONG).share("run", 1, 0, vector(0))
            assert torch.equal(updates[0], vector(0))
        finally:
            process.terminate()


def test_a_key_without_its_certificate_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--colluders", "1", "--listen", "127.0.0.1:0", "--key", str(tmp_path / "absent")]
    monkeypatch.setattr(sys, "argv", ["collusion", *given])
    with pytest.raises(SystemExit) as refused:
        runpy.run_module("blackthorn.attacks.collusion", run_name="__main__")
    assert refused.value.code == 2
    assert "--certificate and --key are given together" in capsys.readouterr().err


# The same lies as in a simulation.

LOCAL_LR, SEED, HONEST = 0.5, 3, 4
MODEL = {"w": np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3), "b": np.ones(2, np.float32)}
COLLUDERS = [4, 5, 6]
CONFIG = {"local-lr": LOCAL_LR, "seed": SEED}
RUN: dict[str, bool | float | int | str] = {"num-clients": HONEST + len(COLLUDERS)}


def honest_app() -> ClientApp:
    """A step along a gradient that depends on the client and the round."""
    app = ClientApp()

    @app.train()
    def train(message: Message, _: Context) -> Message:
        config = message.content.config_records["config"]
        rng = np.random.default_rng(
            [int(number(config, key)) for key in ("client-id", "server-round")]
        )
        trained = {
            name: Array(value - LOCAL_LR * rng.normal(size=value.shape).astype(np.float32))
            for name, value in MODEL.items()
        }
        arrays, metrics = ArrayRecord(trained), MetricRecord({"num-examples": 7})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    return app


def order(client: int, server_round: int) -> Message:
    arrays = ArrayRecord({name: Array(value) for name, value in MODEL.items()})
    config = ConfigRecord({**CONFIG, "server-round": server_round, "client-id": client})
    return Message(RecordDict({"arrays": arrays, "config": config}), client, "train")


def answer(app: ClientApp, message: Message) -> Message:
    return app(message, Context(1, message.metadata.dst_node_id, {}, RecordDict(), RUN))


def sent_model(reply: Message) -> np.ndarray:
    return np.concatenate(
        [a.numpy().ravel() for a in reply.content.array_records["arrays"].values()]
    )


def simulated(attack: str, server_round: int) -> dict[int, np.ndarray]:
    """What the colluders send through an AttackingGrid."""
    app = honest_app()
    nodes = {c: lambda message: answer(app, message) for c in range(HONEST + len(COLLUDERS))}
    rule_at = server_rule(make_config(RUN))
    grid = AttackingGrid(MemoryGrid(nodes), attack, lambda _: set(COLLUDERS), SEED, rule_at=rule_at)
    replies = grid.send_and_receive([order(c, server_round) for c in nodes])
    models = {r.metadata.src_node_id: sent_model(r) for r in replies}
    return {client: models[client] for client in COLLUDERS}


@pytest.mark.parametrize("attack", attacks.names("vector"))
def test_colluders_send_what_they_send_in_a_simulation(
    service: Callable[..., Accomplices], attack: str
) -> None:
    app = byzantine_app(honest_app(), attack, service(len(COLLUDERS)))
    alone = byzantine_app(honest_app(), attack)
    for server_round in (1, 2):
        expected = simulated(attack, server_round)
        replies = together(
            [partial(answer, app, order(client, server_round)) for client in COLLUDERS]
        )
        for client, reply in zip(COLLUDERS, replies, strict=True):
            np.testing.assert_allclose(sent_model(reply), expected[client], rtol=1e-6, atol=1e-6)
            assert reply.content["metrics"]["num-examples"] == 7
    # Where the attack depends on the others, one that sees itself alone sends something else.
    if attack not in ("sign-flip", "all-ones", "gradient-shift"):
        lonely = [sent_model(answer(alone, order(c, 2))) for c in COLLUDERS]
        assert not np.allclose(lonely, [expected[c] for c in COLLUDERS], rtol=1e-3)


def test_an_attacker_whose_service_is_away_says_so_and_goes_on_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    away = Accomplices("127.0.0.1:1", timeout=LONG)
    # The command line quietens this logger, and a test before this one may have used it.
    with caplog.at_level(logging.WARNING, "blackthorn"):
        reply = answer(byzantine_app(honest_app(), "reverse-average", away), order(5, 3))
    expected = answer(byzantine_app(honest_app(), "reverse-average"), order(5, 3))
    np.testing.assert_array_equal(sent_model(reply), sent_model(expected))
    assert "round 3: client 5 attacks alone: the collusion service at 127.0.0.1:1" in caplog.text


def test_the_operator_s_environment_says_where_the_service_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert Accomplices.from_environment() is None
    monkeypatch.setenv("BLACKTHORN_COLLUSION", "evil:9095")
    assert Accomplices.from_environment() == Accomplices("evil:9095")
    (tmp_path / "ca.pem").write_bytes(b"a certificate")
    monkeypatch.setenv("BLACKTHORN_COLLUSION_CA", str(tmp_path / "ca.pem"))
    monkeypatch.setenv("BLACKTHORN_COLLUSION_SECONDS", "2.5")
    assert Accomplices.from_environment() == Accomplices("evil:9095", b"a certificate", 2.5)
    monkeypatch.setenv("BLACKTHORN_COLLUSION_SECONDS", "soon")
    monkeypatch.setenv("BLACKTHORN_ATTACK", "nan")
    with pytest.raises(SystemExit, match=r"settings cannot be used: .*'soon'"):
        main()
