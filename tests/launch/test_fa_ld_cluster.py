"""FA-LD over gRPC: the chain goes on when a node dies and when it comes back."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file
from shared_cluster import Run, on_every_look, shared_cluster

from blackthorn.launch.commands.recipes import recipe_config
from blackthorn.launch.commands.simulate import simulate
from blackthorn.launch.federation.flower_cluster import FlowerCluster
from blackthorn.recording.posterior_store import read_samples, sample_rounds
from blackthorn.recording.run_folder import read_metrics
from blackthorn.settings.config import RunConfig

pytestmark = pytest.mark.deployment

CLIENTS = 3
VICTIM = 1
# A killed node counts as connected for a minute, in which every round lasts until its deadline.
ROUNDS, KEPT = 18, 13
# Ample for those who answer, on a busy machine too; a network's nodes read their images each time.
DEADLINES = {"fa-ld-bayes-linear": 20.0, "fa-ld-fashion-mnist": 30.0}


@pytest.fixture(scope="module")
def run_in_the_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Also after a node was killed and started again: to Flower it is another node."""
    with shared_cluster(CLIENTS, tmp_path_factory.mktemp("cluster")) as run:
        yield run


def configuration(repository: Path, folder: Path, recipe: str, **options: Any) -> RunConfig:
    values = {
        "num-clients": CLIENTS,
        "burn-in": 2,
        "langevin-seed": 9,
        "evaluate-every": 1,
        "output-dir": str(folder),
        **{key.replace("_", "-"): value for key, value in options.items()},
    }
    return recipe_config(repository / "recipes" / f"{recipe}.toml", (), values)


@pytest.mark.parametrize(
    ("recipe", "own", "samples"),
    [
        ("fa-ld-bayes-linear", {"batch_size": 4}, 4),
        ("sghmc-bayes-linear", {}, 4),
        (
            "fa-ld-bayes-linear",
            {"algorithm": "psgld", "algorithm_options": "warm-up = 2", "clients_per_round": 2}
            | {"participation": "with-replacement"},
            4,
        ),
        # Of its rounds the first four are a fit, or the first two.
        ("fsgld-bayes-linear", {"clients_per_round": 2}, 2),
        ("fsgld-bayes-linear", {"algorithm_options": 'surrogate = "diagonal"'}, 4),
    ],
)
def test_the_cluster_samples_what_the_engine_samples(
    repository: Path,
    tmp_path: Path,
    run_in_the_cluster: Run,
    recipe: str,
    own: dict[str, Any],
    samples: int,
) -> None:
    folders = [tmp_path / name for name in ("engine", "cluster")]
    configs = [
        configuration(repository, folder, recipe, num_server_rounds=6, **own) for folder in folders
    ]
    simulate(configs[0], Console(quiet=True))
    summary = run_in_the_cluster(configs[1])
    assert summary["posterior"]["samples"] == samples
    for one, other in zip(*map(read_samples, folders), strict=True):
        assert one.server_round == other.server_round
        np.testing.assert_allclose(other.state["x"], one.state["x"], rtol=1e-9)


@pytest.mark.parametrize(
    "recipe", ["fa-ld-bayes-linear", pytest.param("fa-ld-fashion-mnist", marks=pytest.mark.slow)]
)
def test_the_chain_goes_on_without_a_killed_node_and_takes_it_back(
    repository: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    run_in_the_cluster: Run,
    recipe: str,
) -> None:
    """Killed after four rounds, brought back after two without it; Flower needs about a minute to
    notice that the old node is dead, and the chain does not wait for that."""
    if recipe == "fa-ld-fashion-mnist":
        # Three clients instead of twenty, all of them in every round.
        options = {
            "data_dir": request.getfixturevalue("data_dir"),
            "participation": "full",
            "clients_per_round": 0,
        }
    else:
        options = {}
    config = configuration(
        repository,
        tmp_path,
        recipe,
        **options,
        num_server_rounds=ROUNDS,
        round_timeout=DEADLINES[recipe],
        max_samples=KEPT,
    )
    script = _Accident(tmp_path)
    on_every_look(monkeypatch, script)
    summary = run_in_the_cluster(config)
    assert summary["status"] == "completed"
    entries = read_metrics(tmp_path)[1:]
    assert [entry["round"] for entry in entries] == list(range(1, ROUNDS + 1))
    missing = [e["round"] for e in entries if VICTIM in {r["client"] for r in e["rejected"]}]
    assert missing and missing[0] >= script.killed_after
    # Away in one stretch, with everybody else there; then back until the end.
    assert missing == list(range(missing[0], missing[-1] + 1))
    assert missing[-1] < ROUNDS
    for entry in entries:
        assert "skipped" not in entry
        assert entry["replied"] == CLIENTS - (entry["round"] in missing)
        assert entry["seconds"]["training"] <= DEADLINES[recipe] + 5
    # The store is whole: the last samples, complete and finite, and one for every round.
    assert sample_rounds(tmp_path) == list(range(ROUNDS - KEPT + 1, ROUNDS + 1))
    final = load_file(tmp_path / "checkpoints" / "final.safetensors")
    samples = [sample.state for sample in read_samples(tmp_path)]
    for state in samples:
        assert {k: v.shape for k, v in state.items()} == {k: v.shape for k, v in final.items()}
        assert all(np.isfinite(value).all() for value in state.values())
    assert not list((tmp_path / "posterior").glob("*.part"))
    for name, value in final.items():
        np.testing.assert_array_equal(samples[-1][name], value)
    # The chain has moved in every round, also in those without the node.
    losses = [entry["loss"] for entry in entries]
    assert len(set(losses)) == ROUNDS
    assert all(math.isfinite(loss) for loss in losses)


class _Accident:
    """Kills the victim when it has seen four rounds, and brings it back two rounds later."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.killed_after = 0
        self._back = False

    def __call__(self, flower: FlowerCluster) -> None:
        rounds = len(read_metrics(self._folder)) - 1
        if not self.killed_after and rounds >= 4:
            flower.kill_node(VICTIM)
            self.killed_after = rounds
        elif self.killed_after and not self._back and rounds >= self.killed_after + 2:
            flower.restart_node(VICTIM)
            self._back = True
