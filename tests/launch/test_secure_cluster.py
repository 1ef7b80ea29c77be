"""Secure aggregation over gRPC: a cluster's server learns sums alone."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from shared_cluster import Run, on_every_look, shared_cluster

from blackthorn.launch.commands.recipes import recipe_config
from blackthorn.launch.federation.flower_cluster import FlowerCluster
from blackthorn.recording.run_folder import read_metrics
from blackthorn.settings.config import RunConfig

pytestmark = pytest.mark.deployment

CLIENTS, CLIP_NORM, PARAMETERS = 6, 3.0, 650


@pytest.fixture(scope="module")
def run_in_the_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    with shared_cluster(CLIENTS, tmp_path_factory.mktemp("cluster")) as run:
        yield run


def configuration(repository: Path, folder: Path, rounds: int, dropouts: float) -> RunConfig:
    values = {
        "algorithm": "secure-dp-fedavg",
        "num-clients": CLIENTS,
        "num-server-rounds": rounds,
        "participation": "full",
        "sample-rate": 1.0,
        "epsilon": 0.0,
        "noise-multiplier": 1.0,
        "clip-norm": CLIP_NORM,
        "secure-dropouts": dropouts,
        "round-timeout": 240.0,
        "output-dir": str(folder),
    }
    return recipe_config(repository / "recipes" / "dp-digits.toml", (), values)


def replies(folder: Path) -> list[int]:
    """How many masked updates are in the sum, round by round, by the operator's record."""
    lines = (folder / "operator.jsonl").read_text().splitlines()
    return [line["replied"] for line in map(json.loads, lines) if line["round"]]


def told(folder: Path) -> list[dict[str, Any]]:
    return [line for line in read_metrics(folder) if line["round"]]


def test_a_round_over_grpc_is_five_exchanges_and_is_charged(
    repository: Path, tmp_path: Path, run_in_the_cluster: Run
) -> None:
    summary = run_in_the_cluster(configuration(repository, tmp_path, 2, 0.0))
    assert replies(tmp_path) == [CLIENTS] * 2
    assert "against everybody, the server too" in summary["privacy"]["claim"]
    assert summary["privacy"]["rounds_charged"] == 2
    assert all("skipped" not in line for line in told(tmp_path))
    # z C √d/n: none may vanish, so that the noise of all of them is z.
    due = math.sqrt(PARAMETERS) * CLIP_NORM / CLIENTS
    assert all(line["noise_norm"] == pytest.approx(due, rel=0.02) for line in told(tmp_path))


def test_the_sum_of_the_others_opens_when_a_node_is_killed(
    repository: Path, tmp_path: Path, run_in_the_cluster: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In whichever exchange of the second round it is killed: of six clients one may vanish."""
    killed: list[int] = []

    def kill(flower: FlowerCluster) -> None:
        if not killed and len(read_metrics(tmp_path)) == 2:  # rounds 0 and 1 are on record
            flower.kill_node(0)
            killed.append(0)

    on_every_look(monkeypatch, kill)
    summary = run_in_the_cluster(configuration(repository, tmp_path, 3, 0.2))
    assert killed
    first, second, third = replies(tmp_path)
    assert (first, third) == (CLIENTS, CLIENTS - 1)
    assert second in (CLIENTS - 1, CLIENTS)
    assert summary["privacy"]["rounds_charged"] == 3
    assert all("skipped" not in line for line in told(tmp_path))
