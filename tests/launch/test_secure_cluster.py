"""Secure aggregation over gRPC: a cluster's server learns sums alone."""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from shared_cluster import Run, shared_cluster

from blackthorn.launch.commands.recipes import recipe_config
from blackthorn.recording.run_folder import read_metrics

pytestmark = pytest.mark.deployment

CLIENTS, ROUNDS = 4, 2


@pytest.fixture(scope="module")
def run_in_the_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    with shared_cluster(CLIENTS, tmp_path_factory.mktemp("cluster")) as run:
        yield run


def test_a_round_over_grpc_is_five_exchanges_and_is_charged(
    repository: Path, tmp_path: Path, run_in_the_cluster: Run
) -> None:
    config = recipe_config(
        repository / "recipes" / "dp-digits.toml",
        (),
        {
            **{
                "algorithm": "secure-dp-fedavg",
                "num-clients": CLIENTS,
                "num-server-rounds": ROUNDS,
            },
            **{"participation": "full", "sample-rate": 1.0, "epsilon": 0.0},
            **{"noise-multiplier": 1.0, "round-timeout": 240.0, "output-dir": str(tmp_path)},
        },
    )
    summary = run_in_the_cluster(config)
    operator = [json.loads(x) for x in (tmp_path / "operator.jsonl").read_text().splitlines()]
    assert [line["replied"] for line in operator if line["round"]] == [CLIENTS] * ROUNDS
    assert "against everybody, the server too" in summary["privacy"]["claim"]
    assert summary["privacy"]["rounds_charged"] == ROUNDS
    # z C √d/r: of four clients none may vanish, so that the noise of all of them is z.
    told = [line for line in read_metrics(tmp_path) if line["round"]]
    assert all("skipped" not in line for line in told)
    due = math.sqrt(650) * 3.0 / CLIENTS
    assert all(line["noise_norm"] == pytest.approx(due, rel=0.02) for line in told)
