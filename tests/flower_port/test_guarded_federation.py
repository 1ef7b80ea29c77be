"""`blackthorn server` over TLS with registered keys: four honest clients, and a rogue with a key.

The rogue attacks the server in another way each round. What the honest clients make of it is
compared with a simulation in which the fifth client never answers.
"""

import json
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from process_watch import until
from real_deployment import Bench, bench
from rich.console import Console
from safetensors.numpy import load_file

from blackthorn.launch.commands.recipes import recipe_config
from blackthorn.launch.commands.simulate import simulate
from blackthorn.launch.federation.addresses import free_loopback_ports
from blackthorn.launch.federation.certs import make
from blackthorn.launch.federation.process_environment import CLUSTER_VARIABLE, marked_processes
from blackthorn.recording.run_folder import read_metrics

pytestmark = [
    pytest.mark.deployment,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc to see what runs"),
]

CLIENTS, ROGUE = 5, 4
DEADLINE, SLACK = 20.0, 5.0
MEMORY = 500 * 2**20

# Attack -> a word of the refusal in the run's record, and the key that it names.
STRANGERS = "unknown keys"
ATTACKS = {
    "many-ids": ("a request of 3400", "node4"),
    "object-tree": ("an object that consists of different parts", "node4"),
    "foreseen-objects": (None, "node4"),
    "repeated-answer": ("an answer that was announced 9 times before", "node4"),
    "other-node": ("a request that says it is node", "node4"),
    "half-open": ("requests at a time", "node4"),
    "stalled-handshakes": ("on which no registered key speaks", STRANGERS),
    "other-key": ("a key in the request that did not sign it", "node4"),
    "instruction": ("a message that says it is node 1's", "node4"),
    "others-message": ("an answer to a message that is not there", "node4"),
    "replay": ("a second answer to one message", "node4"),
    "long-key": ("larger than any may be", "node4"),
    "long-error": ("larger than any may be", "node4"),
    "million-metrics": ("larger than any may be", "node4"),
    "registrations": ("a key that is not registered", STRANGERS),
    "slow-upload": ("broken off", "node4"),
    "pings": (None, "node4"),
    "resets": (None, "node4"),
    "repeated-chunks": (None, "node4"),
}
SETTINGS = {
    "algorithm": "gfedavg",
    "corrupt-fraction": 0.0,
    "local-steps": 2,
    "num-server-rounds": len(ATTACKS),
}


@dataclass
class Memory:
    """Bytes of memory of a server's processes together: after the first round, and at most."""

    at_first: int = 0
    most: int = 0
    over: threading.Event = field(default_factory=threading.Event)

    def watch(self, mark: bytes, folder: Path) -> None:
        while not self.over.wait(0.5):
            if len(read_metrics(folder)) > 1:
                now = sum(map(resident, marked_processes({mark})))
                self.at_first = self.at_first or now
                self.most = max(self.most, now)


def resident(process: int) -> int:
    """What a process shares with others, as one that was just forked all of it, counts in part."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def mark_of(server: int) -> bytes:
    """The mark that the environment of all the server's processes has."""
    for child in Path(f"/proc/{server}/task/{server}/children").read_text().split():
        for variable in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
            if variable.startswith(CLUSTER_VARIABLE.encode()):
                return variable
    raise AssertionError("no child of the server has a mark")


@pytest.fixture(scope="module")
def attacked(
    repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Bench, Path, Memory, str]]:
    """The run's folder, how the server's memory grew, and what `status` says afterwards."""
    home = tmp_path_factory.mktemp("guarded")
    names = [f"node{i}" for i in range(CLIENTS)]
    make(home / "certs", ["localhost"], names)
    fleet, control = free_loopback_ports(2)
    where = ("--server", f"localhost:{control}")
    with bench(home) as programs:
        server = programs.start(
            *("server", "server", "--host", "localhost", "--certs", "certs", "--state", "state"),
            *("--port", fleet, "--control", f"127.0.0.1:{control}"),
        )
        server.says("ready:", 180)
        for name, most in [*((n, None) for n in names[:ROGUE]), (names[ROGUE], 100)]:
            options = () if most is None else ("--max-examples", most)
            done = programs.call("register", name, "--certs", "certs", *options, *where)
            assert f", client {name[-1]}" in done.stdout, done.stderr
        clients = [
            programs.start(
                *(f"client{i}", "client", "--server", f"localhost:{fleet}", "--ca"),
                *("certs/ca.crt", "--key", f"certs/clients/node{i}"),
            )
            for i in range(ROGUE)
        ]
        rogue = programs.start_program(
            "rogue",
            [
                *(
                    sys.executable,
                    "-m",
                    "blackthorn.attacks.rogue",
                    "--superlink",
                    f"localhost:{fleet}",
                ),
                *("--client", str(ROGUE), "--root-certificates", "certs/ca.crt"),
                *("--key", f"certs/clients/node{ROGUE}", "--victim", "certs/clients/node0.pub"),
                *("--behaviour", ",".join(ATTACKS)),
            ],
        )
        for client in clients:
            client.says("connected to localhost", 180)
        folder = home / "state" / "runs" / "attacked"
        memory = Memory()
        watching = (mark_of(server.process.pid), folder)
        threading.Thread(target=memory.watch, args=watching, daemon=True).start()
        settings = [f"{key}={value}" for key, value in SETTINGS.items()]
        run = programs.start(
            *("run", "run", repository / "recipes" / "demo.toml", *where, "--ca", "certs/ca.crt"),
            *("--follow", "--clients", CLIENTS, "--output-dir", "runs/attacked"),
            *(part for setting in settings for part in ("--set", setting)),
            *("--set", f"round-timeout={DEADLINE}"),
        )
        longest = len(ATTACKS) * (DEADLINE + SLACK) + 180
        until(lambda: run.process.poll() is not None, longest)
        assert run.process.returncode == 0, run.text() + server.text() + rogue.text()
        memory.over.set()
        status = programs.call("status", "--certs", "certs", *where).stdout
        yield programs, folder, memory, status


def test_every_round_ends_in_time_and_the_record_names_the_key(
    attacked: tuple[Bench, Path, Memory, str],
) -> None:
    entries = read_metrics(attacked[1])[1:]
    assert [entry["round"] for entry in entries] == list(range(1, len(ATTACKS) + 1))
    for entry, name in zip(entries, ATTACKS, strict=True):
        assert entry["seconds"]["training"] <= DEADLINE + SLACK, name
        assert entry["replied"] == CLIENTS - 1, (name, entry)
        assert [r["client"] for r in entry["rejected"]] == [ROGUE], name
    refused = [r for entry in entries for r in entry.get("refused", [])]
    for name, (word, key) in ATTACKS.items():
        if word is not None:
            said = [r["what"] for r in refused if r["key"] == key]
            assert any(word in what for what in said), (name, said)
    assert {r["client"] for r in refused if r["key"] == "node4"} == {ROGUE}
    assert "more than" in entries[-1]["rejected"][0]["reason"]
    assert "lists 2500 chunks" in entries[-1]["rejected"][0]["reason"]


def test_the_honest_clients_learn_what_they_learn_alone(
    attacked: tuple[Bench, Path, Memory, str], repository: Path, tmp_path: Path
) -> None:
    values = {
        **SETTINGS,
        "num-clients": CLIENTS,
        "num-byzantine": 1,
        "attack": "exit",
        "round-timeout": DEADLINE,
        "output-dir": str(tmp_path),
    }
    simulate(recipe_config(repository / "recipes" / "demo.toml", (), values), Console(quiet=True))
    expected = load_file(tmp_path / "checkpoints" / "final.safetensors")
    found = load_file(attacked[1] / "checkpoints" / "final.safetensors")
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=1e-5)


def test_the_servers_memory_stays_small(attacked: tuple[Bench, Path, Memory, str]) -> None:
    memory = attacked[2]
    assert 0 < memory.at_first <= memory.most
    assert memory.most - memory.at_first < MEMORY, memory


def test_status_and_report_say_who_did_what(attacked: tuple[Bench, Path, Memory, str]) -> None:
    _, folder, _, status = attacked
    assert "node4: refused" in status
    assert "an object that consists of different parts" in (folder / "report.html").read_text()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["clients"]["rejected"] == len(ATTACKS)
