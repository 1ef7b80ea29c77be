"""A rogue that speaks Flower's protocol itself, against a real deployment: four honest clients.

The rogue shows another behaviour every round: first those that answer, in a cluster where nobody
waits for a deadline, then those that let it pass, with one that the honest clients can keep on
this machine as it is now. What these make of it is compared with a simulation in which the fifth
client never answers.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from process_memory import MemoryWatch
from rich.console import Console
from safetensors.numpy import load_file
from shared_cluster import on_every_look

from blackthorn.attacks.rogue.behaviours import BEHAVIOURS, HUGE_BYTES
from blackthorn.launch.commands.cluster import cluster
from blackthorn.launch.commands.recipes import recipe_config
from blackthorn.launch.commands.simulate import simulate
from blackthorn.launch.federation.flower_cluster import FlowerCluster
from blackthorn.recording.run_folder import read_metrics
from blackthorn.settings.config import RunConfig

pytestmark = pytest.mark.deployment

CLIENTS, ROGUE = 5, 4
# Seconds: a deadline that no answer needs, the shortest one that is let pass (or so many times what
# the slowest round took), and by how much a round may pass any.
AMPLE, SHORTEST, TIMES, SLACK = 90.0, 8.0, 3.0, 5.0
# A reply that is refused in mid-download has cost the server a few of Flower's 5 MiB chunks.
FEW_CHUNKS = 100_000_000

ANSWERED = {
    "nan": "not finite",
    "infinite": "not finite",
    "wrong-shape": "shape",
    "wrong-dtype": "dtype complex64, expected float32",
    "missing-key": "missing entry",
    "extra-key": "unexpected entry 'extra'",
    "empty-arrays": "missing entry",
    "empty-record": "0 array records",
    "lying-header": "shape",
    "lying-payload": "shape (1099511627776,)",
    "object-array": "dtype object",
    "garbage": "not a NumPy array",
    "huge-count": "num-examples = 1e+30",
    "repeated-chunks": "one lists 2500 chunks and has 1",
    "replayed": "answers another message",
    "forged-round": "for round '1000'",
    "two-replies": "not finite",
}
# What takes the rogue itself long comes last: it does one thing after the other.
LET_PASS = {
    "never-uploaded": "announced, but not uploaded",
    "drip-fed": "announced, but not uploaded",
    "huge-reply": "no reply by the deadline",
    # Half a gigabyte may not even be announced in time on a busy machine.
    "huge-part": "by the deadline",
}
# Valid replies, which are the aggregation rule's to deal with.
VALID = {"huge", "honest"}


def test_every_behaviour_has_its_reason() -> None:
    assert {*ANSWERED, *LET_PASS, *VALID} == set(BEHAVIOURS)


@dataclass
class Attacked:
    """A run: its folder, its deadline, the reasons that its rounds must have, and how the server's
    processes grew from the first round on."""

    folder: Path
    deadline: float
    reasons: dict[str, str]
    memory: MemoryWatch

    def entries(self) -> list[dict[str, Any]]:
        return list(read_metrics(self.folder))[1:]


def configuration(
    repository: Path, folder: Path, reasons: dict[str, str], deadline: float, **options: Any
) -> RunConfig:
    values = {
        "algorithm": "gfedavg",
        "num-clients": CLIENTS,
        "num-byzantine": 1,
        "num-server-rounds": len(reasons),
        "local-steps": 2,
        "corrupt-fraction": 0.0,
        "round-timeout": deadline,
        "output-dir": str(folder),
        **options,
    }
    return recipe_config(repository / "recipes" / "demo.toml", (), values)


def attack(repository: Path, folder: Path, reasons: dict[str, str], deadline: float) -> Attacked:
    watch = MemoryWatch()

    def look(flower: FlowerCluster) -> None:
        # What the app takes to start (its data, its libraries) is not the rogue's doing.
        if len(read_metrics(folder)) > 1:
            watch.look(flower.id)

    with pytest.MonkeyPatch.context() as patch:
        on_every_look(patch, look)
        config = configuration(repository, folder, reasons, deadline)
        summary = cluster(config, Console(quiet=True), rogue=",".join(reasons))
    assert summary["status"] == "completed"
    return Attacked(folder, deadline, reasons, watch)


@pytest.fixture(scope="module")
def attacked(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Attacked]:
    """The run with what is answered, and the one with what is let pass."""
    folder = tmp_path_factory.mktemp("attacked")
    answered = attack(repository, folder / "answered", ANSWERED, AMPLE)
    slowest = max(entry["seconds"]["training"] for entry in answered.entries())
    deadline = max(SHORTEST, TIMES * slowest)
    return [answered, attack(repository, folder / "let-pass", LET_PASS, deadline)]


def test_every_reply_is_refused_with_its_reason_by_the_deadline(attacked: list[Attacked]) -> None:
    for run in attacked:
        entries = run.entries()
        assert [entry["round"] for entry in entries] == list(range(1, len(run.reasons) + 1))
        for entry, (name, reason) in zip(entries, run.reasons.items(), strict=True):
            assert [r["client"] for r in entry["rejected"]] == [ROGUE], name
            assert reason in entry["rejected"][0]["reason"], name
            assert entry["replied"] == CLIENTS - 1, name
            assert entry["seconds"]["training"] <= run.deadline + SLACK, name


def test_the_honest_clients_learn_what_they_learn_alone(
    attacked: list[Attacked], repository: Path, tmp_path: Path
) -> None:
    for run in attacked:
        folder = tmp_path / run.folder.name
        alone = configuration(repository, folder, run.reasons, run.deadline, attack="exit")
        simulate(alone, Console(quiet=True))
        assert all(entry["replied"] == CLIENTS - 1 for entry in read_metrics(folder)[1:])
        expected = load_file(folder / "checkpoints" / "final.safetensors")
        found = load_file(run.folder / "checkpoints" / "final.safetensors")
        assert found.keys() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=1e-5)


def test_half_a_gigabyte_does_not_reach_the_server(attacked: list[Attacked]) -> None:
    log = (attacked[1].folder / "logs" / f"supernode-{ROGUE}.log").read_text()
    assert "huge-reply: refused by the SuperLink" in log
    for run in attacked:
        for program in ("flwr-serverapp", "flower-superlink"):
            grown = run.memory.growth(program)
            assert 0 < grown < FEW_CHUNKS < HUGE_BYTES, run.memory.describe()


def test_the_summary_counts_the_rogue(attacked: list[Attacked]) -> None:
    for run in attacked:
        summary = json.loads((run.folder / "summary.json").read_text())
        rounds = len(run.reasons)
        assert summary["clients"] == {
            "invited": CLIENTS * rounds,
            "replied": (CLIENTS - 1) * rounds,
            "rejected": rounds,
        }
