"""One recipe with one seed ends with the same model, whatever carries the messages."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flower_simulation import run_in_flower_simulation
from rich.console import Console
from safetensors.numpy import load_file
from shared_cluster import Run, shared_cluster

from blackthorn.launch.commands.recipes import recipe_config
from blackthorn.launch.commands.simulate import simulate
from blackthorn.settings.config import RunConfig

pytestmark = pytest.mark.deployment

CLIENTS = 5
TOLERANCE = 1e-4


def configuration(repository: Path, folder: Path, **options: Any) -> RunConfig:
    values = {
        "num-clients": CLIENTS,
        "num-byzantine": 0,
        "attack": "none",
        "num-server-rounds": 3,
        "seed": 7,
        "output-dir": str(folder),
        **{key.replace("_", "-"): value for key, value in options.items()},
    }
    return recipe_config(repository / "recipes" / "demo.toml", (), values)


@pytest.fixture(scope="module")
def run_in_the_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    with shared_cluster(CLIENTS, tmp_path_factory.mktemp("cluster")) as run:
        yield run


def final_model(folder: Path) -> np.ndarray:
    state = load_file(folder / "checkpoints" / "final.safetensors")
    return np.concatenate([state[name].reshape(-1).astype(np.float64) for name in sorted(state)])


def assert_same_model(one: Path, other: Path) -> None:
    expected, found = final_model(one), final_model(other)
    assert np.abs(found - expected).max() <= TOLERANCE * np.abs(expected).max()
    assert np.linalg.norm(found - expected) <= TOLERANCE * np.linalg.norm(expected)


def test_engine_flower_simulation_and_cluster_agree(
    repository: Path, tmp_path: Path, run_in_the_cluster: Run
) -> None:
    simulate(configuration(repository, tmp_path / "engine"), Console(quiet=True))
    run_in_the_cluster(configuration(repository, tmp_path / "cluster"))
    assert_same_model(tmp_path / "engine", tmp_path / "cluster")
    work = tmp_path / "flower"
    work.mkdir()
    run_in_flower_simulation(repository, configuration(repository, tmp_path / "simulation"), work)
    assert_same_model(tmp_path / "engine", tmp_path / "simulation")


@pytest.mark.parametrize(
    "own",
    [
        {"algorithm": "fat-clipping-pr", "clip_norm": 0.5},
        {"algorithm": "fat-clipping-pi", "clip_norm": 0.5},
        {
            "algorithm": "biclip",
            "algorithm_options": "low = 1e-4, high = 0.02, server-low = 1e-5, server-high = 0.02",
        },
        {"algorithm": "error-feedback", "clip_norm": 0.5},
    ],
    ids=lambda own: str(own["algorithm"]),
)
def test_clipping_agrees_over_grpc(
    repository: Path, tmp_path: Path, run_in_the_cluster: Run, own: dict[str, Any]
) -> None:
    options = {**own, "aggregator": "mean"}
    simulate(configuration(repository, tmp_path / "engine", **options), Console(quiet=True))
    run_in_the_cluster(configuration(repository, tmp_path / "cluster", **options))
    assert_same_model(tmp_path / "engine", tmp_path / "cluster")
    simulate(
        configuration(repository, tmp_path / "unclipped", aggregator="mean"), Console(quiet=True)
    )
    assert np.abs(final_model(tmp_path / "engine") - final_model(tmp_path / "unclipped")).max() > (
        100 * TOLERANCE
    )
