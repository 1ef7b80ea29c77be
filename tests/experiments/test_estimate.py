"""Means over seeds: standard errors and intervals beside closed forms and other libraries."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from blackthorn.experiments.estimate import (
    Estimate,
    median_below,
    median_interval,
    rarer,
)
from blackthorn.experiments.finding import Claim, Finding, ahead, between
from blackthorn.experiments.study import signed, spread


def test_the_error_and_the_interval_are_those_by_hand() -> None:
    """1, 2, 3: s = 1, s/√3, and t with two degrees of freedom at 97.5 % is 4.30265."""
    found = Estimate.of([1.0, 2.0, 3.0])
    assert (found.mean, found.error, found.count) == (2.0, pytest.approx(1 / math.sqrt(3)), 3)
    half = 4.302652729911275 / math.sqrt(3)
    assert found.interval == pytest.approx((2 - half, 2 + half))


def test_the_interval_is_that_of_a_t_test() -> None:
    values = np.random.default_rng(0).normal(3, 2, size=7)
    low, high = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert Estimate.of(values).interval == pytest.approx((low, high))


def test_a_difference_is_taken_seed_by_seed() -> None:
    """Seeds that move both alike leave the difference sure."""
    one, other = [10.0, 20.0, 30.1], [9.0, 19.0, 29.0]
    found = Estimate.of_difference(one, other)
    assert found.mean == pytest.approx(1.0333333)
    assert found.error == pytest.approx(0.1 / 3)
    assert ahead("x", one, other, "above").holds is True
    assert ahead("x", other, one, "above").holds is False
    assert signed(one, other) == "+1.03 ± 0.033"


def test_one_run_is_told_by_its_value_alone() -> None:
    found = Estimate.of([5.0])
    assert found.interval == (5.0, 5.0)
    assert (found.above(4.9), found.above(5.0)) == (True, False)
    assert found.said() == spread([5.0], 0) == "5"
    assert between("x", 5.0, 4, 6).holds is True


@pytest.mark.parametrize(
    ("values", "low", "high", "holds"),
    [
        ([1.0, 1.1, 0.9], 0.0, math.inf, True),  # 0.75 to 1.25
        ([0.2, 1.0, -0.6], 0.0, math.inf, None),
        ([-1.0, -1.1, -0.9], 0.0, math.inf, False),
        ([-1.0, -1.1, -0.9], -math.inf, 0.0, True),
        ([0.2, 1.0, -0.6], -math.inf, 0.0, None),
        ([1.0, 1.1, 0.9], 0.95, 1.05, True),
        ([1.0, 1.1, 0.9], 1.2, 1.4, None),
        ([1.0, 1.1, 0.9], 1.3, 1.4, False),
    ],
)
def test_the_interval_decides(
    values: list[float], low: float, high: float, holds: bool | None
) -> None:
    found = between("x", Estimate.of(values), low, high)
    assert found.holds is holds
    assert ("not significant" in Claim("t", [found]).sentence) == (holds is None)


@pytest.mark.parametrize(
    ("holds", "verdict"),
    [
        ((True, True), "reproduced"),
        ((True, None), "not significant"),
        ((None, None), "not significant"),
        ((True, False, None), "partly"),
        ((False, None), "not"),
    ],
)
def test_what_the_runs_leave_open_is_no_verdict(
    holds: tuple[bool | None, ...], verdict: str
) -> None:
    claim = Claim("t", [Finding("x", "0", "", held) for held in holds])
    assert claim.verdict == verdict
    assert claim.agrees == (verdict == "reproduced")


def test_fisher_s_test_is_the_hypergeometric_law() -> None:
    """P[X ≤ one], X hypergeometric: of 2n trials one + other succeed, n are the first's."""
    for one, other in itertools.product(range(6), repeat=2):
        law = stats.hypergeom(10, one + other, 5)
        expected = True if law.cdf(one) <= 0.05 else None
        expected = False if law.sf(one - 1) <= 0.05 else expected
        assert rarer(one, other, 5) is expected


def test_the_median_s_interval_holds_it_as_often_as_it_says() -> None:
    generator = np.random.default_rng(1)
    held = 0
    for _ in range(200):
        low, high = median_interval(generator.standard_cauchy(20))
        held += low <= 0 <= high
    assert 0.95 <= held / 200 <= 0.985  # exactly: 0.9586 for the 6th and 15th of 20
    ordered = np.arange(20.0)
    assert median_interval(ordered) == (5.0, 14.0)
    assert median_interval(ordered[:5]) == (2.0, 2.0)
    assert median_below(ordered, ordered + 20) is True
    assert median_below(ordered + 20, ordered) is False
    assert median_below(ordered, ordered + 1) is None
