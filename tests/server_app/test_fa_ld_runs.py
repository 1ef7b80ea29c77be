"""Whole runs of FA-LD: the distance to a known posterior, and what the command prints of it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from linear_law import (
    Cohort,
    data_of,
    expected_map,
    full,
    stationary,
    w2,
    with_replacement,
    without_replacement,
)
from rich.console import Console
from typer.testing import CliRunner

from blackthorn.launch.cli import app
from blackthorn.launch.commands.recipes import recipe_config
from blackthorn.launch.commands.simulate import simulate
from blackthorn.recording.failure_reason import RunFailed
from blackthorn.recording.posterior_store import sample_rounds
from blackthorn.settings.config import RunConfig, make_config, read_recipe


def recipe(repository: Path, folder: Path, **options: Any) -> RunConfig:
    values = {
        "num-server-rounds": 400,
        "burn-in": 50,
        "langevin-seed": 5,
        "report": False,
        "output-dir": str(folder),
        **{key.replace("_", "-"): value for key, value in options.items()},
    }
    return recipe_config(repository / "recipes" / "fa-ld-bayes-linear.toml", (), values)


def law_of(config: RunConfig) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Stationary mean and covariance by the recursion, and the posterior's."""
    data = data_of(config)
    maps = [
        expected_map(
            data,
            client,
            config.local_lr,
            config.local_steps,
            config.temperature,
            config.shared_noise,
        )
        for client in range(config.num_clients)
    ]
    cohorts: list[Cohort] = full(data.share)
    if config.participation == "with-replacement":
        cohorts = with_replacement(data.share, config.clients_per_round)
    elif config.participation == "fixed":
        cohorts = without_replacement(config.num_clients, config.clients_per_round)
    a, b = data.energy()
    exact = np.linalg.solve(a, b), config.temperature * np.linalg.inv(a)
    return *stationary(maps, cohorts), *exact


SETTINGS: dict[str, dict[str, Any]] = {
    "recipe": {},
    "small steps": {"local_lr": 2e-4},
    "one local step": {"local_steps": 1, "num_server_rounds": 600},
    "two draws": {"participation": "with-replacement", "clients_per_round": 2},
}


def test_w2_is_the_law_s_and_falls_with_step_size_and_local_steps_and_rises_with_fewer_clients(
    repository: Path, tmp_path: Path
) -> None:
    measured = {}
    for name, options in SETTINGS.items():
        config = recipe(repository, tmp_path / name, **options)
        summary = simulate(config, Console(quiet=True))
        measured[name] = summary["posterior"]["w2"]
        mean, covariance, exact_mean, exact_covariance = law_of(config)
        expected = w2(mean, covariance, exact_mean, exact_covariance)
        # A fit to so many dependent samples is off by this much: W2 obeys the triangle inequality.
        error = 3 * np.sqrt(np.trace(covariance) / summary["posterior"]["ess_min"])
        assert abs(measured[name] - expected) < error
    assert measured["small steps"] < 0.7 * measured["recipe"]
    assert measured["one local step"] < 0.5 * measured["recipe"]
    assert measured["two draws"] > 1.2 * measured["recipe"]


def test_scheme_ii_ends_further_from_the_posterior_than_full_participation(
    repository: Path, tmp_path: Path
) -> None:
    """Balanced data: two of five clients a round end further from the posterior than all five."""
    distances = []
    for options in ({}, {"participation": "fixed", "clients_per_round": 2}):
        config = recipe(repository, tmp_path / str(len(options)), imbalance=0.0, **options)
        summary = simulate(config, Console(quiet=True))
        mean, covariance, *exact = law_of(config)
        error = 3 * np.sqrt(np.trace(covariance) / summary["posterior"]["ess_min"])
        assert abs(summary["posterior"]["w2"] - w2(mean, covariance, *exact)) < error
        distances.append(summary["posterior"]["w2"])
    assert distances[1] > 1.2 * distances[0]


def test_the_command_prints_the_distance(repository: Path, tmp_path: Path) -> None:
    path = str(repository / "recipes" / "fa-ld-bayes-linear.toml")
    options = ["--set", "num-server-rounds=80", "--output-dir", str(tmp_path / "run")]
    done = CliRunner().invoke(app, ["simulate", path, *options])
    assert done.exit_code == 0, done.output
    assert "posterior: 30 samples, smallest effective sample size" in done.output
    assert "2-Wasserstein distance to the exact posterior: 0." in done.output
    assert len(sample_rounds(tmp_path / "run")) == 30


def test_a_chain_that_diverged_before_its_first_sample_is_a_failed_run(
    repository: Path, tmp_path: Path
) -> None:
    config = recipe(
        repository, tmp_path, num_server_rounds=20, burn_in=18, local_steps=10, local_lr=10.0
    )
    with pytest.raises(RunFailed, match=r"no posterior sample: \d+ of 20 rounds left the model"):
        simulate(config, Console(quiet=True))
    assert '"status": "failed"' in (tmp_path / "summary.json").read_text()


def test_seeded_noise_makes_a_run_repeatable_and_no_seed_does_not(
    repository: Path, tmp_path: Path
) -> None:
    finals = {}
    for name, seed in (("one", 5), ("same", 5), ("free", -1), ("free too", -1)):
        config = recipe(
            repository, tmp_path / name, num_server_rounds=5, burn_in=0, langevin_seed=seed
        )
        finals[name] = simulate(config, Console(quiet=True))["final"]["loss"]
    assert finals["one"] == finals["same"]
    assert len({finals["one"], finals["free"], finals["free too"]}) == 3


def test_a_reservoir_keeps_thinned_rounds_from_all_of_the_run(
    repository: Path, tmp_path: Path
) -> None:
    config = recipe(
        repository,
        tmp_path / "run",
        num_server_rounds=60,
        burn_in=10,
        thinning=2,
        max_samples=10,
        keep_samples="reservoir",
    )
    simulate(config, Console(quiet=True))
    rounds = sample_rounds(tmp_path / "run")
    assert len(rounds) == 10
    assert all(r > 10 and r % 2 == 0 for r in rounds)
    assert min(rounds) < 42  # the last ten would be 42, 44, ..., 60


@pytest.mark.parametrize("name", ["fa-ld-bayes-linear", "fa-ld-fashion-mnist"])
def test_the_recipes_are_of_fa_ld(repository: Path, name: str) -> None:
    assert make_config(read_recipe(repository / "recipes" / f"{name}.toml")).algorithm == "fa-ld"
