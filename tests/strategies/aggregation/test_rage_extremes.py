"""What RAGE must stand: few, equal, tied, huge and unusable rows."""

from typing import Any

import numpy as np
import pytest
import torch
from rule_checks import HUGE, distance

from blackthorn.strategies.aggregation import rage


@pytest.mark.parametrize("stop", ["count", "appendix-f"])
@pytest.mark.parametrize("count", [1, 2])
def test_fewer_than_three_rows_are_averaged(count: int, stop: str) -> None:
    rows = np.array([[1.0, 5.0], [3.0, -1.0]])[:count]
    result = rage(rows, 0, stop=stop)
    assert result.survivors.all()
    np.testing.assert_allclose(result.vector.numpy(), rows.mean(axis=0), rtol=1e-15)


@pytest.mark.parametrize("stop", ["count", "appendix-f", "spectral"])
@pytest.mark.parametrize("value", [0.0, 0.1, 1e25])
def test_equal_rows_all_survive_and_give_that_row(stop: str, value: float) -> None:
    rows = torch.full((9, 50), value)
    sigma0_squared = 1.0 if stop == "spectral" else None
    with np.errstate(all="raise"):  # τ_max = 0 stops: nothing is divided by it
        result = rage(rows, 2, stop=stop, sigma0_squared=sigma0_squared)
    assert result.survivors.all()
    assert result.iterations == 0
    assert torch.equal(result.vector, rows[0])


def test_rows_that_are_equal_once_the_outlier_is_gone() -> None:
    rows = torch.full((10, 7), 0.1)
    rows[4] = 3.0
    result = rage(rows, 3)
    assert result.survivors.tolist() == [i != 4 for i in range(10)]
    assert result.iterations == 1
    assert torch.equal(result.vector, rows[0])


@pytest.mark.parametrize("stop", ["count", "appendix-f"])
def test_two_equal_clusters_tie_and_all_rows_stay(stop: str) -> None:
    rows = np.array([[0.1, 0.2]] * 4 + [[1.7, -5.0]] * 4)
    result = rage(rows, 2, stop=stop)
    assert result.survivors.all()
    np.testing.assert_allclose(result.vector.numpy(), [0.9, -2.4], rtol=1e-12)


def test_all_rows_tied_for_the_largest_score_go() -> None:
    """Five rows at 0.1, four at 1: the four tie for τ_max and all leave, although b is 2."""
    rows = np.array([[0.1]] * 5 + [[1.0]] * 4)
    result = rage(rows, 2)
    assert result.survivors.tolist() == [True] * 5 + [False] * 4
    np.testing.assert_allclose(result.vector.numpy(), [0.1], rtol=1e-15)
    # μ = 0.5, τ = 0.16 and 0.25: the weights left are (1 − 0.64)/9.
    np.testing.assert_allclose(result.weights.numpy()[:5], 0.36 / 9, rtol=1e-12)


@pytest.mark.parametrize(("count", "b"), [(3, 1), (9, 3), (10, 4), (1, 1), (30, 10), (30, 29)])
def test_a_third_of_the_rows_or_more_is_refused(count: int, b: int) -> None:
    with pytest.raises(ValueError, match=f"num_corrupt < K/3.*num_corrupt = {b} with K = {count}"):
        rage(np.zeros((count, 2)), b)


@pytest.mark.parametrize("b", [-1, 1.0, True, None])
def test_num_corrupt_is_a_count(b: Any) -> None:
    with pytest.raises(ValueError, match="num_corrupt must be an integer"):
        rage(np.zeros((9, 2)), b)


def test_no_updates_are_refused() -> None:
    with pytest.raises(ValueError, match="K = 0"):
        rage(np.zeros((0, 4)), 0)


@pytest.mark.parametrize("directions", ["same", "different"])
def test_rows_of_1e25_beside_rows_of_one(directions: str) -> None:
    """After the huge rows the filter still tells the moderate outlier from the honest rows."""
    rng = np.random.default_rng(5)
    rows = rng.standard_normal((16, 300)).astype(np.float32)
    moderate = rows[3] + 2.0 * np.ones(300, dtype=np.float32)
    rows[3] = moderate
    rows[[0, 7]] = HUGE * rng.standard_normal((2, 300))
    if directions == "same":
        rows[7] = rows[0]
    result = rage(rows, 3)
    assert np.flatnonzero(~result.survivors.numpy()).tolist() == [0, 3, 7]
    expected = np.delete(rows, [0, 3, 7], axis=0).astype(np.float64).mean(axis=0)
    assert distance(result.vector, expected) < 1e-6


def test_equal_rows_away_from_the_median_are_seen_as_equal() -> None:
    """Four equal rows of nine are not the median: what is left of their spread is rounding."""
    rng = np.random.default_rng(16)
    rows = rng.standard_normal((9, 1000))
    rows[:5] *= np.array([8.0, 9, 10, 11, 12])[:, None]
    rows[5:] = rows[5]
    with np.errstate(all="raise"):
        result = rage(rows, 2, stop="spectral", sigma0_squared=1e-40)
    assert result.survivors.tolist() == [False] * 5 + [True] * 4
    np.testing.assert_allclose(result.vector.numpy(), rows[5], rtol=1e-14)


def test_entries_at_zero_stay_zero_and_no_longer_set_the_largest_score() -> None:
    """The first row removed keeps by far the largest τ; the next largest must still go."""
    rows = np.array([[1000.0], [30.0], [0.0], [1.0], [2.0], [3.0], [4.0], [5.0]])
    result = rage(rows, 2)
    assert result.survivors.tolist() == [False, False] + [True] * 6
    assert result.weights[:2].tolist() == [0.0, 0.0]
    assert result.iterations == 2
    np.testing.assert_allclose(result.vector.numpy(), [2.5], rtol=1e-15)


@pytest.mark.parametrize(("gap", "num_removed"), [(1e-7, 2), (1e-5, 1)])
def test_a_weight_below_a_millionth_counts_as_zero(gap: float, num_removed: int) -> None:
    """Two rows almost tied at 1 beside six at 0: the second keeps 1 − τ/τ_max ≈ 2·gap/(1 − μ)
    of its weight, 2.7e-7 or 2.7e-5 of 1/K."""
    rows = np.array([[1.0], [1.0 - gap]] + [[0.0]] * 6)
    result = rage(rows, 1)
    assert np.count_nonzero(~result.survivors.numpy()) == num_removed
    left = 0.0 if num_removed == 2 else 2 * gap / (1 - 0.25) / 8
    assert float(result.weights[1]) == pytest.approx(left, rel=1e-3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_screening_should_have_dropped_is_named(bad: float) -> None:
    rows = np.zeros((9, 2))
    rows[4, 1] = bad
    with pytest.raises(ValueError, match="row 4"):
        rage(rows, 2)


@pytest.mark.parametrize("size", [1e80, 1e100, 1e130])
def test_float64_rows_whose_squares_overflow_are_still_filtered(size: float) -> None:
    updates = torch.from_numpy(np.random.default_rng(5).normal(size=(12, 30)))
    updates[3] *= size
    result = rage(updates, 1)
    assert result.survivors.tolist() == [row != 3 for row in range(12)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_rows_that_are_not_finite_are_refused(dtype: torch.dtype, value: float) -> None:
    updates = torch.ones((6, 4), dtype=dtype)
    updates[2, 1] = value
    with pytest.raises(ValueError, match="row 2"):
        rage(updates, 1)
