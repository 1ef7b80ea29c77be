"""`blackthorn cluster` with real processes: it survives whatever a client does."""

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from shared_cluster import kill_training, on_every_look, shared_cluster

from blackthorn.launch.commands.cluster import cluster
from blackthorn.launch.commands.recipes import recipe_config
from blackthorn.launch.federation.byzantine_nodes import cluster_nodes
from blackthorn.launch.federation.flower_cluster import FlowerCluster, Node
from blackthorn.recording.failure_reason import RunFailed
from blackthorn.recording.resume import resumable
from blackthorn.recording.run_folder import read_metrics
from blackthorn.settings.config import RunConfig

pytestmark = pytest.mark.deployment

CLIENTS = 5
ATTACKER = CLIENTS - 1
ROUNDS = 3
DEADLINE = 120.0
SLACK = 5.0
BAD = {
    "raise": "error 2",
    "nan": "not finite",
    "wrong-shape": "shape",
    "missing-key": "missing entry",
    "lying-header": "shape",
    "huge-count": "num-examples = 1e+30",
}


def configuration(repository: Path, folder: Path, **options: Any) -> RunConfig:
    values = {
        "num-clients": CLIENTS,
        "num-byzantine": 1,
        "num-server-rounds": ROUNDS,
        "round-timeout": DEADLINE,
        "output-dir": str(folder),
        **{key.replace("_", "-"): value for key, value in options.items()},
    }
    return recipe_config(repository / "recipes" / "demo.toml", (), values)


def run(config: RunConfig) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Summary and the entries of the rounds after the initial evaluation."""
    summary = cluster(config, Console(quiet=True))
    return summary, rounds(config, summary)


def rounds(config: RunConfig, summary: dict[str, Any]) -> list[dict[str, Any]]:
    """Their entries, when they are all there and in time."""
    entries = read_metrics(Path(config.output_dir))[1:]
    assert summary["status"] == "completed"
    assert [entry["round"] for entry in entries] == list(range(1, config.num_server_rounds + 1))
    for entry in entries:
        assert entry["seconds"]["training"] <= config.round_timeout + SLACK
    return entries


def test_rage_filters_a_byzantine_program(repository: Path, tmp_path: Path) -> None:
    summary, entries = run(configuration(repository, tmp_path))
    assert all(entry["rejected"] == [] for entry in entries)
    assert all(entry["filtered"] == [ATTACKER] for entry in entries)
    assert summary["clients"] == {"invited": 15, "replied": 15, "rejected": 0}
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "completed"
    assert (tmp_path / "checkpoints" / "final.safetensors").exists()
    assert (tmp_path / "plots" / "accuracy.png").exists()


def test_bad_replies_are_named_and_cost_nothing(repository: Path, tmp_path: Path) -> None:
    """All of them at once, beside four honest clients."""
    honest = CLIENTS - 1
    numbers = {"num_clients": honest + len(BAD), "num_byzantine": len(BAD), "corrupt_fraction": 0.1}
    config = configuration(repository, tmp_path, attack="nan", **numbers)
    attackers = [
        cluster_nodes(configuration(repository, tmp_path, attack=attack), (), "", {})[ATTACKER]
        for attack in BAD
    ]
    with shared_cluster([Node()] * honest + attackers, tmp_path) as run_there:
        summary = run_there(config)
    for entry in rounds(config, summary):
        assert entry["replied"] == honest
        rejected = sorted(entry["rejected"], key=lambda rejection: rejection["client"])
        assert [rejection["client"] for rejection in rejected] == [
            honest + number for number in range(len(BAD))
        ]
        for rejection, reason in zip(rejected, BAD.values(), strict=True):
            assert reason in rejection["reason"]


def test_a_client_slower_than_the_deadline_is_rejected_with_that_reason(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLACKTHORN_ATTACK_SECONDS", "600")
    config = configuration(
        repository, tmp_path, attack="slow", num_server_rounds=2, round_timeout=20.0
    )
    _, entries = run(config)
    for entry in entries:
        assert {"client": ATTACKER, "reason": "no reply by the deadline"} in entry["rejected"]
        assert entry["replied"] >= 1


def test_a_client_process_killed_in_mid_round_costs_its_own_reply_alone(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[int] = []
    config = configuration(
        repository,
        tmp_path,
        num_byzantine=0,
        num_server_rounds=2,
        local_steps=1000,
        round_timeout=45.0,
    )
    on_every_look(monkeypatch, lambda flower: kill_training(flower, tmp_path, 1, killed))
    _, entries = run(config)
    # The process that answered the enrolment query may have been among them, on its way out.
    assert killed
    named = [r for entry in entries for r in entry["rejected"] if r["client"] == 0]
    assert named
    assert all(rejection["reason"] for rejection in named)
    assert all(entry["replied"] >= CLIENTS - 1 for entry in entries)


def test_a_cluster_whose_clients_have_all_died_ends_with_their_names(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not round for round until each deadline: a default run would go on for hours."""
    options = {"num_clients": 2, "num_byzantine": 0, "attack": "none", "corrupt_fraction": 0.0}
    config = configuration(repository, tmp_path, num_server_rounds=100_000, **options)
    died: list[float] = []

    def kill_all(flower: FlowerCluster) -> None:
        if not died and [entry for entry in read_metrics(tmp_path) if entry["round"] == 1]:
            for index in range(2):
                flower.kill_node(index)
            died.append(time.monotonic())

    on_every_look(monkeypatch, kill_all)
    with pytest.raises(RunFailed) as ended:
        cluster(config, Console(quiet=True))
    assert time.monotonic() - died[0] < DEADLINE
    assert re.fullmatch(
        r"no client is left: supernode-0 was killed by signal 9: .*; supernode-1 was killed.*",
        str(ended.value),
    )
    assert resumable(ended.value) == str(tmp_path)
