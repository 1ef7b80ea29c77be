"""docker/federation: what compose is told, without an engine."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from blackthorn.launch.cli import main
from blackthorn.launch.federation.members import ClientSettings, ServerSettings

CLIENTS, ATTACKER = 2, "client-2"


def script(repository: Path, folder: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    """`docker/federation config` with CLIENTS honest clients and an attacker."""
    plugin = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    if plugin.returncode and shutil.which("docker-compose") is None:
        pytest.skip("there is no Docker Compose, neither as plugin nor as docker-compose")
    return subprocess.run(
        [str(repository / "docker" / "federation"), "config"],
        env={**os.environ, "CLIENTS": str(CLIENTS), "DEPLOYMENT": str(folder), **settings},
        capture_output=True,
        text=True,
        timeout=60,
    )


def services(repository: Path, folder: Path, **settings: str) -> dict[str, Any]:
    done = script(repository, folder, **settings)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = yaml.safe_load(done.stdout)["services"]
    return found


def words_on_the_host(service: dict[str, Any]) -> list[str]:
    """A service's command, with what it mounts named as on the host."""
    command = service["command"]
    words = shlex.split(command) if isinstance(command, str) else command
    volumes = service["volumes"]
    mounts = [
        v.split(":")[:2] if isinstance(v, str) else (v["source"], v["target"]) for v in volumes
    ]
    for source, target in mounts:
        words = [
            source + word.removeprefix(target) if (word + "/").startswith(f"{target}/") else word
            for word in words
        ]
    return words


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_the_script_tells_its_help_without_an_engine(repository: Path, option: str) -> None:
    command = repository / "docker" / "federation"
    done, wrong = (
        subprocess.run([command, word], capture_output=True, text=True, timeout=60, check=False)
        for word in (option, "no-such-command")
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "docker/federation up " in done.stdout
    assert (wrong.returncode, wrong.stdout, wrong.stderr) == (2, "", done.stdout)


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    path = tmp_path / "policy.toml"
    path.write_text("max-rounds = 3\n")
    return path


def test_every_honest_client_is_given_the_policy_and_a_ledger_of_its_own(
    repository: Path, tmp_path: Path, policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their commands are run as far as to the server, which is not there."""
    found = services(repository, tmp_path / "deployment", POLICY=str(policy))
    taken: list[ClientSettings] = []
    monkeypatch.setattr("blackthorn.launch.federation.client_service.take_part", taken.append)
    for number in range(CLIENTS + 1):
        words = words_on_the_host(found[f"client-{number}"])
        words[words.index("--logs") + 1] = str(tmp_path / "logs")
        run_command(monkeypatch, "client", *words)
    *honest, attacker = taken
    assert [one.policy and one.policy.read_text() for one in honest] == ["max-rounds = 3\n"] * 2
    ledgers = [one.ledger for one in honest]
    assert ledgers == [tmp_path / f"deployment/ledgers/client-{i}/ledger.json" for i in (0, 1)]
    assert (attacker.policy, attacker.ledger) == (None, None)


def test_without_a_policy_nobody_has_one(repository: Path, tmp_path: Path) -> None:
    found = services(repository, tmp_path)
    assert not [one for one in found.values() if "--policy" in one.get("command", "")]


def test_a_policy_that_is_not_there_is_one_line_and_starts_nothing(
    repository: Path, tmp_path: Path
) -> None:
    done = script(repository, tmp_path / "deployment", POLICY="nowhere.toml")
    assert (done.returncode, done.stderr) == (2, "error: POLICY=nowhere.toml is no file\n")
    assert not list((tmp_path / "deployment").iterdir())


@pytest.mark.parametrize("tls", ["", "1"])
def test_the_container_of_the_server_runs_it_as_one_tree_that_the_engine_starts_again(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tls: str
) -> None:
    found = services(repository, tmp_path, TLS=tls)
    assert found["server"]["restart"] == "unless-stopped"
    served: list[ServerSettings] = []
    monkeypatch.setattr("blackthorn.launch.federation.server.serve", served.append)
    program, *words = shlex.split(found["server"]["command"])
    assert program == "blackthorn"
    run_command(monkeypatch, *words)
    (settings,) = served
    assert (settings.certs is not None, settings.resume) == (bool(tls), True)
    # Its runs, database and notes are on the host, or the next container would know nothing.
    kept = {volume.split(":")[1] for volume in map(str, found["server"]["volumes"])}
    assert {str(settings.state), f"{settings.state}/runs"} <= kept
    # Of all that it listens on, clients reach one port: the control port is on another network.
    assert settings.fleet.host == "0.0.0.0"
    assert settings.control.host in found["server"]["networks"]["server"]["aliases"]
    assert settings.control.host not in found["server"]["networks"]["clients"]["aliases"]
    assert str(settings.health) in found["server"]["healthcheck"]["test"]


def run_command(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["blackthorn", *words])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code in (None, 0)
