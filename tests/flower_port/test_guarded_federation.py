"""`blackthorn server` over TLS with registered keys: four honest clients, and a rogue with a key.

The rogue attacks the server in another way each round: first in those after which it can decline
to train, in a run where nobody waits for a deadline, then in those after which an answer of its is
seldom taken, with a deadline that the honest clients can keep on this machine as it is now. What
these make of it is compared with a simulation in which the fifth client never answers.
"""

import json
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
from process_watch import until
from real_deployment import Bench, Started, bench
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
# Seconds: a deadline that no answer needs, the shortest one that is let pass (or so many times what
# rounds mostly took), and by how much a round may pass any.
AMPLE, SHORTEST, TIMES, SLACK = 120.0, 10.0, 4.0, 5.0
MEMORY = 500 * 2**20

# Attack -> a word of the refusal in the run's record, and the key that it names.
STRANGERS = "unknown keys"
DECLINED = {
    "many-ids": ("a request of 3400", "node4"),
    "object-tree": ("an object that consists of different parts", "node4"),
    "other-node": ("a request that says it is node", "node4"),
    "stalled-handshakes": ("on which no registered key speaks", STRANGERS),
    "other-key": ("a key in the request that did not sign it", "node4"),
    "instruction": ("a message that says it is node 1's", "node4"),
    "others-message": ("an answer to a message that is not there", "node4"),
    "long-key": ("larger than any may be", "node4"),
    "long-error": ("larger than any may be", "node4"),
    "registrations": ("a key that is not registered", STRANGERS),
    "slow-upload": ("broken off", "node4"),
    "pings": (None, "node4"),
    "resets": (None, "node4"),
    "repeated-chunks": (None, "node4"),
}
# Several in a turn: most of a round is the time of its clients.
DECLINED_IN_TURN = (
    "many-ids+other-node+other-key+instruction",
    "object-tree+others-message+long-key",
    "stalled-handshakes",
    "long-error+registrations",
    "slow-upload",
    "pings+resets",
    "repeated-chunks",
)
LET_PASS = {
    "foreseen-objects": (None, "node4"),
    "repeated-answer": ("an answer that was announced 9 times before", "node4"),
    "replay": ("a second answer to one message", "node4"),
    "million-metrics": ("larger than any may be", "node4"),
    "half-open": ("requests at a time", "node4"),
}
Attacks = dict[str, tuple[str | None, str]]
SETTINGS = {"algorithm": "gfedavg", "corrupt-fraction": 0.0, "local-steps": 2}


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


@dataclass
class Attacked:
    """A run: its folder, its deadline, what the rogue did, in which turns, and how the server's
    memory grew."""

    folder: Path
    deadline: float
    attacks: Attacks
    turns: Sequence[str]
    memory: Memory

    def entries(self) -> list[dict[str, Any]]:
        return list(read_metrics(self.folder))[1:]


@dataclass
class Federation:
    """A server with its honest clients; `where` is how an operator reaches it."""

    programs: Bench
    server: Started
    where: tuple[str, ...]
    fleet: int

    def attacked(
        self, repository: Path, name: str, attacks: Attacks, turns: Sequence[str], deadline: float
    ) -> Attacked:
        """A run with a rogue, which is stopped after it."""
        assert sorted("+".join(turns).split("+")) == sorted(attacks)
        folder = self.programs.folder / "state" / "runs" / name
        memory = Memory()
        watching = (mark_of(self.server.process.pid), folder)
        threading.Thread(target=memory.watch, args=watching, daemon=True).start()
        rogue = self.programs.start_program(
            f"rogue-{name}",
            [
                *(sys.executable, "-m", "blackthorn.attacks.rogue"),
                *("--superlink", f"localhost:{self.fleet}", "--client", str(ROGUE)),
                *("--root-certificates", "certs/ca.crt", "--key", f"certs/clients/node{ROGUE}"),
                *("--victim", "certs/clients/node0.pub", "--behaviour", ",".join(turns)),
            ],
        )
        rogue.says("enrols as client")
        settings = {**SETTINGS, "num-server-rounds": len(turns), "round-timeout": deadline}
        run = self.programs.start(
            f"run-{name}",
            *("run", repository / "recipes" / "demo.toml", *self.where),
            *("--follow", "--clients", CLIENTS, "--output-dir", f"runs/{name}"),
            *(part for key, value in settings.items() for part in ("--set", f"{key}={value}")),
        )
        until(lambda: run.process.poll() is not None, len(turns) * (deadline + SLACK) + 180)
        assert run.process.returncode == 0, run.text() + self.server.text() + rogue.text()
        memory.over.set()
        # By Ctrl-C, on which it signs off: its node is free for the next one.
        rogue.process.send_signal(signal.SIGINT)
        rogue.process.wait(90)
        return Attacked(folder, deadline, attacks, turns, memory)


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    home = tmp_path_factory.mktemp("guarded")
    names = [f"node{i}" for i in range(CLIENTS)]
    make(home / "certs", ["localhost"], names)
    fleet, control = free_loopback_ports(2)
    where = ("--server", f"localhost:{control}", "--ca", "certs/ca.crt")
    with bench(home) as programs:
        server = programs.start(
            *("server", "server", "--host", "localhost", "--certs", "certs", "--state", "state"),
            *("--port", fleet, "--control", f"127.0.0.1:{control}"),
        )
        server.says("ready:")
        for name, most in [*((n, None) for n in names[:ROGUE]), (names[ROGUE], 100)]:
            options = () if most is None else ("--max-examples", most)
            done = programs.call("register", name, "--certs", "certs", *options, *where[:2])
            assert f", client {name[-1]}" in done.stdout, done.stderr
        clients = [
            programs.start(
                *(f"client{i}", "client", "--server", f"localhost:{fleet}", "--ca"),
                *("certs/ca.crt", "--key", f"certs/clients/node{i}"),
            )
            for i in range(ROGUE)
        ]
        for client in clients:
            client.says("connected to localhost")
        yield Federation(programs, server, where, fleet)


@pytest.fixture(scope="module")
def attacked(federation: Federation, repository: Path) -> list[Attacked]:
    """The run in which the rogue declines after each attack, and the one in which it cannot."""
    declined = federation.attacked(repository, "declined", DECLINED, DECLINED_IN_TURN, AMPLE)
    deadline = max(SHORTEST, TIMES * median(e["seconds"]["training"] for e in declined.entries()))
    let_pass = federation.attacked(repository, "let-pass", LET_PASS, list(LET_PASS), deadline)
    return [declined, let_pass]


def test_every_round_ends_in_time_and_the_record_names_the_key(attacked: list[Attacked]) -> None:
    for run in attacked:
        entries = run.entries()
        assert [entry["round"] for entry in entries] == list(range(1, len(run.turns) + 1))
        for entry, name in zip(entries, run.turns, strict=True):
            assert entry["seconds"]["training"] <= run.deadline + SLACK, name
            assert entry["replied"] == CLIENTS - 1, (name, entry)
            assert [r["client"] for r in entry["rejected"]] == [ROGUE], name
        refused = [r for entry in entries for r in entry.get("refused", [])]
        for name, (word, key) in run.attacks.items():
            if word is not None:
                said = [r["what"] for r in refused if r["key"] == key]
                assert any(word in what for what in said), (name, said)
        assert {r["client"] for r in refused if r["key"] == "node4"} == {ROGUE}
    (last,) = attacked[0].entries()[-1]["rejected"]
    assert "more than" in last["reason"]
    assert "lists 2500 chunks" in last["reason"]


def test_the_honest_clients_learn_what_they_learn_alone(
    attacked: list[Attacked], repository: Path, tmp_path: Path
) -> None:
    for run in attacked:
        folder = tmp_path / run.folder.name
        values = {
            **SETTINGS,
            "num-clients": CLIENTS,
            "num-server-rounds": len(run.turns),
            "num-byzantine": 1,
            "attack": "exit",
            "output-dir": str(folder),
        }
        alone = recipe_config(repository / "recipes" / "demo.toml", (), values)
        simulate(alone, Console(quiet=True))
        expected = load_file(folder / "checkpoints" / "final.safetensors")
        found = load_file(run.folder / "checkpoints" / "final.safetensors")
        assert found.keys() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=1e-5)


def test_the_servers_memory_stays_small(attacked: list[Attacked]) -> None:
    for run in attacked:
        assert 0 < run.memory.at_first <= run.memory.most
        assert run.memory.most - run.memory.at_first < MEMORY, run.memory


def test_status_and_report_say_who_did_what(
    attacked: list[Attacked], federation: Federation
) -> None:
    status = federation.programs.call("status", "--certs", "certs", *federation.where[:2]).stdout
    assert "node4: refused" in status
    report = (attacked[0].folder / "report.html").read_text()
    assert "an object that consists of different parts" in report
    for run in attacked:
        summary = json.loads((run.folder / "summary.json").read_text())
        assert summary["clients"]["rejected"] == len(run.turns)
