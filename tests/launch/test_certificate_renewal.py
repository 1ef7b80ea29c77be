"""`blackthorn certs --renew` beside a `blackthorn server` that runs, with a client that stays."""

import os
import re
import ssl
import stat
from pathlib import Path

import pytest
from cryptography import x509
from process_watch import until
from real_deployment import bench

from blackthorn.launch.federation.addresses import free_loopback_ports
from blackthorn.launch.federation.certs import make
from blackthorn.settings.config import ConfigError


def serial(path: Path) -> int:
    return x509.load_pem_x509_certificate(path.read_bytes()).serial_number


def test_a_renewal_replaces_the_pair_for_the_same_names_by_the_same_authority(
    tmp_path: Path,
) -> None:
    make(tmp_path, ["fl.example.org", "192.0.2.7"], ["node0"])
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    made = make(tmp_path, [], [], days=90, renew=True)
    assert made == [tmp_path / "server.pem", tmp_path / "server.key"]
    now = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert now.keys() == before.keys()
    assert {path for path in now if now[path] != before[path]} == set(made)
    assert stat.S_IMODE((tmp_path / "server.key").stat().st_mode) == 0o600
    old, new = (x509.load_pem_x509_certificate(pem) for pem in (before[made[0]], now[made[0]]))
    names = x509.SubjectAlternativeName
    assert (
        old.extensions.get_extension_for_class(names).value
        == new.extensions.get_extension_for_class(names).value
    )
    new.verify_directly_issued_by(x509.load_pem_x509_certificate(now[tmp_path / "ca.crt"]))
    assert 89 <= (new.not_valid_after_utc - new.not_valid_before_utc).days <= 90


def test_a_renewal_that_cannot_be_written_leaves_the_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, ["localhost"], [])
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            make(tmp_path, [], [], renew=True)
    assert {path: path.read_bytes() for path in before} == before
    make(tmp_path, [], [], renew=True)
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in before}


@pytest.mark.parametrize(
    ("lost", "asked", "words"),
    [
        ("ca.key", {}, r"ca\.key is missing: bring the authority's key back"),
        ("server.pem", {}, r"server\.pem cannot be read .*: give its names with --host"),
        ("", {"clients": ["node1"]}, "--renew makes no key of a client"),
        ("", {"days": 3601}, "--days 3601 is not allowed: 1 to 3600"),
    ],
)
def test_what_a_renewal_needs_is_said(
    tmp_path: Path, lost: str, asked: dict[str, list[str] | int], words: str
) -> None:
    make(tmp_path, ["localhost"], [])
    if lost:
        (tmp_path / lost).unlink()
    arguments = {"hosts": [], "clients": [], **asked}
    with pytest.raises((ConfigError, ValueError), match=words):
        make(tmp_path, renew=True, **arguments)  # type: ignore[arg-type]
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.deployment
def test_a_running_server_shows_the_renewed_certificate_and_keeps_its_clients(
    repository: Path, tmp_path: Path
) -> None:
    fleet, control = free_loopback_ports(2)
    with bench(tmp_path) as programs:
        certs = tmp_path / "certs"
        assert programs.call("certs", "certs", "--host", "localhost", "--client", "node0").stdout
        server = programs.start(
            *("server", "server", "--host", "localhost", "--certs", "certs"),
            *("--port", fleet, "--control", f"127.0.0.1:{control}", "--metrics-port", 0),
        )
        server.says("ready:")

        def shown() -> set[int]:
            """What a new connection is shown, at the clients' port and at the operators'."""
            pems = [ssl.get_server_certificate(("127.0.0.1", p)) for p in (fleet, control)]
            return {x509.load_pem_x509_certificate(pem.encode()).serial_number for pem in pems}

        first = serial(certs / "server.pem")
        assert shown() == {first}
        operator = ("--certs", "certs", "--server", f"localhost:{control}")
        assert programs.call("register", "node0", *operator).returncode == 0
        client = programs.start(
            *("client", "client", "--server", f"localhost:{fleet}"),
            *("--ca", "certs/ca.crt", "--key", "certs/clients/node0"),
        )
        client.says("connected to ")

        renewed = programs.call("certs", "certs", "--renew", "--days", 90)
        assert renewed.stdout == "renewed certs/server.pem\nrenewed certs/server.key\n"
        server.says(f"{certs / 'server.pem'} was renewed, and is good until ")
        second = serial(certs / "server.pem")
        assert shown() == {second} != {first}

        (certs / "server.key").write_text("spoilt\n")
        server.says("the certificate before stays in use until its files fit")
        assert f"{certs / 'server.key'} is not a private key" in server.text()
        assert shown() == {second}

        run = programs.call(
            *("run", repository / "recipes" / "demo.toml", "--ca", "certs/ca.crt", "--follow"),
            *("--server", f"localhost:{control}", "--clients", 1),
            *("--set", "num-server-rounds=1", "--set", "algorithm=gfedavg"),
            *("--set", "corrupt-fraction=0.0"),
            seconds=600,
        )
        assert run.returncode == 0, run.stdout + run.stderr + client.text()
        assert len(re.findall("connected to ", client.text())) == 1
        assert "does not answer" not in client.text()
        assert client.process.poll() is None

        programs.call("certs", "certs", "--renew")
        until(lambda: server.text().count("was renewed") == 2)
        assert shown() == {serial(certs / "server.pem")} != {second}
