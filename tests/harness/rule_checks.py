"""Aggregation rules against their definitions, written naively in float64."""

import itertools
import math

import numpy as np
import pytest
import torch

from blackthorn.strategies.aggregation import (
    Aggregate,
)

HUGE = 1e25

FloatType = type[np.float32] | type[np.float64]


def naive_distances(rows: np.ndarray) -> np.ndarray:
    """‖u_i − u_j‖² pair by pair, from differences: nothing cancels."""
    wide = np.asarray(rows, dtype=np.float64)
    result = np.zeros((len(wide), len(wide)))
    for i, j in itertools.combinations(range(len(wide)), 2):
        away = wide[i] - wide[j]
        result[i, j] = result[j, i] = away @ away
    return result


def naive_scores(distances: np.ndarray, num_neighbours: int) -> np.ndarray:
    """Krum's: the sum of every row's smallest `num_neighbours` distances to others."""
    scores = []
    for i in range(len(distances)):
        others = sorted(distances[i][j] for j in range(len(distances)) if j != i)
        scores.append(math.fsum(others[:num_neighbours]))
    return np.array(scores)


def random_rows(seed: int | list[int], count: int, dim: int, dtype: FloatType) -> np.ndarray:
    """Rows [count, dim] around a common vector, columns of sizes from 1e-3 to 1e3."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((count, dim)) * 10 ** rng.uniform(-3, 3, dim)
    return (rows + rng.standard_normal(dim)).astype(dtype)


def check(
    result: Aggregate, expected: np.ndarray, dtype: FloatType, rtol: float | None = None
) -> None:
    """The result has the rows' dtype, and is `expected` up to its rounding."""
    assert result.vector.dtype == torch.from_numpy(np.zeros(0, dtype)).dtype
    rtol = rtol or (1.2e-7 if dtype == np.float32 else 1e-12)
    scale = np.abs(expected).max()
    np.testing.assert_allclose(result.vector.numpy(), expected, rtol=rtol, atol=1e-14 * scale)


BOTH_DTYPES = pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["float32", "float64"])


def attacked_rows() -> tuple[np.ndarray, np.ndarray]:
    """16 honest rows around 1 and 4 that send −50 times their mean, one behind the other."""
    rng = np.random.default_rng(12)
    honest = 1 + 0.5 * rng.standard_normal((16, 100))
    rows = np.concatenate([np.tile(-50 * honest.mean(axis=0), (4, 1)), honest])
    return rows.astype(np.float32), honest.mean(axis=0)


def distance(a: torch.Tensor, b: np.ndarray) -> float:
    """‖a − b‖ as a share of ‖b‖."""
    scale = max(np.linalg.norm(b), np.finfo(np.float64).tiny)
    return float(np.linalg.norm(np.asarray(a, dtype=np.float64) - b) / scale)


def spread_rows(rng: np.random.Generator, count: int, dim: int) -> np.ndarray:
    """Honest rows of different lengths in different directions, around a common vector."""
    return rng.standard_normal((count, dim)) * rng.uniform(0.2, 3, dim) + rng.standard_normal(dim)
