"""The rules against byzfl's, where both mean the same.

byzfl's Krum adds up the distances to n − f − 1 neighbours where Blanchard et al. (and ours) take
n − f − 2, and its Multi-Krum averages n − f rows: both coincide with ours at f = b + 1.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from byzfl import (
    NNM,
    Average,
    Bucketing,
    CenteredClipping,
    GeometricMedian,
    Krum,
    Median,
    MultiKrum,
    TrMean,
)

from blackthorn.strategies import aggregation
from blackthorn.strategies.aggregation import Buckets

Rows = np.ndarray


def honest(rng: np.random.Generator, count: int, dim: int) -> Rows:
    return rng.standard_normal((count, dim)) + 2 * rng.standard_normal(dim)


def with_attackers(rng: np.random.Generator, count: int, dim: int) -> Rows:
    rows = honest(rng, count, dim)
    rows[: count // 5] = -50 * rows.mean(axis=0)
    return rows


def with_twins(rng: np.random.Generator, count: int, dim: int) -> Rows:
    """Equal rows, and equal values in single coordinates."""
    rows = np.round(honest(rng, count, dim), 1)
    rows[1] = rows[0]
    return rows


def of_all_sizes(rng: np.random.Generator, count: int, dim: int) -> Rows:
    return honest(rng, count, dim) * 10.0 ** rng.uniform(-4, 4, (count, 1))


MATRICES = (honest, with_attackers, with_twins, of_all_sizes)


@pytest.fixture(params=[(make, seed) for make in MATRICES for seed in range(5)],
                ids=lambda case: f"{case[0].__name__}-{case[1]}")  # fmt: skip
def rows(request: pytest.FixtureRequest) -> Rows:
    make: Callable[..., Rows] = request.param[0]
    rng = np.random.default_rng([request.param[1], 31])
    return make(rng, int(rng.integers(9, 26)), int(rng.integers(1, 60)))


def corrupt(rows: Rows) -> int:
    return (len(rows) - 3) // 3


def agree(ours: Any, theirs: Rows, rtol: float = 1e-9) -> None:
    scale = max(1.0, float(np.abs(theirs).max()))
    np.testing.assert_allclose(np.asarray(ours), theirs, rtol=rtol, atol=rtol * scale)


def test_the_mean_is_byzfls(rows: Rows) -> None:
    agree(aggregation.mean(rows).vector, Average()(rows))


def test_the_median_is_byzfls(rows: Rows) -> None:
    agree(aggregation.coordinate_median(rows).vector, Median()(rows))


def test_the_trimmed_mean_is_byzfls(rows: Rows) -> None:
    for b in (0, 1, corrupt(rows)):
        agree(aggregation.trimmed_mean(rows, b).vector, TrMean(f=b)(rows))


def test_the_geometric_median_is_byzfls(rows: Rows) -> None:
    # Both smooth where a row is the median itself: there the answers are a hair apart.
    theirs = GeometricMedian(nu=1e-9, T=3000)(rows)
    ours = aggregation.geometric_median(rows).vector.numpy()

    def cost(point: Rows) -> float:
        return float(np.linalg.norm(rows - point, axis=1).sum())

    assert cost(ours) <= cost(theirs) * (1 + 1e-6)
    assert cost(theirs) <= cost(ours) * (1 + 1e-3)


@pytest.mark.parametrize("seed", range(10))
def test_geometric_median_in_general_position(seed: int) -> None:
    rows = honest(np.random.default_rng([seed, 32]), 12, 20)
    agree(aggregation.geometric_median(rows).vector, GeometricMedian(nu=1e-9, T=3000)(rows), 1e-6)


def test_krum_is_byzfls(rows: Rows) -> None:
    for b in (0, 1, corrupt(rows)):
        agree(aggregation.krum(rows, b).vector, Krum(f=b + 1)(rows))


def test_multi_krum_is_byzfls(rows: Rows) -> None:
    for b in (0, 1, corrupt(rows)):
        ours = aggregation.multi_krum(rows, b, num_selected=len(rows) - b - 1).vector
        agree(ours, MultiKrum(f=b + 1)(rows))


@pytest.mark.parametrize("iterations", [1, 3, 10])
def test_centered_clipping_is_byzfls(rows: Rows, iterations: int) -> None:
    for radius in (0.1, 3.0, 1e6):
        ours = aggregation.centered_clipping(
            rows, radius=radius, start=np.zeros(rows.shape[1]), iterations=iterations
        ).vector
        agree(ours, CenteredClipping(L=iterations, tau=radius)(rows))


def test_nearest_neighbour_mixing_is_byzfls(rows: Rows) -> None:
    for b in (0, 1, corrupt(rows)):
        agree(aggregation.mix(rows, aggregation.nearest_neighbours(rows, b)), NNM(f=b)(rows))


def test_bucketing_by_one_and_by_all(rows: Rows) -> None:
    """Other sizes draw: byzfl from the global generator, ours from the one it is given."""
    generator = np.random.default_rng(0)
    one = aggregation.mix(rows, Buckets(1)(rows, 0, generator)).numpy()
    theirs = Bucketing(s=1)(rows)
    agree(one[np.lexsort(one.T)], theirs[np.lexsort(theirs.T)])
    whole = Buckets(len(rows))(rows, 0, generator)
    agree(aggregation.mix(rows, whole), Bucketing(s=len(rows))(rows))


def test_a_rule_after_a_mixing(rows: Rows) -> None:
    b = corrupt(rows)
    mixed = aggregation.mix(rows, aggregation.nearest_neighbours(rows, b))
    agree(aggregation.trimmed_mean(mixed, b).vector, TrMean(f=b)(NNM(f=b)(rows)))
