"""The geometric median: the minimum of the sum of distances."""

import math
from typing import Any

import numpy as np
import pytest
from rule_checks import BOTH_DTYPES, HUGE, FloatType, random_rows

from blackthorn.strategies.aggregation import (
    geometric_median,
)


def sum_of_distances(rows: np.ndarray, point: np.ndarray) -> float:
    return np.linalg.norm(np.asarray(rows, dtype=np.float64) - point, axis=1).sum()


@BOTH_DTYPES
@pytest.mark.parametrize("seed", range(20))
def test_geometric_median_is_the_minimum(seed: int, dtype: FloatType) -> None:
    """The objective is convex: where its gradient vanishes is the minimum. The sum of unit
    vectors is exact up to 1e-6 of smoothing and the float32 of the answer."""
    rng = np.random.default_rng([seed, 4])
    count, dim = int(rng.integers(5, 15)), int(rng.integers(3, 40))
    wide = rng.standard_normal((count, dim)) + 3 * rng.standard_normal(dim)
    rows: np.ndarray = wide.astype(dtype)
    rows[:2] *= 20
    result = geometric_median(rows, 2)
    point = result.vector.numpy().astype(np.float64)
    away = rows.astype(np.float64) - point
    lengths = np.linalg.norm(away, axis=1)
    nearest = lengths.min()
    if nearest > 1e-3:
        gradient = (away / lengths[:, None]).sum(axis=0)
        assert np.linalg.norm(gradient) < 1e-4
    else:  # at a row: the unit vectors of the others sum to at most 1
        others = lengths > nearest
        gradient = (away[others] / lengths[others, None]).sum(axis=0)
        assert np.linalg.norm(gradient) <= 1 + 1e-3
    assert sum_of_distances(rows, point) < 0.999 * sum_of_distances(rows, rows.mean(axis=0))
    assert float(result.weights.sum()) == pytest.approx(1.0, rel=1e-12)


def test_geometric_medians_in_closed_form() -> None:
    # The centroid of an equilateral triangle; the diagonals' crossing of a quadrilateral.
    triangle = np.array([[0.0, 0.0], [1.0, 0.0], [0.5, math.sqrt(3) / 2]])
    np.testing.assert_allclose(
        geometric_median(triangle).vector.numpy(), triangle.mean(axis=0), atol=1e-7
    )
    crossing = np.array([[-1.0, 0.0], [50.0, 0.0], [0.0, -2.0], [0.0, 7.0]])
    np.testing.assert_allclose(geometric_median(crossing).vector.numpy(), [0, 0], atol=1e-6)
    # A vertex with an angle above 120° is the median itself.
    obtuse = np.array([[0.0, 0.0], [1.0, 0.0], [-1.0, 0.3]])
    np.testing.assert_allclose(geometric_median(obtuse).vector.numpy(), [0, 0], atol=1e-5)
    # On a line it is the middle row, however far the others are.
    line = np.array([[-3.0], [0.0], [1.0], [40.0], [1e6]])
    np.testing.assert_allclose(geometric_median(line, 2).vector.numpy(), [1.0], atol=1e-4)


def test_geometric_median_of_points_in_the_majority() -> None:
    rows = np.array([[0.1, 0.2]] * 4 + [[5.0, 5.0], [-HUGE, 3.0], [0.0, 9.0]])
    assert geometric_median(rows, 3).vector.tolist() == [0.1, 0.2]
    assert geometric_median(np.full((2, 3), 0.1)).vector.tolist() == [0.1] * 3
    assert geometric_median(np.full((1, 3), 0.1)).vector.tolist() == [0.1] * 3
    pair = geometric_median(np.array([[0.0], [4.0]])).vector
    assert 0 <= float(pair[0]) <= 4


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e9])
def test_geometric_median_has_no_scale_of_its_own(scale: float) -> None:
    rows = random_rows(7, 9, 6, np.float64)
    np.testing.assert_allclose(
        geometric_median(rows * scale).vector.numpy(),
        geometric_median(rows).vector.numpy() * scale,
        rtol=1e-6,
    )


def test_geometric_median_beside_huge_rows() -> None:
    """Huge rows pull with the force of one unit vector each, from infinity."""
    rng = np.random.default_rng(8)
    rows = rng.standard_normal((11, 4))
    directions = rng.standard_normal((3, 4))
    far, huge = rows.copy(), rows.copy()
    far[:3], huge[:3] = 1e9 * directions, HUGE * directions
    result = geometric_median(huge, 3)
    point = result.vector.numpy()
    away = huge - point
    gradient = (away / np.linalg.norm(away, axis=1)[:, None]).sum(axis=0)
    assert np.linalg.norm(gradient) < 1e-4
    np.testing.assert_allclose(point, geometric_median(far, 3).vector.numpy(), atol=1e-6)


@pytest.mark.parametrize(
    "options", [{"smoothing": 0.0}, {"tolerance": float("nan")}, {"max_iterations": 0}]
)
def test_an_option_out_of_range_is_refused_by_its_name(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        geometric_median(np.zeros((3, 2)), **options)
