"""What people are told of a bound is not below it."""

import math
import re
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from blackthorn.launch.cli import app, finish
from blackthorn.launch.commands.calibrate import _release
from blackthorn.launch.commands.progress import quality
from blackthorn.reporting.report_facts import _claim, _clients_privacy
from blackthorn.settings.rounding import downward, exact, upward
from blackthorn.strategies import ClipNorm, FullParticipation, PrivacyPlan, spent


@pytest.mark.parametrize(
    ("figure", "shown"),
    [
        (0.0011, "0.0011"),
        (0.00110001, "0.00111"),
        (5.389, "5.39"),
        (5.391, "5.40"),
        (9.991, "10.0"),
        (138.2, "139"),
        (12345.0, "12400"),
        (8.0, "8.0"),
        (0.0, "0.0"),
        (math.inf, "inf"),
    ],
)
def test_figures_have_three_digits_rounded_up(figure: float, shown: str) -> None:
    assert upward(figure) == shown


@pytest.mark.parametrize("digits", [3, 4, 5, 6])
def test_a_rounded_figure_is_never_below_and_never_far_above(digits: int) -> None:
    generator = np.random.default_rng(digits)
    for figure in 10 ** generator.uniform(-6, 6, 2000):
        told = float(upward(figure, digits))
        assert figure <= told <= figure * (1 + 10.0 ** (1 - digits))


@pytest.mark.parametrize("epsilon", [0.0011, 2.3449, 7.8002])
def test_the_terminal_says_no_less_than_was_spent(
    epsilon: float, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = {"status": "completed", "rounds_completed": 3, "final": {}, "wall_seconds": None}
    finish({**summary, "privacy": {"epsilon": epsilon}, "sample_privacy": {"epsilon": epsilon}})
    said = capsys.readouterr().out + quality({"epsilon_rdp": epsilon})[0]
    told = [float(found) for found in re.findall(r"(\d+\.\d+)", said)]
    assert len(told) == 3
    assert all(epsilon <= value <= 1.01 * epsilon for value in told)


@pytest.mark.parametrize(("epsilon", "rounds"), [(8.0, 1), (50.0, 100)])
def test_the_noise_that_calibrate_prints_keeps_to_the_budget(
    epsilon: float, rounds: int, capsys: pytest.CaptureFixture[str]
) -> None:
    budget = ["--epsilon", str(epsilon), "--rounds", str(rounds), "--accountant", "pld"]
    app(["calibrate", "dp", *budget], standalone_mode=False)
    line = re.search(r"^pld +(\S+) +(\S+)", capsys.readouterr().out, re.MULTILINE)
    assert line
    for kind, z in zip(("add-remove", "zero-out"), line.groups(), strict=True):
        assert spent([(_release(kind, 1.0, 1, float(z)), rounds)], 1e-5, "pld").epsilon <= epsilon


@pytest.mark.parametrize("share", [4e-7, 1e-12, 0.1234567891, 1 / 3, 0.3, 1.0])
def test_a_share_of_a_cohort_is_never_taken_for_a_smaller_one(share: float) -> None:
    drawn = _release("replace-one", share, 1, 2.0).drawn
    assert drawn is not None
    taken = Fraction(*drawn)
    assert share <= taken <= share + 2e-6
    assert float(taken) == share or share not in (0.3, 1 / 3, 1.0)


@pytest.mark.parametrize("digits", [3, 4, 5, 6])
def test_what_there_is_is_never_above_and_never_far_below(digits: int) -> None:
    generator = np.random.default_rng(digits)
    for figure in 10 ** generator.uniform(-6, 6, 2000):
        told = float(downward(figure, digits))
        assert figure * (1 - 10.0 ** (1 - digits)) <= told <= figure


@pytest.mark.parametrize("figure", [1e-5, 0.3, 0.30000049, 1.0000049e-5, 8.0, 0.012345649])
def test_a_delta_is_shown_as_it_is(figure: float) -> None:
    assert float(exact(figure)) == figure
    assert exact(figure) == f"{figure:g}" or len(exact(figure)) > len(f"{figure:g}")


def test_calibrate_says_of_which_numbers_its_figures_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = ["--noise-multiplier", "1.3640049", "--sample-rate", "0.30000049"]
    given += ["--delta", "1.0000049e-05", "--rounds", "3", "--accountant", "rdp"]
    app(["calibrate", "dp", *given], standalone_mode=False)
    head = capsys.readouterr().out.splitlines()[0]
    for number in ("z = 1.3640049", "share 0.30000049", "delta = 1.0000049e-05"):
        assert number in head


def test_the_noise_that_is_left_is_not_rounded_up() -> None:
    plan = PrivacyPlan(
        ClipNorm(1.0), 0.67018, 10, 3, FullParticipation(), delta=1e-3, noise_location="client"
    )
    assert "the multiplier 0.6701 sqrt(1 - k/10)" in plan.sentence()


def test_the_report_shows_no_more_noise_than_there_is_and_the_delta_itself() -> None:
    claim: dict[str, Any] = {"epsilon": 1.0, "delta": 0.012345649, "claim": "a claim"}
    assert "δ = 0.012345649" in _claim("a client", claim)[1]
    privacy = {**claim, "noise_multiplier": 1.36400499, "sample_rate": 0.30000049}
    shown = dict(_clients_privacy(privacy))
    assert shown["noise multiplier z"] == "1.36400"
    assert float(shown["noise multiplier z"]) <= privacy["noise_multiplier"]
    assert (shown["δ"], shown["sample rate q"]) == ("0.012345649", "0.30000049")
