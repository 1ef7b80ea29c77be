"""Centred clipping against its iteration, written naively in float64."""

from typing import Any

import numpy as np
import pytest
from rule_checks import BOTH_DTYPES, HUGE, FloatType, random_rows

from blackthorn.strategies.aggregation import (
    centered_clipping,
)


def naive_centered_clipping(
    rows: np.ndarray, radius: float, start: np.ndarray, iterations: int
) -> np.ndarray:
    v = np.asarray(start, dtype=np.float64)
    for _ in range(iterations):
        away = rows.astype(np.float64) - v
        lengths = np.linalg.norm(away, axis=1)
        factors = np.array([min(1.0, radius / n) if n > 0 else 1.0 for n in lengths])
        v = v + (away * factors[:, None]).mean(axis=0)
    return v


@BOTH_DTYPES
@pytest.mark.parametrize("iterations", [1, 3, 10])
@pytest.mark.parametrize("seed", range(4))
def test_centered_clipping_is_the_papers_algorithm_written_naively(
    seed: int, iterations: int, dtype: FloatType
) -> None:
    rng = np.random.default_rng([seed, 5])
    rows = random_rows([seed, 6], 9, 20, dtype)
    start = rng.standard_normal(20)
    radius = float(10 ** rng.uniform(-1, 3))
    result = centered_clipping(rows, 3, radius=radius, start=start, iterations=iterations)
    expected = naive_centered_clipping(rows, radius, start, iterations)
    scale = np.abs(expected).max()
    np.testing.assert_allclose(
        result.vector.numpy(), expected, atol=scale * (1e-7 if dtype == np.float32 else 1e-12)
    )
    assert result.iterations == iterations


def test_it_starts_at_the_median_with_the_median_distance_as_radius() -> None:
    """From the coordinate-wise median, with the median distance to it as the radius."""
    rows = random_rows(9, 8, 12, np.float64)
    rows[:2] = HUGE
    start = np.median(rows, axis=0)
    radius = np.median(np.linalg.norm(rows - start, axis=1))
    expected = naive_centered_clipping(rows, radius, start, 3)
    np.testing.assert_allclose(centered_clipping(rows, 2).vector.numpy(), expected, rtol=1e-9)


def test_centered_clipping_by_hand() -> None:
    rows = np.array([[3.0, 4.0], [0.0, 1.0], [0.0, 0.0], [0.0, 300.0]])
    once = centered_clipping(rows, 1, radius=2.0, start=[0.0, 0.0], iterations=1)
    # clip: (1.2, 1.6), (0, 1), 0, (0, 2).
    np.testing.assert_allclose(once.vector.numpy(), [0.3, 1.15], rtol=1e-15)
    np.testing.assert_allclose(once.weights.numpy(), [0.1, 0.25, 0.25, 1 / 600], rtol=1e-15)
    wide = centered_clipping(rows, 1, radius=float("inf"), start=[7.0, 7.0], iterations=1)
    np.testing.assert_allclose(wide.vector.numpy(), rows.mean(axis=0), rtol=1e-15)


def test_centered_clipping_of_points_in_the_majority() -> None:
    rows = np.array([[0.1, 0.2]] * 4 + [[5.0, 5.0], [-HUGE, 3.0], [0.0, 9.0]])
    assert centered_clipping(rows, 3).vector.tolist() == [0.1, 0.2]


@pytest.mark.parametrize(
    "options",
    [
        {"radius": 0.0},
        {"radius": float("nan")},
        {"iterations": 0},
        {"start": [1.0, 2.0, 3.0]},
        {"start": [1.0, float("nan")]},
    ],
)
def test_an_option_out_of_range_is_refused_by_its_name(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        centered_clipping(np.zeros((3, 2)), **options)
