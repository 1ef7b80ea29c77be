"""docs/deploy.md, command by command, on hosts of their own."""

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from network import Host, network, require_namespaces
from real_deployment import Bench, Started, bench
from sklearn.datasets import load_digits

from blackthorn.recording.run_folder import read_summary

pytestmark = pytest.mark.deployment

SERVER = "fl.example.org"
NAMES = ("server", "node0", "node1")
_BLOCK = re.compile(r"^```sh (\w+)( &)?\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.fixture
def machines(tmp_path: Path, repository: Path) -> Iterator[dict[str, tuple[Host, Bench]]]:
    """Three hosts, each with a folder of its own."""
    require_namespaces()
    with network(NAMES, SERVER) as hosts:
        folders = [tmp_path / name for name in NAMES]
        for folder in folders:
            folder.mkdir()
        shutil.copytree(repository / "recipes", folders[0] / "recipes")
        digits = load_digits()
        for number, folder in enumerate(folders[1:]):
            x, y = digits.images[number::2], digits.target[number::2]
            np.savez(folder / "shard.npz", x=x.reshape(len(x), -1) / 16.0, y=y)
        with bench(folders[0]) as one, bench(folders[1]) as two, bench(folders[2]) as three:
            yield dict(zip(NAMES, zip(hosts, (one, two, three), strict=True), strict=True))


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="there is no ssh-keygen")
def test_the_guide_works_as_it_is_written(
    machines: dict[str, tuple[Host, Bench]], repository: Path
) -> None:
    blocks = _BLOCK.findall((repository / "docs" / "deploy.md").read_text())
    assert len(blocks) == 11
    said: dict[str, str] = {}
    running: dict[str, Started] = {}
    for machine, background, text in blocks:
        host, programs = machines[machine]
        (line,) = text.strip().splitlines()
        words = line.split()[1]
        carry_keys(machines)
        if background:
            running[machine] = start(programs, host, line)
            running[machine].says("ready:" if machine == "server" else f"connected to {SERVER}")
        else:
            said[words] = call(programs, host, line)
    assert said["certs"].splitlines() == ["renewed certs/server.pem", "renewed certs/server.key"]
    running["server"].says("certs/server.pem was renewed, and is good until ")
    assert "node2 is registered, as node" in said["register"]
    assert "completed: 5 rounds" in said["run"]
    (folder,) = (machines["server"][1].folder / "state" / "runs").iterdir()
    summary = read_summary(folder)
    assert summary is not None
    assert summary["clients"] == {"invited": 10, "replied": 10, "rejected": 0}
    rows = [row.split() for row in said["status"].splitlines()]
    assert [row[0] for row in rows[2:]] == ["node0", "node1", "node2"]
    assert [row[1] for row in rows[2:]] == ["online", "online", "registered"]
    assert said["unregister"] == "node1 is unregistered\n"
    running["node1"].says("unregistered there")


def carry_keys(machines: dict[str, tuple[Host, Bench]]) -> None:
    """What the guide's reader copies between the machines."""
    certs = machines["server"][1].folder / "certs"
    for name in NAMES[1:]:
        folder = machines[name][1].folder
        for file in (certs / "ca.crt", certs / "clients" / name):
            if file.exists():
                shutil.copy(file, folder)
    public = machines["node1"][1].folder / "node2.pub"
    if public.exists():
        shutil.copy(public, certs / "clients")


def start(programs: Bench, host: Host, line: str) -> Started:
    command, *arguments = shlex.split(line)
    assert command == "blackthorn"
    return programs.start(arguments[0], *arguments, prefix=host.prefix)


def call(programs: Bench, host: Host, line: str) -> str:
    command, *arguments = shlex.split(line)
    done = (
        programs.call(*arguments, prefix=host.prefix, seconds=300)
        if command == "blackthorn"
        else programs.call_program([*host.prefix, command, *arguments])
    )
    assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
    return done.stdout
