"""A rogue that speaks Flower's protocol itself, against a real deployment: four honest clients.

One cluster for all behaviours: the rogue shows another one every round. What the honest clients
make of it is compared with a simulation in which the fifth client never answers.
"""

import json
from collections.abc import Iterator
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
DEADLINE, SLACK = 8.0, 5.0
# A reply that is refused in mid-download has cost the server a few of Flower's 5 MiB chunks.
FEW_CHUNKS = 100_000_000

REASONS = {
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
    "huge-reply": "no reply by the deadline",
    # Half a gigabyte may not even be announced in time on a busy machine.
    "huge-part": "by the deadline",
    "repeated-chunks": "one lists 2500 chunks and has 1",
    "never-uploaded": "announced, but not uploaded",
    "drip-fed": "announced, but not uploaded",
    "replayed": "answers another message",
    "forged-round": "for round '1000'",
    "two-replies": "not finite",
}
# Valid replies, which are the aggregation rule's to deal with.
VALID = {"huge", "honest"}


def test_every_behaviour_has_its_reason() -> None:
    assert {*REASONS, *VALID} == set(BEHAVIOURS)


def configuration(repository: Path, folder: Path, **options: Any) -> RunConfig:
    values = {
        "algorithm": "gfedavg",
        "num-clients": CLIENTS,
        "num-byzantine": 1,
        "num-server-rounds": len(REASONS),
        "local-steps": 2,
        "corrupt-fraction": 0.0,
        "round-timeout": DEADLINE,
        "output-dir": str(folder),
        **options,
    }
    return recipe_config(repository / "recipes" / "demo.toml", (), values)


@pytest.fixture(scope="module")
def attacked(
    repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, MemoryWatch]]:
    """The run folder, and how the server's processes grew from the first round on."""
    folder = tmp_path_factory.mktemp("attacked")
    watch = MemoryWatch()

    def look(flower: FlowerCluster) -> None:
        # What the app takes to start (its data, its libraries) is not the rogue's doing.
        if len(read_metrics(folder)) > 1:
            watch.look(flower.id)

    with pytest.MonkeyPatch.context() as patch:
        on_every_look(patch, look)
        config = configuration(repository, folder)
        summary = cluster(config, Console(quiet=True), rogue=",".join(REASONS))
    assert summary["status"] == "completed"
    yield folder, watch


def test_every_reply_is_refused_with_its_reason_by_the_deadline(
    attacked: tuple[Path, MemoryWatch],
) -> None:
    entries = read_metrics(attacked[0])[1:]
    assert [entry["round"] for entry in entries] == list(range(1, len(REASONS) + 1))
    for entry, (name, reason) in zip(entries, REASONS.items(), strict=True):
        assert [r["client"] for r in entry["rejected"]] == [ROGUE], name
        assert reason in entry["rejected"][0]["reason"], name
        assert entry["replied"] == CLIENTS - 1, name
        assert entry["seconds"]["training"] <= DEADLINE + SLACK, name


def test_the_honest_clients_learn_what_they_learn_alone(
    attacked: tuple[Path, MemoryWatch], repository: Path, tmp_path: Path
) -> None:
    alone = configuration(repository, tmp_path, attack="exit")
    simulate(alone, Console(quiet=True))
    assert all(entry["replied"] == CLIENTS - 1 for entry in read_metrics(tmp_path)[1:])
    expected = load_file(tmp_path / "checkpoints" / "final.safetensors")
    found = load_file(attacked[0] / "checkpoints" / "final.safetensors")
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=1e-5)


def test_half_a_gigabyte_does_not_reach_the_server(attacked: tuple[Path, MemoryWatch]) -> None:
    folder, watch = attacked
    log = (folder / "logs" / f"supernode-{ROGUE}.log").read_text()
    assert "huge-reply: refused by the SuperLink" in log
    for program in ("flwr-serverapp", "flower-superlink"):
        assert 0 < watch.growth(program) < FEW_CHUNKS < HUGE_BYTES, watch.describe()


def test_the_summary_counts_the_rogue(attacked: tuple[Path, MemoryWatch]) -> None:
    summary = json.loads((attacked[0] / "summary.json").read_text())
    rounds = len(REASONS)
    assert summary["clients"] == {
        "invited": CLIENTS * rounds,
        "replied": (CLIENTS - 1) * rounds,
        "rejected": rounds,
    }
