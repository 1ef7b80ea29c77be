"""Options of the commands for several machines: what is refused before anybody is contacted."""

import contextlib
import importlib.metadata
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from blackthorn.client_app.client_ledger import ClientLedger
from blackthorn.flower_port.guard.connections import is_loopback
from blackthorn.launch.cli import main
from blackthorn.launch.federation.addresses import (
    Address,
    free_loopback_ports,
    host_of,
    parse_address,
)
from blackthorn.launch.federation.certs import make
from blackthorn.launch.federation.client_service import _node_config
from blackthorn.launch.federation.members import ClientSettings
from blackthorn.settings.config import ConfigError, RunConfig


def refusal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> str:
    """The one line with which `blackthorn ARGUMENTS` ends, with exit code 2."""
    monkeypatch.setattr(sys, "argv", ["blackthorn", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    errors = capsys.readouterr().err.strip()
    assert len(errors.splitlines()) == 1
    return errors


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("server --host fl.example.org", "give either --certs DIR, or --insecure"),
        ("server --host localhost --certs certs --insecure", "give either --certs DIR, or"),
        ("server --host fl.example.org --insecure", "--insecure is not allowed for fl.example.org"),
        ("server --host localhost --insecure --control 0.0.0.0:9093", "not allowed for 0.0.0.0"),
        ("server --host localhost --insecure --bind 0.0.0.0", "not allowed for 0.0.0.0"),
        ("server --host localhost --certs nowhere", "there is no ca.crt; make it with"),
        ("server --host other.example.org --certs certs", "is not in the certificate"),
        ("client --server fl.example.org --client-id 0", "give either --ca ca.crt, or --insecure"),
        ("client --server fl.example.org --insecure --client-id 0", "not allowed for fl.example"),
        ("server --host  --certs certs", "--host is empty"),
        ("server --host localhost --certs certs --port 99999", "--port 99999 is not allowed"),
        ("server --host localhost --certs certs --bind 203.0.113.9", "--bind/--port: 203.0.113.9"),
        ("server --host localhost --certs certs --state certs/ca.crt", "cannot be made: File ex"),
        ("client --server localhost --insecure", "--client-id is missing"),
        ("client --server localhost --ca certs/server.key", "is not a certificate that can be"),
        ("client --server localhost --insecure --client-id 0 --program lie", "MODULE:FUNCTION"),
        (
            "client --server localhost --insecure --client-id 0 --logs certs/ca.crt/logs",
            "--logs",
        ),
        ("status --ca certs/server.key", "is not a certificate that can be read"),
        ("client --server localhost --ca certs/ca.crt --key nokey", "--key nokey does not exist"),
        ("client --server localhost --insecure --client-id 0 --data no.npz", "--data no.npz does"),
        (
            "client --server localhost --insecure --client-id 0 --data certs/ca.crt",
            "is not an .npz file with plain arrays x and y: it is no zip archive",
        ),
        (
            "client --server localhost --insecure --client-id 0 --data wrong.npz",
            "wrong.npz': y has dtype float64, allowed are integers",
        ),
        (
            "client --server localhost --insecure --client-id 0 --policy none.toml",
            "--policy none.toml does not exist",
        ),
        (
            "client --server localhost --insecure --client-id 0 --policy policy.toml",
            "max-rounds = 0 is not allowed: should be greater than or equal to 1",
        ),
        (
            "client --server localhost --insecure --client-id 0 --ledger certs/ca.crt",
            "ca.crt cannot be read",
        ),
        (
            "client --server localhost --insecure --client-id 0 --ledger certs/ca.crt/ledger",
            "cannot be",
        ),
        (
            "client --server localhost --insecure --client-id 0 --policy policy.toml --program a:b",
            "--program a:b is not allowed with --policy policy.toml",
        ),
        ("cluster recipe.toml --policy policy.toml", "policy policy.toml: max-rounds = 0 is not"),
        ("client --server localhost:0 --ca certs/ca.crt", "--server localhost:0 is not allowed"),
        (
            "client --server localhost --insecure --key certs/clients/node0",
            "is of no use with --insecure",
        ),
        ("status", "give either --ca ca.crt (or --certs DIR), or --insecure"),
        ("status --server 192.0.2.1 --insecure", "--insecure is not allowed for 192.0.2.1"),
        ("follow 1 --ca nowhere.crt", "--ca nowhere.crt does not exist"),
        ("register", "give the names of clients, or --all"),
        ("register nobody --certs certs", "nobody.pub is not a public key"),
        ("certs certs --host localhost", "server.pem is there already"),
        ("certs certs", "nothing to make"),
        ("certs certs --renew --client node1", "--renew makes no key of a client"),
        ("certs none --renew", "ca.crt is missing: bring the authority back"),
        ("register node0 --certs certs --replaces node9", "node9.pub is not a public key"),
        ("register --all --certs certs --replaces node0 --lift", "--replaces is of one key"),
        ("certs certs --client node1 --days 5", "--days is of use with --host alone"),
        ("certs new --host localhost --days 0", "--days 0 is not allowed: 1 to 3600"),
        ("certs new --host localhost --days 3601", "--days 3601 is not allowed: 1 to 3600"),
        (
            "server --host localhost:9092 --certs certs",
            "--host localhost:9092 is not allowed: a host",
        ),
        ("server --host localhost --certs certs --bind [::1]:5", "--bind [::1]:5 is not allowed"),
        ("server --host ::2 --certs certs", "--host ::2 is not in the certificate"),
        ("server --host [::2] --certs certs", "--host ::2 is not in the certificate"),
        ("client --server ::1:x:9092 --ca certs/ca.crt", "--server ::1:x:9092 is not allowed"),
    ],
)
def test_a_mistake_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: str,
    expected: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    make(Path("certs"), ["localhost"], ["node0"])
    np.savez("wrong.npz", x=np.zeros((5, 2)), y=np.zeros(5))
    Path("policy.toml").write_text("max-rounds = 0\n")
    Path("recipe.toml").write_text('task = "digits"\n')
    assert expected in refusal(monkeypatch, capsys, *arguments.split(" "))


@pytest.mark.parametrize(
    "command",
    [
        "client --server localhost --insecure --client-id 0",
        "server --host localhost --certs certs --port PORT --control 127.0.0.1:OTHER",
    ],
)
def test_another_flower_is_refused_before_any_of_its_programs_runs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    make(Path("certs"), ["localhost"], [])
    port, other = map(str, free_loopback_ports(2))
    monkeypatch.setattr(importlib.metadata, "version", lambda _name: "1.35.0")
    words = command.replace("PORT", port).replace("OTHER", other).split()
    assert "error: flwr 1.35.0 is installed" in refusal(monkeypatch, capsys, *words)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--ca certs/ca.crt", True),
        ("--insecure", False),
        ("--ca certs/ca.crt --set node-authentication=false", False),
        ("--insecure --set node-authentication=true", True),
    ],
)
def test_a_run_over_tls_knows_clients_by_their_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, expected: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    make(Path("certs"), ["localhost"], [])
    Path("recipe.toml").write_text('task = "digits"\n')
    submitted: list[RunConfig] = []

    @contextlib.contextmanager
    def nobody(_self: object) -> Iterator[None]:
        yield None

    def submit(config: RunConfig, _to: object) -> int:
        submitted.append(config)
        return 1

    monkeypatch.setattr("blackthorn.launch.federation.operator_options.Connection.open", nobody)
    monkeypatch.setattr("blackthorn.launch.commands.run_remote._submit", submit)
    monkeypatch.setattr(sys, "argv", ["blackthorn", "run", "recipe.toml", *arguments.split()])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code in (None, 0)
    assert [config.node_authentication for config in submitted] == [expected]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("localhost:1", Address("localhost", 1)),
        ("localhost", Address("localhost", 9092)),
        ("[::1]:5", Address("::1", 5)),
        ("::1", Address("::1", 9092)),
        ("192.0.2.1:65535", Address("192.0.2.1", 65535)),
    ],
)
def test_addresses_are_read_as_people_write_them(text: str, expected: Address) -> None:
    address = parse_address(text, "--server", 9092)
    assert address == expected
    assert parse_address(str(address), "--server") == expected


@pytest.mark.parametrize(
    ("text", "host"),
    [("::1", "::1"), ("[::1]", "::1"), ("fl.example.org", "fl.example.org"), ("0.0.0.0",) * 2],
)
def test_hosts_are_read_as_addresses_are(text: str, host: str) -> None:
    assert host_of(text, "--bind") == host


@pytest.mark.parametrize("text", ["", ":9092", "a:b", "a:65536", "a:-1"])
def test_other_texts_are_no_addresses(text: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        parse_address(text, "--server", 9092)


def test_loopback_addresses_stay_on_this_machine_and_no_others() -> None:
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "127.8.8.8", "::1")))
    assert not any(map(is_loopback, ("localhost.example.org", "0.0.0.0", "10.0.0.1", "::")))


@pytest.mark.parametrize(
    ("arguments", "program", "node"),
    [
        ("", None, {}),
        ("--ledger sent.json", None, {"ledger": "sent.json"}),
        (
            "--policy my.toml",
            "blackthorn.client_app.clientapp:main",
            {"policy": "my.toml", "ledger": "my.ledger.json"},
        ),
        (
            "--policy my.toml --ledger sent.json",
            "blackthorn.client_app.clientapp:main",
            {"policy": "my.toml", "ledger": "sent.json"},
        ),
    ],
)
def test_a_client_with_a_policy_runs_its_own_code_and_keeps_a_ledger(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: str,
    program: str | None,
    node: dict[str, str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.toml").write_text("max-rounds = 3\n")
    taken: list[ClientSettings] = []
    monkeypatch.setattr("blackthorn.launch.federation.client_service.take_part", taken.append)
    words = f"client --server localhost --insecure --client-id 7 {arguments}".split()
    monkeypatch.setattr(sys, "argv", ["blackthorn", *words])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code in (None, 0)
    (settings,) = taken
    assert settings.program == program
    config = _node_config(settings)
    kept = {key: str(tmp_path / name) for key, name in node.items()}
    # It can be written, or the client would not have started, and is known again by its id.
    assert all(Path(path).is_file() for path in kept.values())
    if "ledger" in kept:
        kept["ledger-id"] = ClientLedger(Path(kept["ledger"])).read().ledger
    assert config == {"client-id": 7, "partition-id": 7, **kept}
