"""docs/operations.md, command by command, on a server's and a client's host."""

import json
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from network import Host, network, require_namespaces
from process_watch import until
from prometheus_client.parser import text_string_to_metric_families
from real_deployment import Bench, Started, bench
from sklearn.datasets import load_digits

from blackthorn.launch.federation import measures
from blackthorn.launch.federation.certs import make
from blackthorn.recording.run_folder import read_metrics

# Minutes: what it uses, metrics, runs and the audit log, has shorter tests of its own.
pytestmark = [pytest.mark.deployment, pytest.mark.slow]

NAMES = ("server", "node0")
SERVER = "fl.example.org"
_BLOCK = re.compile(r"^```sh (\w+)( &)?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
Measured = dict[tuple[str, ...], float]


@dataclass
class Guide:
    """The page's commands, in any order; `left` are those that were not given yet."""

    machines: dict[str, tuple[Host, Bench]]
    left: list[tuple[str, str, str]]
    running: dict[str, Started] = field(default_factory=dict)
    again: list[tuple[str, str, str]] = field(default_factory=list)

    def give(self, begins: str) -> str:
        """The page's command that begins so: what it says, or nothing of one that goes on."""
        (found,) = [b for b in {*self.left, *self.again} if b[2].startswith(begins)]
        if found in self.left:
            self.left.remove(found)
            self.again.append(found)
        machine, background, text = found
        host, programs = self.machines[machine]
        said = ""
        for line in text.strip().splitlines():
            command, *arguments = shlex.split(line)
            if background:
                self.running[machine] = programs.start(
                    f"{machine}-{len(programs.started)}", *arguments, prefix=host.prefix
                )
            elif command == "blackthorn":
                done = programs.call(*arguments, prefix=host.prefix, seconds=900)
                assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
                said += done.stdout
            else:
                program = sys.executable if command == "python" else command
                done = programs.call_program([*host.prefix, program, *arguments])
                assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
                said += done.stdout
        return said

    def get(self, machine: str, url: str) -> str:
        host, programs = self.machines[machine]
        return programs.call_program([*host.prefix, "curl", "-sS", url]).stdout

    def operate(self, *arguments: object) -> str:
        host, programs = self.machines["server"]
        done = programs.call(*arguments, prefix=host.prefix, seconds=900)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture
def guide(tmp_path: Path, repository: Path) -> Iterator[Guide]:
    """A federation's two hosts, with keys and examples where deploy.md leaves them."""
    require_namespaces()
    blocks = _BLOCK.findall((repository / "docs" / "operations.md").read_text())
    with network(NAMES, SERVER) as hosts:
        folders = [tmp_path / name for name in NAMES]
        for folder in folders:
            folder.mkdir()
        make(folders[0] / "certs", [SERVER], ["node0"])
        shutil.copytree(repository / "recipes", folders[0] / "recipes")
        for file in ("ca.crt", "clients/node0"):
            shutil.copy(folders[0] / "certs" / file, folders[1])
        digits = load_digits()
        x, y = digits.images, digits.target
        np.savez(folders[1] / "shard.npz", x=x.reshape(len(x), -1) / 16.0, y=y)
        with bench(folders[0]) as one, bench(folders[1]) as two:
            yield Guide(dict(zip(NAMES, zip(hosts, (one, two), strict=True), strict=True)), blocks)


def measured(text: str) -> Measured:
    """Every sample by its name and its labels' values, in the order of the table of measures."""
    labels = {one.name: one.labels for one in (*measures.SERVER, *measures.CLIENT)}
    return {
        (sample.name, *(sample.labels[label] for label in labels[family.name])): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def names(found: Measured) -> set[str]:
    return {key[0].removesuffix("_total") for key in found}


RUN = ("run", "recipes/own-data.toml", "--ca", "certs/ca.crt", "--follow", "--clients", 1)
PRIVATE = {"algorithm": "dp-fedavg", "noise-multiplier": 1, "clip-norm": 1, "delta": 0.1}


def test_the_guide_works_as_it_is_written(guide: Guide) -> None:
    guide.give("blackthorn server --host")
    server = guide.running["server"]
    server.says("/metrics and /healthz are at http://127.0.0.1:9095", 400)
    server.says("ready:", 400)
    assert guide.give("curl -sS http://127.0.0.1:9095/healthz") == "ok\n"
    guide.operate("register", "node0", "--certs", "certs")
    guide.give("blackthorn client --server")
    guide.running["node0"].says("connected to", 400)
    assert guide.get("node0", "http://127.0.0.1:9096/healthz") == "ok\n"
    client = measured(guide.get("node0", "http://127.0.0.1:9096/metrics"))
    assert names(client) == {one.name for one in measures.CLIENT}
    assert client["blackthorn_client_connected",] == 1
    # From elsewhere nobody answers.
    assert guide.get("node0", f"http://{SERVER}:9095/metrics") == ""

    runs = guide.machines["server"][1].folder / "state" / "runs"
    folder, private = runs / "first", runs / "private"
    two = ("--set", "num-server-rounds=2", "--output-dir")
    guide.operate(*RUN, *two, "runs/first")
    (run,) = re.findall(r"^run (\d+): ", guide.operate("status", "--certs", "certs"), re.MULTILINE)
    metrics = "http://127.0.0.1:9095/metrics"

    def over() -> bool:
        return ("blackthorn_run_state", run, "finished:completed") in measured(
            guide.get("server", metrics)
        )

    until(over, 240)
    found = measured(guide.give("curl -sS http://127.0.0.1:9095/metrics"))
    lines = read_metrics(folder)
    assert found["blackthorn_ready",] == 1
    assert found["blackthorn_nodes", "online"] == 1
    assert found["blackthorn_runs", "finished:completed"] == 1
    assert found["blackthorn_run_rounds_total", run] == len(lines) == 2
    assert found["blackthorn_run_replies_total", run, "kept", ""] == 2
    for phase in lines[0]["seconds"]:
        total = sum(line["seconds"][phase] for line in lines)
        assert found["blackthorn_run_phase_seconds_total", run, phase] == pytest.approx(total)
    size = (folder.parents[1] / "superlink.db").stat().st_size
    assert found["blackthorn_database_bytes",] >= size / 2 > 0
    days = found["blackthorn_certificate_days_left", "server.pem"]
    assert days == pytest.approx(730, abs=0.1)

    _restored_in_a_run(guide, folder.parents[1])
    _audited(guide, run)
    _listed(guide)

    # A run under a claim: its epsilon, once it is over, and nothing that moves with who answered.
    options = [part for key, value in PRIVATE.items() for part in ("--set", f"{key}={value}")]
    guide.operate(*RUN, *two, "runs/private", *options)

    def told() -> bool:
        return "blackthorn_run_epsilon" in names(measured(guide.get("server", metrics)))

    until(told, 240)
    found = measured(guide.get("server", metrics))
    (second,) = {key[1] for key in found if key[0] == "blackthorn_run_epsilon"}
    spent = json.loads((private / "summary.json").read_text())["privacy"]["epsilon"]
    assert found["blackthorn_run_epsilon", second, "client"] == spent > 0
    allowed = {one.name for one in measures.SERVER if one.under_claim != "no"}
    assert {key[0].removesuffix("_total") for key in found if second in key} <= allowed
    assert not {"blackthorn_database_bytes", "blackthorn_guard_refusals"} & names(found)
    assert ("blackthorn_run_replies_total", run, "kept", "") in found
    assert guide.left == []


def _restored_in_a_run(guide: Guide, state: Path) -> None:
    """The server is stopped in a run, backed up, lost, restored and started: the run goes on."""
    long = ("--set", "num-server-rounds=8", "--set", "state-every=1", "--output-dir", "runs/long")
    host, programs = guide.machines["server"]
    guide.operate(*(part for part in RUN if part != "--follow"), *long)
    lines = state / "runs" / "long" / "metrics.jsonl"
    until(lambda: len(read_metrics(lines.parent)) > 1, 400)
    assert guide.running["server"].stop() in (0, 143)
    assert len(read_metrics(lines.parent)) < 8
    guide.give("tar -czf")
    for name in ("state", "certs"):
        shutil.rmtree(state.parent / name)
    guide.give("tar -xzf")
    guide.give("blackthorn server --host")
    guide.running["server"].says("ready:", 400)
    (run,) = re.findall(r"^run (\d+): ", guide.operate("status", "--certs", "certs"), re.MULTILINE)
    done = programs.call("follow", run, "--ca", "certs/ca.crt", prefix=host.prefix, seconds=900)
    assert "completed: 8 rounds" in done.stdout, done.stdout + done.stderr
    summary = json.loads((lines.parent / "summary.json").read_text())
    assert len(summary["resumed_after"]) == 1
    assert [line["round"] for line in read_metrics(lines.parent)] == list(range(1, 9))


def _audited(guide: Guide, run: str) -> None:
    """Who registered which key and started which run, and both of the server's starts."""
    said = guide.give("python -m blackthorn.flower_port.guard.audit")
    path = guide.machines["server"][1].folder / "state" / "guard" / "audit.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()]
    assert said.startswith(f"{len(events)} events, ")
    names = [event["event"] for event in events]
    assert names.count("server started") == 2
    assert names.count("server stopped") == 1
    done = [event for event in events if event.get("outcome") == "done"]
    assert len([event for event in events if event.get("outcome") == "asked"]) == len(done)
    (bound,) = [event for event in done if event["event"] == "key register"]
    (let_in,) = [event for event in done if event["event"] == "RegisterNode"]
    assert (bound["name"], bound["client_id"], let_in["key"]) == ("node0", 0, bound["key"])
    started = [event["run"] for event in done if event["event"] == "StartRun"]
    assert started[0] == run
    assert len(started) == 2


def _listed(guide: Guide) -> None:
    shown = guide.give("blackthorn runs --state")
    assert "runs/long" in shown
    assert "8/8" in shown
    # Both are from today.
    assert guide.give("blackthorn runs prune").endswith("0 runs removed, 0 B\n")
