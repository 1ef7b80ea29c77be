"""Colluders in a real deployment tell the lies of a simulation: the same seed, the same model."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file

from blackthorn.launch.commands.cluster import cluster
from blackthorn.launch.commands.recipes import recipe_config
from blackthorn.launch.commands.simulate import simulate
from blackthorn.launch.federation import byzantine_nodes
from blackthorn.recording.run_folder import read_metrics
from blackthorn.settings.config import ConfigError, RunConfig

CLIENTS, BYZANTINE, ROUNDS = 6, 3, 2


def configuration(repository: Path, folder: Path, attack: str, **options: Any) -> RunConfig:
    values = {
        # Plain averaging: whatever an attacker says is in the model.
        "algorithm": "gfedavg",
        "corrupt-fraction": 0.0,
        "num-clients": CLIENTS,
        "num-byzantine": BYZANTINE,
        "num-server-rounds": ROUNDS,
        "round-timeout": 150.0,
        "attack": attack,
        "output-dir": str(folder),
        **options,
    }
    return recipe_config(repository / "recipes" / "demo.toml", (), values)


def final_model(folder: Path) -> np.ndarray:
    state = load_file(folder / "checkpoints" / "final.safetensors")
    return np.concatenate([state[name].ravel() for name in sorted(state)])


def run(how: Any, config: RunConfig) -> np.ndarray:
    how(config, Console(quiet=True))
    folder = Path(config.output_dir)
    assert [entry["replied"] for entry in read_metrics(folder)[1:]] == [CLIENTS] * ROUNDS
    return final_model(folder)


def apart(one: np.ndarray, other: np.ndarray) -> float:
    """Largest difference, beside the largest number."""
    return float(np.abs(one - other).max() / np.abs(other).max())


@pytest.mark.deployment
@pytest.mark.parametrize("attack", ["min-max", pytest.param("baruch", marks=pytest.mark.slow)])
def test_a_cluster_and_a_simulation_tell_the_same_lies(
    repository: Path, tmp_path: Path, attack: str
) -> None:
    deployed = run(cluster, configuration(repository, tmp_path / "deployed", attack))
    simulated = run(simulate, configuration(repository, tmp_path / "simulated", attack))
    lonely = configuration(repository, tmp_path / "lonely", attack, collusion=False)
    alone = run(simulate, lonely)
    assert apart(deployed, simulated) < 1e-5
    assert apart(alone, simulated) > 1e-2
    logs = "".join(p.read_text() for p in (tmp_path / "deployed" / "logs").glob("supernode-*"))
    assert "attacks alone" not in logs


@pytest.mark.deployment
def test_without_the_service_each_says_so_and_goes_on_alone(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Away:
        """A service that was started, and is gone."""

        address = "127.0.0.1:1"

        def __init__(self, *_: Any) -> None: ...

        def __enter__(self) -> "Away":
            return self

        def __exit__(self, *_: Any) -> None: ...

    monkeypatch.setattr(byzantine_nodes, "CollusionServer", Away)
    deployed = run(cluster, configuration(repository, tmp_path / "deployed", "mimic"))
    # Alone, mimic is an honest update.
    honest = configuration(repository, tmp_path / "honest", "mimic", **{"num-byzantine": 0})
    assert apart(deployed, run(simulate, honest)) < 1e-5
    for client in range(CLIENTS - BYZANTINE, CLIENTS):
        log = (tmp_path / "deployed" / "logs" / f"supernode-{client}.log").read_text()
        for server_round in (1, 2):
            assert f"round {server_round}: client {client} attacks alone" in log


def test_collusion_false_and_who_cannot_collude_need_no_service(
    repository: Path, tmp_path: Path
) -> None:
    for attack, rogue, options in (
        ("min-max", "", {"collusion": False}),
        ("min-max", "", {"num-byzantine": 1}),
        ("min-max", "nan", {}),
        ("nan", "", {}),
        ("label-flip", "", {}),
    ):
        config = configuration(repository, tmp_path, attack, **options)
        with byzantine_nodes.collusion(config, rogue) as accomplices:
            assert accomplices == {}
            nodes = byzantine_nodes.cluster_nodes(config, (), rogue, accomplices)
        assert all("BLACKTHORN_COLLUSION" not in node.env for node in nodes)


def test_only_the_byzantine_nodes_know_the_service(repository: Path, tmp_path: Path) -> None:
    config = configuration(repository, tmp_path, "min-max")
    with byzantine_nodes.collusion(config, "") as accomplices:
        nodes = byzantine_nodes.cluster_nodes(config, (), "", accomplices)
    told = ["BLACKTHORN_COLLUSION" in node.env for node in nodes]
    assert told == [False] * (CLIENTS - BYZANTINE) + [True] * BYZANTINE
    assert nodes[-1].env["BLACKTHORN_COLLUSION"].startswith("127.0.0.1:")


def test_an_omniscient_attacker_is_refused_in_a_cluster(repository: Path, tmp_path: Path) -> None:
    config = configuration(repository, tmp_path, "baruch", omniscient=True)
    with pytest.raises(ConfigError, match="omniscient = true is not allowed in a cluster"):
        cluster(config, Console(quiet=True))


@pytest.mark.parametrize(
    ("rogue", "byzantine", "words"),
    [
        ("kindness", 1, "behaviour is 'kindness'; allowed are nan, infinite"),
        ("nan,random", 1, "behaviour is 'random'; allowed are"),
        ("nan", 0, "num-byzantine = 0, set at least --byzantine 1"),
    ],
)
def test_a_rogue_that_cannot_be_is_refused(
    repository: Path, tmp_path: Path, rogue: str, byzantine: int, words: str
) -> None:
    config = configuration(repository, tmp_path, "nan", **{"num-byzantine": byzantine})
    with pytest.raises(ConfigError, match=words):
        cluster(config, Console(quiet=True), rogue=rogue)
