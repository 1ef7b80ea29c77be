"""What people are told of a bound is not below it."""

import math
import re

import numpy as np
import pytest

from blackthorn.launch.cli import app, finish
from blackthorn.launch.commands.calibrate import _release
from blackthorn.launch.commands.progress import quality
from blackthorn.settings.rounding import upward
from blackthorn.strategies import spent


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
def test_three_digits_and_up(figure: float, shown: str) -> None:
    assert upward(figure) == shown


@pytest.mark.parametrize("digits", [3, 4, 5, 6])
def test_it_is_never_below_and_never_far_above(digits: int) -> None:
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
        assert spent([(_release(kind, 1.0, float(z)), rounds)], 1e-5, "pld").epsilon <= epsilon
