"""Noise that leaves nothing to learn is told: before the start, and in what the run leaves."""

import math
from pathlib import Path
from typing import Any

import pytest
from digits_runs import configuration
from rich.console import Console

from blackthorn.launch.commands.simulate import simulate
from blackthorn.recording.privacy import privacy_plan
from blackthorn.recording.run_folder import read_summary, write_failure
from blackthorn.server_app.run import prepare
from blackthorn.server_app.useless_noise import useless_noise

# Logistic regression on digits of 8 x 8 pixels in 10 classes.
DIMENSION = 650
DP = {
    "algorithm": "dp-fedavg",
    "clip_norm": 1.0,
    "participation": "poisson",
    "sample_rate": 0.5,
    "instruments": False,
    "num_server_rounds": 4,
}
DP_SGD = {
    "instruments": False,
    "local_dp_sgd": True,
    "dp_sgd_sample_rate": 0.2,
    "batch_size": 10,
    "local_steps": 2,
    "num_server_rounds": 2,
}


def lines(folder: Path, options: dict[str, Any], dimension: int = DIMENSION) -> list[str]:
    config = configuration(folder, **options)
    plan = privacy_plan(config) if options.get("algorithm") == "dp-fedavg" else None
    return useless_noise(config, plan, dimension)


@pytest.mark.parametrize("factor", [0.99, 1.01, 20.0])
def test_noise_is_useless_beyond_all_that_updates_could_add_up_to(
    factor: float, tmp_path: Path
) -> None:
    """r = 2 of 4 clients, T = 4: z sqrt(650) > 2 sqrt(4)."""
    z = factor * 2 * math.sqrt(4) / math.sqrt(DIMENSION)
    told = lines(tmp_path, {**DP, "noise_multiplier": z})
    assert bool(told) == (factor > 1)
    if told:
        (line,) = told
        assert f"{2 * factor:.3g} times as long as the longest possible mean update" in line
        assert f"{factor:.3g} times as many clients a round" in line
        assert f"1/{factor**2:.3g} of the parameters" in line
        assert line.endswith("or a smaller noise-multiplier")
        assert "\n" not in line
    # What it says would help does.
    assert not lines(tmp_path, {**DP, "noise_multiplier": z}, int(DIMENSION / factor**2))


@pytest.mark.parametrize("banded", [True, False])
def test_noise_that_hangs_together_is_longer_in_a_round_and_shorter_over_all(
    banded: bool, tmp_path: Path
) -> None:
    """b = 2: c = (1, 1/2)/sqrt(5/4), and two rounds' noise is sqrt(5/4) (z_1, z_2 - z_1/2)."""
    options: dict[str, Any] = {
        **DP,
        "participation": "rotating",
        "sample_rate": 1.0,
        "bands": 2,
        "banded_noise": banded,
        "num_server_rounds": 2,
        "noise_multiplier": 5.0,
    }
    (line,) = lines(tmp_path, options)
    fresh = 5.0 * math.sqrt(DIMENSION) / 2
    once = fresh * (math.sqrt(1.25 * 1.25) if banded else 1.0)
    both = fresh * (math.sqrt(1.25 * (0.25 + 1)) if banded else math.sqrt(2)) / 2
    assert f"{once:.3g} times as long as the longest possible mean update" in line
    assert f"over the whole run {both:.3g} times" in line


def test_a_budget_is_named_where_there_is_one(tmp_path: Path) -> None:
    (line,) = lines(tmp_path, {**DP, "epsilon": 0.05})
    assert line.endswith("or a larger epsilon")


@pytest.mark.parametrize(("z", "useless"), [(1.0, False), (2.0, True)])
def test_dp_sgds_noise_is_measured_too(z: float, useless: bool, tmp_path: Path) -> None:
    """B = 10, 2 steps in 2 rounds of 4 clients: z sqrt(650) > 10 sqrt(16) from z = 1.57 on."""
    told = lines(tmp_path, {**DP_SGD, "dp_sgd_noise_multiplier": z})
    assert bool(told) == useless
    assert all("local-dp-sgd: the noise of a client's step" in line for line in told)


@pytest.mark.parametrize("claim", [True, False])
def test_it_is_said_before_the_start_and_in_summary_and_report(
    claim: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {**DP, "noise_multiplier": 50.0, "claim_privacy": claim, "report": True}
    summary = simulate(configuration(tmp_path, **options), Console(width=1000))
    (line,) = summary["warnings"]
    assert "do not expect the model to learn" in line
    printed = capsys.readouterr().out
    assert printed.index(line) < printed.index("round ")
    assert line in (tmp_path / "report.html").read_text()


def test_a_run_whose_server_died_says_it_as_well(tmp_path: Path) -> None:
    config = configuration(tmp_path, **DP, noise_multiplier=50.0)
    told = prepare(config).warnings
    assert write_failure(tmp_path, config, "killed", None, told)
    summary = read_summary(tmp_path)
    assert summary is not None
    assert summary["warnings"] == told != []


def test_the_recipe_as_it_stands_is_not_remarked_on(tmp_path: Path) -> None:
    """dp-digits: 100 clients, q = 0.3, 40 rounds, epsilon 8; it learns."""
    options = {
        **DP,
        "num_clients": 100,
        "examples_per_client": 14,
        "sample_rate": 0.3,
        "num_server_rounds": 40,
        "delta": 1e-4,
    }

    def remarks(epsilon: float) -> list[str]:
        warnings = prepare(configuration(tmp_path, **options, epsilon=epsilon)).warnings
        return [line for line in warnings if line.startswith("the noise")]

    assert not remarks(8.0)
    assert remarks(0.05)
