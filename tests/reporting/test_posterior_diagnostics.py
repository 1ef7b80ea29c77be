"""Effective sample size and split-R̂ of chains whose answers are known, and the chain's plots."""

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from blackthorn.launch.commands.diagnose import diagnose_runs
from blackthorn.launch.commands.simulate import simulate
from blackthorn.recording.posterior_store import read_samples
from blackthorn.reporting.posterior_diagnostics import Traces, collect_traces, diagnose
from blackthorn.settings.config import ConfigError, RunConfig, make_config
from blackthorn.tasks.labelled import LabelledTask
from blackthorn.tasks.problem import load_problem


def autoregressive(phi: float, chains: int, draws: int, seed: int = 0) -> np.ndarray:
    """x_t = φ x_{t−1} + ε, stationary: n draws are worth n (1 − φ)/(1 + φ)."""
    generator = np.random.default_rng(seed)
    x = generator.normal(0, 1 / math.sqrt(1 - phi**2), chains)
    rows = []
    for _ in range(draws):
        x = phi * x + generator.normal(size=chains)
        rows.append(x)
    return np.stack(rows, axis=1)


def rhat_by_hand(chains: np.ndarray) -> float:
    """√(((n − 1)/n W + B/n)/W) over the halves of the chains (Gelman et al., 2013)."""
    n = chains.shape[1] // 2
    halves = [half for chain in chains for half in (chain[:n], chain[-n:])]
    within = np.mean([half.var(ddof=1) for half in halves])
    between = np.var([half.mean() for half in halves], ddof=1)
    return float(np.sqrt(((n - 1) / n * within + between) / within))


@pytest.mark.parametrize(("phi", "chains"), [(0.0, 1), (0.8, 1), (0.8, 4)])
def test_autoregressive_chains_have_their_known_sample_size_and_rhat(
    phi: float, chains: int
) -> None:
    values = autoregressive(phi, chains, 8000 // chains)
    (found,) = diagnose(Traces(["x"], values[:, :, None]))
    assert found.ess == pytest.approx(8000 * (1 - phi) / (1 + phi), rel=0.2)
    assert found.rhat == pytest.approx(rhat_by_hand(values), rel=1e-6)
    assert found.rhat < 1.05
    assert found.mean == pytest.approx(values.mean())


@pytest.mark.parametrize("draws", [40, 41])
def test_a_drift_and_chains_apart_are_seen(draws: int) -> None:
    drifting = autoregressive(0.0, 1, draws) + np.linspace(0, 6, draws)
    apart = autoregressive(0.0, 2, draws) + np.array([[0.0], [5.0]])
    for values in (drifting, apart):
        (found,) = diagnose(Traces(["x"], values[:, :, None]))
        assert found.rhat == pytest.approx(rhat_by_hand(values), rel=1e-6)
        assert found.rhat > 1.3


def test_too_few_draws_and_what_never_moves_have_no_figures() -> None:
    few, still = np.random.default_rng(0).normal(size=(1, 7, 1)), np.ones((1, 50, 1))
    for values in (few, still):
        (found,) = diagnose(Traces(["x"], values))
        assert math.isnan(found.ess)
        assert math.isnan(found.rhat)


def configuration(folder: Path, **values: Any) -> RunConfig:
    given = {key.replace("_", "-"): value for key, value in values.items()}
    return make_config(
        {
            "algorithm": "fa-ld",
            "num-clients": 3,
            "num-server-rounds": 12,
            "local-steps": 2,
            "local-lr": 1e-5,
            "burn-in": 2,
            "prior-precision": 1.0,
            "langevin-seed": 4,
            "output-dir": str(folder),
            **given,
        }
    )


def test_a_classifier_s_traces_are_its_samples_own_and_its_plots_are_drawn(tmp_path: Path) -> None:
    config = configuration(tmp_path, task="digits", model="mlp-8")
    summary = simulate(config, Console(quiet=True))
    posterior = summary["posterior"]
    assert posterior["samples"] == 10
    for row in (posterior["posterior"], posterior["point"]):
        assert {"accuracy", "nll", "brier", "ece", "entropy"} <= row.keys()
    assert posterior["point"]["accuracy"] == pytest.approx(summary["final"]["accuracy"])
    for plot in ("trace", "autocorrelation", "reliability"):
        assert (tmp_path / "plots" / f"{plot}.png").read_bytes().startswith(b"\x89PNG")
    problem = load_problem(config)
    traces = collect_traces([tmp_path], problem)
    assert traces.values.shape == (1, 10, 16)
    task = problem.task
    assert isinstance(task, LabelledTask) and task.test is not None
    for draw, sample in enumerate(read_samples(tmp_path)):
        params = problem.model.flatten({k: torch.from_numpy(v) for k, v in sample.state.items()})
        for name, value in zip(traces.names, traces.values[0, draw], strict=True):
            kind, index = name.split("-")
            if kind == "theta":
                assert value == float(params[int(index)])
        # Prediction 0 is of the first test example, prediction 7 of the last.
        outputs = problem.model.outputs(params, task.test.x[[0, -1]]).detach().double()
        of_label = torch.softmax(outputs, dim=1)[[0, 1], task.test.y[[0, -1]]]
        np.testing.assert_allclose(traces.values[0, draw, [8, 15]], of_label, rtol=1e-6)


def test_several_runs_are_chains_of_one_posterior(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [tmp_path / name for name in ("one", "two")]
    for seed, folder in enumerate(folders):
        simulate(
            configuration(folder, task="bayes-linear", problem_dimension=2, langevin_seed=seed),
            Console(quiet=True),
        )
    found = diagnose_runs(folders, Console(width=200))
    assert "2 chains of 10 samples" in capsys.readouterr().out
    assert [d.name for d in found][:2] == ["theta-0", "theta-1"]
    other = tmp_path / "other"
    simulate(
        configuration(other, task="bayes-linear", problem_dimension=2, prior_precision=2.0),
        Console(quiet=True),
    )
    with pytest.raises(ConfigError, match=r"another posterior's chain than .*: prior-precision"):
        diagnose_runs([folders[0], other], Console(quiet=True))


def test_chains_may_begin_elsewhere_but_one_counts_once(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "two")]
    for number, folder in enumerate(folders):
        chain = configuration(
            folder,
            task="bayes-linear",
            problem_dimension=2,
            langevin_seed=number,
            initial_point=5.0 * number,
            evaluate_every=1 + number,
            report=False,
        )
        simulate(chain, Console(quiet=True))
    assert len(diagnose_runs(folders, Console(quiet=True))) > 2
    with pytest.raises(ConfigError, match="is named twice: a chain counts once"):
        diagnose_runs([folders[0], folders[0] / ".." / "one"], Console(quiet=True))
    with pytest.raises(ConfigError, match="is not a run folder"):
        diagnose_runs([tmp_path / "nowhere"], Console(quiet=True))


def test_arviz_is_imported_only_where_it_is_needed(repository: Path) -> None:
    """It takes seconds, which no client and no `--help` should wait for."""
    code = (
        "import sys; from blackthorn.client_app import clientapp; "
        "from blackthorn.server_app import serverapp; from blackthorn.launch import cli; "
        "print('arviz' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=repository, check=True
    )
    assert done.stdout.strip() == "False"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the cache is not below HOME")
def test_arviz_is_imported_where_there_is_no_home(repository: Path) -> None:
    code = (
        "from blackthorn.reporting.posterior_diagnostics import import_arviz; import numpy as np; "
        "print(round(float(import_arviz().ess(np.arange(100.0) % 7)), 3) > 0)"
    )
    environment = {k: v for k, v in os.environ.items() if k != "XDG_CACHE_HOME"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=repository,
        env={**environment, "HOME": "/proc/none"},
    )
    assert done.stdout.strip() == "True", done.stderr
