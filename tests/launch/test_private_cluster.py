"""A private recipe over gRPC, noise at the clients, one of them killed while it trains."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from charged_ledgers import read_charges
from safetensors.numpy import load_file
from shared_cluster import Run, kill_training, on_every_look, shared_cluster

from blackthorn.launch.commands.recipes import recipe_config
from blackthorn.recording.run_folder import read_metrics
from blackthorn.settings.config import RunConfig
from blackthorn.strategies import spent
from blackthorn.tasks.problem import load_problem

pytestmark = pytest.mark.deployment

CLIENTS, ROUNDS = 4, 2
Z, C, LR = 5.0, 0.5, 0.1


def models(config: RunConfig, folder: Path) -> list[np.ndarray]:
    """The initial model and the one after every round, as vectors."""
    states = [{key: value.numpy() for key, value in load_problem(config).state().items()}]
    states += [load_file(path) for path in sorted((folder / "checkpoints").glob("round-*"))]
    return [np.concatenate([state[key].ravel() for key in sorted(state)]) for state in states]


@pytest.fixture(scope="module")
def run_in_the_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    with shared_cluster(CLIENTS, tmp_path_factory.mktemp("cluster")) as run:
        yield run


def test_ledger_and_noise_agree_when_a_client_is_killed(
    repository: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    run_in_the_cluster: Run,
) -> None:
    """The clients' updates (4 C at most) drown in noise of length z C √d, d = 15 010."""
    config = recipe_config(
        repository / "recipes" / "dp-digits.toml",
        (),
        {
            "model": "mlp-200",
            "num-clients": CLIENTS,
            "participation": "full",
            "sample-rate": 1.0,
            "num-server-rounds": ROUNDS,
            "local-steps": 1000,
            "local-lr": LR,
            "server-momentum": 0.0,
            "epsilon": 0.0,
            "noise-multiplier": Z,
            "clip-norm": C,
            "noise-location": "client",
            "round-timeout": 90.0,
            "checkpoint-every": 1,
            "output-dir": str(tmp_path),
        },
    )
    killed: list[int] = []
    on_every_look(monkeypatch, lambda flower: kill_training(flower, tmp_path, ROUNDS, killed))
    summary = run_in_the_cluster(config)
    assert killed
    operator = [json.loads(x) for x in (tmp_path / "operator.jsonl").read_text().splitlines()]
    replied = [line["replied"] for line in operator if line["round"]]
    assert replied == [CLIENTS, CLIENTS - 1]
    charges = read_charges(tmp_path / "ledger.json")
    multipliers = [release.noise_multiplier for release, count in charges for _ in range(count)]
    assert multipliers == [Z] * ROUNDS
    path = models(config, tmp_path)
    for before, now, multiplier in zip(path[:-1], path[1:], multipliers, strict=True):
        # r = 4, and four shares with one more of the server's; a standard deviation of 15 010
        # numbers is known to 0.6 %.
        expected = multiplier * C * (1 + 1 / CLIENTS) ** 0.5
        assert (now - before).std() / LR * CLIENTS == pytest.approx(expected, rel=0.035)
    assert summary["privacy"]["epsilon"] == pytest.approx(spent(charges, 1e-4).epsilon)
    assert summary["privacy"]["local"]["epsilon"] > summary["privacy"]["epsilon"]
    assert all("rejected" not in line for line in read_metrics(tmp_path))
