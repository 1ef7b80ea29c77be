"""Strategies and our ClientApp on the newest Flower, over its own programs: HTTP on every hop.

`make test-newest-flower` has an environment with it; elsewhere these tests skip.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from http_federation import http_federation
from rich.console import Console
from safetensors.numpy import load_file

from blackthorn.flower_port import versions
from blackthorn.launch.commands.recipes import recipe_config
from blackthorn.launch.commands.simulate import simulate
from blackthorn.launch.federation.app_bundle import COMPONENTS, stage_app, write_config
from blackthorn.settings.config import RunConfig, to_mapping

pytestmark = pytest.mark.skipif(
    not versions.is_one_of(versions.HTTP), reason=f"needs {versions.requirement(versions.HTTP)}"
)
CLIENTS = 2
TOLERANCE = 1e-4


def configuration(repository: Path, folder: Path, **options: Any) -> RunConfig:
    values = {
        "num-clients": CLIENTS,
        "num-byzantine": 0,
        "attack": "none",
        "algorithm": "fat-clipping-pi",
        "clip-norm": 1.0,
        "aggregator": "auto",
        "corrupt-fraction": 0.0,
        "num-server-rounds": 2,
        "seed": 7,
        "report": False,
        "tensorboard": False,
        "output-dir": str(folder),
        **options,
    }
    return recipe_config(repository / "recipes" / "demo.toml", (), values)


def final_model(folder: Path) -> np.ndarray:
    state = load_file(folder / "checkpoints" / "final.safetensors")
    return np.concatenate([state[name].reshape(-1).astype(np.float64) for name in sorted(state)])


def run_over_http(repository: Path, config: RunConfig, work: Path, *simulation: str) -> None:
    work.mkdir()
    app = stage_app(repository, COMPONENTS, work / "app")
    run_config = write_config(to_mapping(config), work / "run-config.toml")
    nodes = 0 if simulation else CLIENTS
    options = ("--federation-config", f"num-supernodes={CLIENTS}") if simulation else ()
    with http_federation(work / "federation", *simulation, num_nodes=nodes) as federation:
        federation.run(app, "--run-config", str(run_config), *options)


def test_engine_and_superlink_agree(repository: Path, tmp_path: Path) -> None:
    """Clipped steps, which only a client of ours can attest, from reply to model over HTTP."""
    simulate(configuration(repository, tmp_path / "engine"), Console(quiet=True))
    config = configuration(repository, tmp_path / "http")
    run_over_http(repository, config, tmp_path / "work")
    expected, found = final_model(tmp_path / "engine"), final_model(tmp_path / "http")
    assert np.abs(found - expected).max() <= TOLERANCE * np.abs(expected).max()


@pytest.mark.slow
def test_engine_and_flower_s_simulation_agree(repository: Path, tmp_path: Path) -> None:
    simulate(configuration(repository, tmp_path / "engine"), Console(quiet=True))
    config = configuration(repository, tmp_path / "simulation")
    run_over_http(repository, config, tmp_path / "work", "--simulation")
    expected, found = final_model(tmp_path / "engine"), final_model(tmp_path / "simulation")
    assert np.abs(found - expected).max() <= TOLERANCE * np.abs(expected).max()
