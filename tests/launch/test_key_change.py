"""docs/operations.md, "Changing a client's key", command by command: the run loses no round."""

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from process_watch import until
from real_deployment import Bench, Started, bench
from sklearn.datasets import load_digits

from blackthorn.launch.federation.addresses import free_loopback_ports
from blackthorn.launch.federation.certs import make
from blackthorn.recording.run_folder import read_metrics

# Minutes: tests/strategies/test_replaced_keys.py has the rules, in memory.
pytestmark = [
    pytest.mark.deployment,
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="there is no ssh-keygen"),
]
_BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_ROUND = re.compile(r"round (\d+) of run \d+")


def commands(repository: Path, fleet: int) -> list[list[str]]:
    """The section's commands, at this machine's server and with node0's examples."""
    page = (repository / "docs" / "operations.md").read_text()
    section = page.split("## Changing a client's key\n")[1].split("\n## ")[0]
    here = section.replace("fl.example.org:9092", f"localhost:{fleet}")
    return [shlex.split(text) for text in _BLOCK.findall(here)]


def rounds(client: Started) -> list[int]:
    """The rounds that a client's program says it took part in."""
    return [int(number) for number in _ROUND.findall(client.text())]


def clients_of(programs: Bench, operator: tuple[str, ...]) -> dict[str, Any]:
    """What `status` says each name's client is."""
    known = json.loads(programs.call("status", *operator, "--json").stdout)
    return {line["name"]: line["client"] for line in known["clients"]}


def test_a_client_s_key_is_changed_in_a_run_that_loses_no_round(
    repository: Path, tmp_path: Path
) -> None:
    fleet, control = free_loopback_ports(2)
    make(tmp_path / "certs", ["localhost"], ["node0", "node1"])
    shutil.copy(tmp_path / "certs" / "ca.crt", tmp_path)
    digits = load_digits()
    x = digits.images.reshape(len(digits.images), -1) / 16.0
    np.savez(tmp_path / "shard.npz", x=x, y=digits.target)
    operator = ("--certs", "certs", "--server", f"localhost:{control}")
    make_key, register, start, unregister = commands(repository, fleet)
    folder = tmp_path / "state" / "runs" / "changed"
    with bench(tmp_path) as programs:
        server = programs.start(
            *("server", "server", "--host", "localhost", "--certs", "certs"),
            *("--port", fleet, "--control", f"127.0.0.1:{control}", "--metrics-port", 0),
        )
        server.says("ready:")
        assert programs.call("register", "--all", *operator).returncode == 0
        old, other = (
            programs.start(
                *(f"client{i}", "client", "--server", f"localhost:{fleet}", "--ca", "ca.crt"),
                *("--key", f"certs/clients/node{i}", "--data", "shard.npz"),
            )
            for i in range(2)
        )
        for client in (old, other):
            client.says("connected to ")
        settings = {"num-server-rounds": 2000, "round-timeout": 200, "report": "false"}
        started = programs.call(
            *("run", repository / "recipes" / "own-data.toml", "--ca", "ca.crt"),
            *("--server", f"localhost:{control}", "--clients", 2, "--output-dir", "runs/changed"),
            *(part for key, value in settings.items() for part in ("--set", f"{key}={value}")),
        )
        assert started.returncode == 0, started.stderr
        until(lambda: len(read_metrics(folder)) > 1, 400)
        assert clients_of(programs, operator) == {"node0": 0, "node1": 1}

        assert programs.call_program(make_key).returncode == 0
        shutil.copy(tmp_path / "new-node0.pub", tmp_path / "certs" / "clients")
        done = programs.call(*register[1:], *operator[2:])
        assert done.stdout.startswith("new-node0 is registered, as node "), done.stderr
        assert done.stdout.endswith(", client 0\n")
        new = programs.start("new", *start[1:])
        new.says("connected to ")
        until(lambda: len(rounds(new)) > 1, 400)
        assert clients_of(programs, operator) == {"new-node0": 0, "node0": None, "node1": 1}
        assert old.stop() in (0, 143)
        done = programs.call(*unregister[1:], *operator[2:])
        assert done.stdout == "node0 is unregistered\n", done.stderr
        after = len(read_metrics(folder))
        until(lambda: len(read_metrics(folder)) > after + 1, 400)
        assert clients_of(programs, operator) == {"new-node0": 0, "node1": 1}

        entries = list(read_metrics(folder))
        assert [entry["round"] for entry in entries] == list(range(1, len(entries) + 1))
        for entry in entries:
            assert (entry["invited"], entry["replied"], entry["rejected"]) == (2, 2, []), entry
        # The new one follows the old one: it may evaluate the model that the old one has trained.
        assert max(rounds(old)) <= min(rounds(new)) <= max(rounds(old)) + 1
