"""The mean, the coordinate-wise median and the trimmed mean against their definitions."""

import numpy as np
import pytest
import torch
from rule_checks import BOTH_DTYPES, HUGE, FloatType, check, random_rows

from blackthorn.strategies.aggregation import (
    coordinate_median,
    mean,
    trimmed_mean,
)


@BOTH_DTYPES
@pytest.mark.parametrize(("count", "dim"), [(1, 1), (2, 5), (13, 30_001)])
def test_the_mean_is_numpys_in_float64(count: int, dim: int, dtype: FloatType) -> None:
    rows = random_rows(0, count, dim, dtype)
    result = mean(rows)
    check(result, rows.astype(np.float64).mean(axis=0), dtype)
    np.testing.assert_allclose(result.weights.numpy(), 1 / count, rtol=1e-15)
    assert result.survivors.all()


@BOTH_DTYPES
def test_a_weighted_mean_leaves_out_rows_of_weight_0(dtype: FloatType) -> None:
    rows = random_rows(1, 4, 7, dtype)
    result = mean(rows, weights=[3, 0, 1, 4])
    wide = rows.astype(np.float64)
    check(result, (3 * wide[0] + wide[2] + 4 * wide[3]) / 8, dtype)
    assert result.weights.tolist() == [0.375, 0.0, 0.125, 0.5]
    assert result.survivors.tolist() == [True, False, True, True]


def test_mean_is_accumulated_in_float64() -> None:
    rows = torch.ones(4001, 2)
    rows[0] = 2.0**26  # in float32 a running sum of 2^26 + 1 + 1 + … stays at 2^26
    expected = (2.0**26 + 4000) / 4001
    assert mean(rows).vector.tolist() == pytest.approx([expected] * 2, rel=1e-7)
    assert mean(torch.full((3, 2), 3e38)).vector.tolist() == pytest.approx([3e38] * 2, rel=1e-6)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0, 2.0], r"shape \[3\]"),
        ([1.0, -1.0, 2.0], "finite and not negative"),
        ([1.0, float("nan"), 2.0], "finite and not negative"),
        ([0.0, 0.0, 0.0], "not all be zero"),
    ],
)
def test_weights_that_are_none_are_refused(weights: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mean(torch.ones(3, 2), weights=weights)


def test_weights_too_large_to_sum() -> None:
    assert mean(torch.eye(2), weights=[1.5e308, 1.5e308]).vector.tolist() == [0.5, 0.5]


@BOTH_DTYPES
@pytest.mark.parametrize(("count", "dim"), [(1, 3), (2, 3), (3, 1), (12, 30_001), (25, 30_001)])
def test_the_coordinate_median_is_numpys(count: int, dim: int, dtype: FloatType) -> None:
    rows = random_rows(2, count, dim, dtype)
    result = coordinate_median(rows, (count - 1) // 2)
    check(result, np.median(rows.astype(np.float64), axis=0), dtype)
    np.testing.assert_allclose(result.weights.numpy(), 1 / count)
    assert result.survivors.all()


@BOTH_DTYPES
@pytest.mark.parametrize(
    ("count", "b", "dim"), [(1, 0, 3), (3, 1, 2), (8, 3, 40), (25, 0, 50), (25, 6, 30_001)]
)
def test_the_trimmed_mean_is_that_of_the_sorted_rows(
    count: int, b: int, dim: int, dtype: FloatType
) -> None:
    rows = random_rows(3, count, dim, dtype)
    expected = np.sort(rows.astype(np.float64), axis=0)[b : count - b].mean(axis=0)
    check(trimmed_mean(rows, b), expected, dtype)


def test_ties_and_huge_values_in_a_coordinate() -> None:
    rows = np.array([[1.0, HUGE], [1.0, -HUGE], [2.0, 0.5], [1.0, 0.25], [-9.0, 0.5]])
    assert coordinate_median(rows).vector.tolist() == [1.0, 0.5]
    np.testing.assert_allclose(trimmed_mean(rows, 1).vector.numpy(), [1.0, 1.25 / 3], rtol=1e-15)
