"""`blackthorn plan-privacy`, as a person runs it."""

from pathlib import Path

import pytest
from digits_runs import run
from typer.testing import CliRunner

from blackthorn.launch.cli import app
from blackthorn.settings.config import ConfigError

SIZE = ["plan-privacy", "--clients", "60", "--rounds", "20", "--epsilon", "5", "--bands", "3"]


def plan(*more: str) -> str:
    result = CliRunner().invoke(app, [*SIZE, *more], env={"COLUMNS": "160"}, catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_it_compares_what_a_budget_buys(tmp_path: Path) -> None:
    told = plan("--dimension", "650", "--plot", str(tmp_path / "plan.png"))
    for name in ("Poisson cohorts", "fixed cohorts", "rotating, banded noise", "adaptive"):
        assert name in told
    assert "secure aggregation (docs/secure-aggregation.md)" in told
    assert "participation = rotating, bands = 3" in told
    assert (tmp_path / "plan.png").exists()


def test_a_pilot_says_how_large_the_model_and_its_updates_are(tmp_path: Path) -> None:
    run(tmp_path / "pilot", num_server_rounds=1)
    told = plan("--pilot", str(tmp_path / "pilot"))
    assert "d = 650" in told
    assert "not private" in told


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "dimension is needed"),
        (["--dimension", "9", "--accountant", "guess"], "accountant = 'guess' is not allowed"),
        (["--dimension", "9", "--clip-norm", "-1"], "clip-norm = -1.0 is not allowed"),
        (["--dimension", "9", "--bands", "61"], "bands = 61 is not allowed"),
        (["--dimension", "9", "--plot", "plan.svg"], "a name that ends in .png"),
        (["--pilot", "nowhere"], "nowhere is not a run folder"),
        (["--dimension", "9", "--epsilon", "0"], "epsilon = 0.0 is not allowed"),
    ],
)
def test_what_is_wrong_is_one_line(options: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        plan(*options)
    assert "\n" not in str(caught.value)
