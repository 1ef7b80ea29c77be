"""What the ways to spend a budget cost, against figures written down elsewhere."""

import math
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from blackthorn.reporting.privacy_options import Option, Question, compare, plot_options
from blackthorn.settings.rounding import upward
from blackthorn.strategies import (
    ClipNorm,
    FixedParticipation,
    PrivacyPlan,
    Release,
    calibrate_noise_multiplier,
    spent,
)

QUESTION = Question(300, 100, 5.0, 1e-5, dimension=650, groups=5)
Options = dict[str, Option]


@pytest.fixture(scope="module")
def options() -> Options:
    return {option.name: option for option in compare(QUESTION)}


def banded_deviation(bands: int, rounds: int) -> float:
    """Of the last round's noise: of the last row of the inverse of the dense band matrix."""
    series = [math.comb(2 * j, j) / 4**j for j in range(bands)]
    scale = math.sqrt(sum(c * c for c in series))
    dense = sum(np.eye(rounds, k=-j) * c / scale for j, c in enumerate(series))
    return float(np.linalg.norm(np.linalg.inv(dense)[-1]))


@pytest.mark.parametrize(
    ("name", "z", "deviation"),
    [
        ("all clients", 8.919, 10.0),
        ("fixed cohorts", 8.919, 10.0),
        ("rotating, independent noise", 3.989, 10.0),
        # Dense matrices' figure of the last sum.
        ("rotating, banded noise", 3.989, 20.7744 / 3.989),
    ],
)
def test_the_noise_of_all_rounds_is_that_of_the_mechanism(
    options: Options, name: str, z: float, deviation: float
) -> None:
    one = options[name]
    assert one.multiplier == pytest.approx(z, rel=1e-3)
    fresh = z * math.sqrt(650) / one.cohort
    hangs = banded_deviation(5, 100) if "banded" in name else 1.0
    assert one.round_noise == pytest.approx(fresh * hangs, rel=1e-3)
    assert one.total_noise == pytest.approx(fresh * deviation, rel=1e-3)


def test_poisson_is_the_accountants(options: Options) -> None:
    expected = calibrate_noise_multiplier(5.0, 1e-5, 0.2, 100, "pld")
    assert options["Poisson cohorts"].multiplier == pytest.approx(expected, rel=1e-3)


def test_an_adaptive_threshold_costs_more_noise_at_the_same_charge(options: Options) -> None:
    fixed, moving = options["rotating, banded noise"], options["the same, adaptive threshold"]
    assert moving.multiplier == fixed.multiplier
    # (3.989^-2 - 6^-2)^(-1/2) = 5.340.
    assert moving.total_noise / fixed.total_noise == pytest.approx(5.340 / 3.989, rel=1e-3)
    assert moving.round_noise / fixed.round_noise == pytest.approx(5.340 / 3.989, rel=1e-3)


def test_without_a_trusted_server_the_noise_is_that_of_every_message(options: Options) -> None:
    """z/(2 sqrt(60)) keeps the budget over all rounds by itself, by RDP as a run's own figure; the
    server adds a share of its own."""
    one = options["fixed, noise that needs no server"]
    expected = calibrate_noise_multiplier(5.0, 1e-5, 1.0, 100, "rdp") * 2 * math.sqrt(60)
    assert one.multiplier == pytest.approx(expected, rel=1e-3)
    noise = expected * math.sqrt(650 * (1 + 1 / 60)) / 60
    assert one.round_noise == pytest.approx(noise, rel=1e-3)
    assert one.trusted == "nobody, where clients have a policy; else the server's code"
    assert "policy with max-local-epsilon" in one.settings
    plan = PrivacyPlan(
        *(ClipNorm(1.0), one.multiplier, 300, 100, FixedParticipation(60)),
        delta=1e-5,
        noise_location="client",
    )
    assert plan.local_figure().epsilon <= 5.0


def test_a_delta_that_no_run_may_claim_is_refused_in_every_row() -> None:
    told = compare(Question(5, 10, 1.0, 0.5, 20, 2))
    assert all("breaks the claim" in option.refused for option in told)


@pytest.mark.parametrize("groups", [6, 7])
def test_the_rate_that_is_printed_keeps_the_budget_with_the_z_beside_it(groups: int) -> None:
    options = compare(Question(300, 100, 5.0, 1e-5, 650, groups, accountant="rdp"))
    one = next(option for option in options if option.name == "Poisson cohorts")
    rate = float(one.settings.partition("sample-rate = ")[2])
    assert rate == pytest.approx(1 / groups, rel=1e-3)
    z = float(upward(one.multiplier, 4))
    assert spent([(Release(z, rate), 100)], 1e-5).epsilon <= 5.0


def test_what_is_lost_is_the_part_of_the_way_that_is_noise(options: Options) -> None:
    one = options["fixed cohorts"]
    assert one.lost == pytest.approx(one.total_noise**2 / (one.total_noise**2 + 100**2))
    short = {o.name: o for o in compare(Question(300, 100, 5.0, 1e-5, 650, 5, 1.0, 0.1))}
    assert short["fixed cohorts"].lost > 0.9


def test_what_cannot_be_had_says_why() -> None:
    """Ten clients a round are too few for the count."""
    few = {o.name: o for o in compare(Question(30, 100, 5.0, 1e-4, 650, 3))}
    refused = few["the same, adaptive threshold"]
    assert "too small for an adaptive threshold" in refused.refused
    assert math.isnan(refused.lost)


def test_the_plot_is_a_picture(options: Options, tmp_path: Path) -> None:
    path = plot_options(QUESTION, list(options.values()), tmp_path / "new" / "options.png")
    with Image.open(path) as image:
        assert image.format == "PNG"
