"""The papers' figures: how they are measured and shown; the long ones are marked slow."""

import math
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from experiments import fat_clipping, understanding_clipping
from experiments.engine_run import EngineRun, run_alone, run_in_lockstep
from experiments.finding import Finding, between
from launch import reproduce
from launch.cli import app
from server_app.config import ConfigError, RunConfig, make_config
from strategies.reports import RoundReport
from tasks.problem import load_problem


def run_of(config: RunConfig) -> tuple[EngineRun, list[RoundReport]]:
    reports: list[RoundReport] = []
    return EngineRun(config, load_problem(config), [reports.append]), reports


@pytest.mark.parametrize(
    "values",
    [
        {**fat_clipping.SETTING, "algorithm": "fat-clipping-pi", "clip-norm": 3.0},
        {**fat_clipping.SETTING, "algorithm": "fat-clipping-pr", "clip-norm": 30.0},
        {"local-steps": 3, "participation": "fixed", "clients-per-round": 4, "model": "mlp-8"},
    ],
)
def test_runs_in_lockstep_are_the_runs_alone(values: dict[str, Any]) -> None:
    configs = [make_config({**values, "num-server-rounds": 4, "seed": s}) for s in (0, 5, 9)]
    together = [run_of(config) for config in configs]
    run_in_lockstep([run for run, _ in together])
    for config, (_, reports) in zip(configs, together, strict=True):
        alone, expected = run_of(config)
        run_alone(alone)
        for report, other in zip(reports, expected[1:], strict=True):  # round 0 is evaluation
            assert report.server_round == other.server_round
            assert report.accepted == other.accepted
            torch.testing.assert_close(report.model, other.model, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(together[0][1][-1].model, together[1][1][-1].model, rtol=1e-2)


def test_cauchy_in_small() -> None:
    told: list[tuple[int, int]] = []
    figures = fat_clipping.cauchy(
        2, num_rounds=22, processes=1, advance=lambda done, of: told.append((done, of))
    )
    assert {name: len(values) for name, values in figures.items()} == {
        "FedAvg": 2,
        "PR 3": 2,
        "PR 30": 2,
        "PI 3": 2,
        "FedAvg, Gaussian": 1,
    }
    assert told[-1] == (9, 9)
    # The mean of rounds 3 to 22 of the run itself.
    values = {**fat_clipping.SETTING, **fat_clipping.METHODS["PI 3"], "num-server-rounds": 22}
    run, reports = run_of(make_config({**values, "seed": 1}))
    run_alone(run)
    tail = [float(report.model.square().sum()) for report in reports if report.server_round > 2]
    assert len(tail) == 20
    assert figures["PI 3"][1] == pytest.approx(np.mean(tail), rel=1e-4)


def test_cauchy_s_verdicts() -> None:
    good = {
        "FedAvg": np.array([6.0, *[200.0] * 30]),
        "PR 3": np.full(31, 3.4),
        "PR 30": np.full(31, 0.2),
        "PI 3": np.full(31, 0.03),
        "FedAvg, Gaussian": np.full(3, 0.02),
    }
    assert all(finding.holds for finding in fat_clipping.cauchy_findings(good))
    for method, value in (("PI 3", 0.25), ("PR 30", 0.02), ("PR 3", 1.9), ("FedAvg", 4.9)):
        bad = {**good, method: np.array([*good[method][1:], value])}
        assert not all(finding.holds for finding in fat_clipping.cauchy_findings(bad)), method


def test_mnist_s_verdicts() -> None:
    figures = {
        "FedAvg": 90.8,
        "CE-FedAvg": 89.0,
        "model clipping": 38.0,
        "model clipping, mean": 22.0,
        "c": 0.4,
    }
    assert all(finding.holds for finding in understanding_clipping.mnist_findings(figures))
    for method in ("CE-FedAvg", "model clipping, mean"):
        bad = {**figures, method: 87.4}
        holds = [finding.holds for finding in understanding_clipping.mnist_findings(bad)]
        assert holds.count(False) == 1


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(1.0, 2.0, "1 to 2"), (-math.inf, 2.0, "below 2"), (1.0, math.inf, "above 1")],
)
def test_ranges(low: float, high: float, expected: str) -> None:
    assert between("x", 1.5, low, high) == Finding("x", "1.5", expected, True)
    assert not between("x", math.nan, low, high).holds
    assert not between("x", 0.5 if low == 1.0 else 2.5, low, high).holds


def test_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(app, ["reproduce", "understanding-clipping", "--only", "claim-2.1"])
    assert result.exit_code == 0, result.output
    assert "0.2964564" in result.output
    assert "as it should be" in result.output
    wrong = [Finding("a figure", "1", "2", False)]
    experiment = reproduce.Experiment("of a test", lambda _options, _advance: wrong)
    monkeypatch.setitem(reproduce.PAPERS, "a-paper", {"a-table": experiment})
    result = CliRunner().invoke(app, ["reproduce", "a-paper"])
    assert result.exit_code == 1
    assert "differs" in result.output


@pytest.mark.parametrize(
    ("paper", "only", "expected"),
    [
        ("none", None, "paper = 'none' is not known: .*fat-clipping"),
        ("fat-clipping", "gauss", "--only gauss is not known for fat-clipping: cauchy"),
    ],
)
def test_unknown_names(paper: str, only: str | None, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        reproduce.reproduce(paper, only, reproduce.Options(), Console(quiet=True))


def test_absent_data_are_one_line(tmp_path: Path) -> None:
    options = reproduce.Options(data_dir=str(tmp_path))
    with pytest.raises(ConfigError, match="mnist") as caught:
        reproduce.reproduce("understanding-clipping", "mnist", options, Console(quiet=True))
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_cauchy_over_a_hundred_seeds() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    findings = fat_clipping.cauchy_findings(fat_clipping.cauchy(100))
    assert [finding for finding in findings if not finding.holds] == []
    # Two minutes on two cores.
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 240


@pytest.mark.slow
def test_mnist(data_dir: str) -> None:
    findings = understanding_clipping.mnist_findings(understanding_clipping.mnist(data_dir))
    assert [finding for finding in findings if not finding.holds] == []
