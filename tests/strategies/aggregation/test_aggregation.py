"""Every aggregation rule against its definition, written naively in float64."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

from blackthorn.strategies import aggregation
from blackthorn.strategies.aggregation import (
    Aggregate,
    bucket_matrix,
    bucketing,
    bulyan,
    centered_clipping,
    coordinate_median,
    geometric_median,
    get,
    krum,
    mean,
    mix,
    multi_krum,
    nearest_neighbour_matrix,
    nearest_neighbour_mixing,
    rage,
    trace_back,
    trimmed_mean,
)

HUGE = 1e25
FloatType = type[np.float32] | type[np.float64]
ROBUST = [
    "bulyan",
    "caf",
    "centered-clipping",
    "coordinate-median",
    "geometric-median",
    "krum",
    "mda",
    "mean-around-median",
    "monna",
    "multi-krum",
    "rage",
    "smea",
    "trimmed-mean",
]


def naive_distances(rows: np.ndarray) -> np.ndarray:
    """‖u_i − u_j‖² pair by pair, from differences: nothing cancels."""
    wide = np.asarray(rows, dtype=np.float64)
    result = np.zeros((len(wide), len(wide)))
    for i, j in itertools.combinations(range(len(wide)), 2):
        away = wide[i] - wide[j]
        result[i, j] = result[j, i] = away @ away
    return result


def naive_scores(distances: np.ndarray, num_neighbours: int) -> np.ndarray:
    scores = []
    for i in range(len(distances)):
        others = sorted(distances[i][j] for j in range(len(distances)) if j != i)
        scores.append(math.fsum(others[:num_neighbours]))
    return np.array(scores)


def naive_bulyan(
    rows: np.ndarray, b: int, columns: slice = slice(None)
) -> tuple[set[int], np.ndarray]:
    wide = np.asarray(rows, dtype=np.float64)
    distances = naive_distances(wide)
    left = list(range(len(wide)))
    chosen: list[int] = []
    while len(chosen) < len(wide) - 2 * b:
        scores = naive_scores(distances[np.ix_(left, left)], max(len(left) - b - 2, 1))
        chosen.append(left.pop(int(np.argmin(scores))))
    picked = wide[sorted(chosen)]
    result = []
    for column in picked[:, columns].T:
        median = np.median(column)
        nearest = column[np.argsort(np.abs(column - median), kind="stable")]
        result.append(math.fsum(nearest[: len(chosen) - 2 * b]) / (len(chosen) - 2 * b))
    return set(chosen), np.array(result)


def random_rows(seed: int | list[int], count: int, dim: int, dtype: FloatType) -> np.ndarray:
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((count, dim)) * 10 ** rng.uniform(-3, 3, dim)
    return (rows + rng.standard_normal(dim)).astype(dtype)


def check(
    result: Aggregate, expected: np.ndarray, dtype: FloatType, rtol: float | None = None
) -> None:
    assert result.vector.dtype == torch.from_numpy(np.zeros(0, dtype)).dtype
    rtol = rtol or (1.2e-7 if dtype == np.float32 else 1e-12)
    scale = np.abs(expected).max()
    np.testing.assert_allclose(result.vector.numpy(), expected, rtol=rtol, atol=1e-14 * scale)


@pytest.fixture(params=[np.float32, np.float64], ids=["float32", "float64"])
def dtype(request: pytest.FixtureRequest) -> FloatType:
    return request.param


# The mean.


@pytest.mark.parametrize(("count", "dim"), [(1, 1), (2, 5), (13, 30_001)])
def test_mean(count: int, dim: int, dtype: FloatType) -> None:
    rows = random_rows(0, count, dim, dtype)
    result = mean(rows)
    check(result, rows.astype(np.float64).mean(axis=0), dtype)
    np.testing.assert_allclose(result.weights.numpy(), 1 / count, rtol=1e-15)
    assert result.survivors.all()


def test_weighted_mean(dtype: FloatType) -> None:
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
def test_unusable_weights(weights: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mean(torch.ones(3, 2), weights=weights)


def test_weights_too_large_to_sum() -> None:
    assert mean(torch.eye(2), weights=[1.5e308, 1.5e308]).vector.tolist() == [0.5, 0.5]


# Coordinate-wise rules. 30 001 columns are more than one block at these K.


@pytest.mark.parametrize(("count", "dim"), [(1, 3), (2, 3), (3, 1), (12, 30_001), (25, 30_001)])
def test_coordinate_median(count: int, dim: int, dtype: FloatType) -> None:
    rows = random_rows(2, count, dim, dtype)
    result = coordinate_median(rows, (count - 1) // 2)
    check(result, np.median(rows.astype(np.float64), axis=0), dtype)
    np.testing.assert_allclose(result.weights.numpy(), 1 / count)
    assert result.survivors.all()


@pytest.mark.parametrize(
    ("count", "b", "dim"), [(1, 0, 3), (3, 1, 2), (8, 3, 40), (25, 0, 50), (25, 6, 30_001)]
)
def test_trimmed_mean(count: int, b: int, dim: int, dtype: FloatType) -> None:
    rows = random_rows(3, count, dim, dtype)
    expected = np.sort(rows.astype(np.float64), axis=0)[b : count - b].mean(axis=0)
    check(trimmed_mean(rows, b), expected, dtype)


def test_ties_and_huge_values_in_a_coordinate() -> None:
    rows = np.array([[1.0, HUGE], [1.0, -HUGE], [2.0, 0.5], [1.0, 0.25], [-9.0, 0.5]])
    assert coordinate_median(rows).vector.tolist() == [1.0, 0.5]
    np.testing.assert_allclose(trimmed_mean(rows, 1).vector.numpy(), [1.0, 1.25 / 3], rtol=1e-15)


# Krum, Multi-Krum, Bulyan.


@pytest.mark.parametrize("seed", range(25))
def test_krum_and_multi_krum(seed: int, dtype: FloatType) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(3, 20))
    b = int(rng.integers(0, (count - 3) // 2 + 1))
    rows = random_rows([seed, 1], count, int(rng.integers(1, 40)), dtype)
    order = np.argsort(naive_scores(naive_distances(rows), count - b - 2), kind="stable")
    result = krum(rows, b)
    assert torch.equal(result.vector, torch.from_numpy(rows[order[0]]))
    assert np.flatnonzero(result.weights.numpy()).tolist() == [order[0]]
    for selected, chosen in ((None, count - b - 2), (1, 1), (count - b, count - b)):
        result = multi_krum(rows, b, num_selected=selected)
        assert set(np.flatnonzero(result.survivors.numpy())) == set(order[:chosen])
        check(result, rows[order[:chosen]].astype(np.float64).mean(axis=0), dtype)


def float32_scores(rows: np.ndarray, b: int) -> np.ndarray:
    """Krum as it is often written: float32, squared norms of the rows minus twice the products."""
    products = rows @ rows.T
    squares = (rows * rows).sum(axis=1)
    distances = np.sqrt(np.maximum(squares[:, None] + squares[None, :] - 2 * products, 0))
    return np.sort(distances**2, axis=1)[:, 1 : len(rows) - b - 1].sum(axis=1)


@pytest.mark.parametrize("offset", [0.0, 1.0], ids=["updates", "models"])
def test_krum_finds_the_true_minimiser_of_tiny_updates_200_times_of_200(offset: float) -> None:
    rng = np.random.default_rng(21)
    right = right_in_float32 = 0
    for _ in range(200):
        common = offset * rng.standard_normal(1000)
        rows = (common + 1e-5 * rng.standard_normal((10, 1000))).astype(np.float32)
        best = np.argmin(naive_scores(naive_distances(rows), 6))
        right += int(krum(rows, 2).survivors.numpy()[best])
        right_in_float32 += int(np.argmin(float32_scores(rows, 2)) == best)
    assert right == 200
    if offset:  # the case is one in which a subtraction of float32 norms goes astray
        assert right_in_float32 < 100


@pytest.mark.slow
def test_krum_finds_the_true_minimiser_in_a_million_dimensions() -> None:
    rng = np.random.default_rng(22)
    for offset in (0.0, 1.0, 1.0):
        common = offset * rng.standard_normal(1_000_000, dtype=np.float32)
        rows = common + np.float32(1e-5) * rng.standard_normal((10, 1_000_000), dtype=np.float32)
        best = np.argmin(naive_scores(naive_distances(rows), 6))
        assert krum(rows, 2).survivors.numpy()[best]


def test_krum_of_equal_scores_takes_the_first() -> None:
    rows = np.array([[0.0], [1.0], [0.0], [1.0], [5.0]])
    assert krum(rows, 1).survivors.tolist() == [True, False, False, False, False]
    assert krum(np.ones((5, 3)), 1).vector.tolist() == [1.0] * 3


def test_krum_beside_huge_rows() -> None:
    rows = random_rows(4, 9, 30, np.float32)
    order = np.argsort(naive_scores(naive_distances(rows[:6]), 4), kind="stable")
    rows[6:] = HUGE * np.random.default_rng(4).standard_normal((3, 30))
    assert krum(rows, 3).survivors[order[0]]


@pytest.mark.parametrize("selected", [0, 8])
def test_multi_krum_selects_between_one_row_and_the_honest_number(selected: int) -> None:
    with pytest.raises(ValueError, match=f"between 1 and K - num_corrupt = 7: got {selected}"):
        multi_krum(np.zeros((9, 2)), 2, num_selected=selected)


@pytest.mark.parametrize("seed", range(25))
def test_bulyan(seed: int, dtype: FloatType) -> None:
    rng = np.random.default_rng([seed, 2])
    count = int(rng.integers(3, 24))
    b = int(rng.integers(0, (count - 3) // 4 + 1))
    rows = random_rows([seed, 3], count, int(rng.integers(1, 40)), dtype)
    chosen, expected = naive_bulyan(rows, b)
    result = bulyan(rows, b)
    assert set(np.flatnonzero(result.survivors.numpy())) == chosen
    assert result.iterations == count - 2 * b
    check(result, expected, dtype)


def test_bulyan_over_several_blocks() -> None:
    rows = random_rows(5, 15, 60_001, np.float32)
    some = slice(11, None, 97)  # of all blocks; the naive definition is slow
    expected = naive_bulyan(rows, 3, some)[1]
    np.testing.assert_allclose(bulyan(rows, 3).vector.numpy()[some], expected, rtol=1.2e-7)


def test_bulyan_of_equal_rows_and_beside_huge_ones() -> None:
    np.testing.assert_allclose(bulyan(np.full((7, 3), 0.1), 1).vector.numpy(), 0.1, rtol=1e-15)
    rows = random_rows(6, 11, 5, np.float64)
    rows[[2, 8]] = HUGE
    # The last choices look at one neighbour each and let such twins in: the median keeps them out.
    chosen, expected = naive_bulyan(rows, 2)
    result = bulyan(rows, 2)
    assert chosen & {2, 8}
    check(result, expected, np.float64)
    honest = np.delete(rows, [2, 8], axis=0)
    assert (result.vector.numpy() <= honest.max(axis=0)).all()
    assert (result.vector.numpy() >= honest.min(axis=0)).all()


# The geometric median.


def sum_of_distances(rows: np.ndarray, point: np.ndarray) -> float:
    return np.linalg.norm(np.asarray(rows, dtype=np.float64) - point, axis=1).sum()


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
def test_geometric_median_options(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        geometric_median(np.zeros((3, 2)), **options)


# Centred clipping.


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


@pytest.mark.parametrize("iterations", [1, 3, 10])
@pytest.mark.parametrize("seed", range(4))
def test_centered_clipping(seed: int, iterations: int, dtype: FloatType) -> None:
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


def test_centered_clipping_defaults() -> None:
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
def test_centered_clipping_options(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        centered_clipping(np.zeros((3, 2)), **options)


# Mixing before aggregation.


@pytest.mark.parametrize("seed", range(10))
def test_nearest_neighbour_mixing(seed: int, dtype: FloatType) -> None:
    rng = np.random.default_rng([seed, 7])
    count = int(rng.integers(1, 15))
    b = int(rng.integers(0, (count - 1) // 2 + 1))
    rows = random_rows([seed, 8], count, int(rng.integers(1, 30)), dtype)
    distances = naive_distances(rows)
    mixed = nearest_neighbour_mixing(rows, b).numpy()
    assert mixed.dtype == dtype
    for i in range(count):
        nearest = np.argsort(distances[i], kind="stable")[: count - b]
        expected = rows[nearest].astype(np.float64).mean(axis=0)
        np.testing.assert_allclose(
            mixed[i], expected, rtol=2e-7 if dtype == np.float32 else 1e-11, atol=1e-12
        )


def test_nearest_neighbours_beside_huge_rows() -> None:
    """Honest rows mix among themselves, and no huge row rounds them away."""
    rows = random_rows(10, 9, 30_001, np.float32)
    expected = rows[3:].astype(np.float64).mean(axis=0)
    rows[:3] = HUGE
    mixed = nearest_neighbour_mixing(rows, 3).numpy()
    for row in mixed[3:]:
        np.testing.assert_allclose(row, expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize(("count", "size"), [(10, 1), (10, 2), (10, 3), (10, 10), (1, 1)])
def test_bucketing_partitions_the_rows(count: int, size: int) -> None:
    """Row i carries 2^i: a bucket's sum names its members."""
    rows = np.diag(2.0 ** np.arange(count))
    buckets = bucketing(rows, size, np.random.default_rng(1)).numpy()
    assert len(buckets) == math.ceil(count / size)
    members = [set(np.flatnonzero(bucket)) for bucket in buckets]
    assert sorted(itertools.chain(*members)) == list(range(count))
    assert [len(m) for m in members[:-1]] == [size] * (len(members) - 1)
    for bucket, group in zip(buckets, members, strict=True):
        for i in group:
            assert bucket[i] == pytest.approx(2.0**i / len(group), rel=1e-15)


def test_bucketing_draws_from_its_generator() -> None:
    rows = random_rows(11, 12, 4, np.float64)
    same = [bucketing(rows, 3, np.random.default_rng(5)) for _ in range(2)]
    assert torch.equal(*same)
    generator = np.random.default_rng(5)
    one, two = bucketing(rows, 3, generator), bucketing(rows, 3, generator)
    assert not torch.equal(one, two)
    # A given pair shares a bucket of 3 among 12 rows with probability 2/11: 2000 draws, ± 4 σ.
    together = 0
    for _ in range(2000):
        matrix = bucket_matrix(12, 3, generator)
        together += int(bool((matrix[:, 0] * matrix[:, 7]).sum() > 0))
    assert together / 2000 == pytest.approx(2 / 11, abs=0.035)


@pytest.mark.parametrize("size", [0, 4])
def test_bucket_sizes_out_of_range(size: int) -> None:
    with pytest.raises(ValueError, match=f"between 1 and K = 3: got {size}"):
        bucketing(np.zeros((3, 2)), size, np.random.default_rng(0))


def attacked_rows() -> tuple[np.ndarray, np.ndarray]:
    """16 honest rows around 1 and 4 that send −50 times their mean, one behind the other."""
    rng = np.random.default_rng(12)
    honest = 1 + 0.5 * rng.standard_normal((16, 100))
    rows = np.concatenate([np.tile(-50 * honest.mean(axis=0), (4, 1)), honest])
    return rows.astype(np.float32), honest.mean(axis=0)


@pytest.mark.parametrize("name", ROBUST)
def test_every_robust_rule_holds_where_the_mean_breaks(name: str) -> None:
    rows, honest = attacked_rows()
    plain = mean(rows).vector.numpy()
    robust = get(name)(rows, 4).vector.numpy()
    assert np.linalg.norm(plain - honest) > 100
    assert np.linalg.norm(robust - honest) < 6  # one honest row is 5 away from their mean
    assert not np.allclose(plain, robust)


@pytest.mark.parametrize("name", ROBUST)
def test_every_robust_rule_differs_from_the_mean_without_an_attack(name: str) -> None:
    """A rule that quietly fell back to the mean would pass as long as all rows are honest."""
    rows = random_rows(13, 23, 40, np.float64)
    difference = get(name)(rows, 5).vector.numpy() - rows.mean(axis=0)
    assert np.linalg.norm(difference) > 1e-3 * np.linalg.norm(rows.mean(axis=0))


@pytest.mark.parametrize("name", ROBUST)
def test_every_rule_composes_with_mixing(name: str) -> None:
    rows, honest = attacked_rows()
    matrix = nearest_neighbour_matrix(rows, 4)
    mixed = nearest_neighbour_mixing(rows, 4)
    assert torch.equal(mixed, mix(rows, matrix))
    result = get(name)(mixed, 4)
    assert np.linalg.norm(result.vector.numpy() - honest) < 6
    b = 1
    rows[b:4] = rows[4:7]
    buckets = bucketing(rows, 2, np.random.default_rng(2))
    assert buckets.shape == (10, 100)
    result = get(name)(buckets, b)
    assert np.linalg.norm(result.vector.numpy() - honest) < 6


def test_trace_back_tells_clients_from_mixed_rows() -> None:
    rows, _ = attacked_rows()
    generator = np.random.default_rng(3)
    corrupt = torch.ones(10, dtype=torch.bool)
    while (
        corrupt.sum() > 3
    ):  # until two of the four corrupt rows share a bucket: RAGE needs b < K/3
        matrix = bucket_matrix(20, 2, generator)
        corrupt = (matrix[:, :4] > 0).any(dim=1)
    b = int(corrupt.sum())
    inner = rage(mix(rows, matrix), b)
    assert torch.equal(inner.survivors, ~corrupt)
    outer = trace_back(inner, matrix)
    expected = [not corrupt[(matrix[:, i] > 0).nonzero()].item() for i in range(20)]
    assert outer.survivors.tolist() == expected
    average = trace_back(multi_krum(mix(rows, matrix), b), matrix)
    assert float(average.weights.sum()) == pytest.approx(1.0)
    np.testing.assert_allclose(
        average.weights.numpy() @ rows.astype(np.float64), average.vector.numpy(), rtol=1e-5
    )


# What all rules share.


@pytest.mark.parametrize(
    ("name", "count", "most"),
    [
        ("bulyan", 11, 2),
        ("bulyan", 14, 2),
        ("caf", 9, 4),
        ("centered-clipping", 10, 4),
        ("coordinate-median", 9, 4),
        ("coordinate-median", 10, 4),
        ("geometric-median", 9, 4),
        ("krum", 9, 3),
        ("krum", 10, 3),
        ("mda", 10, 4),
        ("mean-around-median", 9, 4),
        ("monna", 10, 4),
        ("multi-krum", 9, 3),
        ("rage", 9, 2),
        ("rage", 10, 3),
        ("smea", 9, 4),
        ("trimmed-mean", 9, 4),
        ("trimmed-mean", 10, 4),
    ],
)
def test_the_largest_number_of_corrupt_rows(name: str, count: int, most: int) -> None:
    rows = random_rows(14, count, 6, np.float64)
    get(name)(rows, most)
    with pytest.raises(ValueError, match=rf"{name} needs .*got num_corrupt = {most + 1}"):
        get(name)(rows, most + 1)
    with pytest.raises(ValueError, match="num_corrupt must be an integer of at least 0: got -1"):
        get(name)(rows, -1)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", ["krum", "multi-krum", "bulyan"])
def test_rules_that_need_three_rows(name: str, count: int) -> None:
    with pytest.raises(ValueError, match="K is too small for any"):
        get(name)(np.zeros((count, 2)), 0)


def test_mixing_refuses_a_majority() -> None:
    with pytest.raises(ValueError, match="num_corrupt < K/2"):
        nearest_neighbour_mixing(np.zeros((4, 2)), 2)


@pytest.mark.parametrize("name", sorted(aggregation.RULES))
def test_shared_behaviour(name: str, dtype: FloatType) -> None:
    rows = torch.from_numpy(random_rows(15, 11, 17, dtype))
    before = rows.clone()
    result = get(name)(rows, 2)
    assert torch.equal(rows, before)
    assert result.vector.dtype == rows.dtype
    assert result.vector.shape == (17,)
    assert result.weights.dtype == torch.float64
    assert result.survivors.dtype == torch.bool
    assert result.weights.shape == result.survivors.shape == (11,)
    assert torch.equal(result.survivors, result.weights > 0)
    assert result.vector.data_ptr() != rows.data_ptr()
    # The same rows as a numpy array, and read through other strides.
    assert torch.equal(get(name)(rows.numpy(), 2).vector, result.vector)
    assert torch.equal(get(name)(rows.T.contiguous().T, 2).vector, result.vector)


@pytest.mark.parametrize("name", sorted(aggregation.RULES))
@pytest.mark.parametrize("value", [0.0, 0.1, -1e25])
def test_equal_rows_give_that_row(name: str, value: float) -> None:
    rows = torch.full((11, 5), value)
    assert torch.equal(get(name)(rows, 2).vector, rows[0])


@pytest.mark.parametrize("name", sorted(aggregation.RULES))
def test_unusable_updates(name: str) -> None:
    rule = get(name)
    with pytest.raises(ValueError, match="no updates to aggregate: got K = 0"):
        rule(torch.zeros(0, 3), 0)
    with pytest.raises(ValueError, match=r"shape \[K, d\], d >= 1: got \[3\]"):
        rule(torch.zeros(3), 0)
    with pytest.raises(ValueError, match="float32 or float64"):
        rule(torch.zeros(3, 3, dtype=torch.int64), 0)
    for bad in (float("nan"), float("inf"), -1e150):
        rows = torch.zeros(3, 3, dtype=torch.float64)
        rows[2, 0] = bad
        with pytest.raises(ValueError, match="row 2 is not"):
            rule(rows, 0)


def test_get_by_name() -> None:
    for name in ROBUST:
        assert get(name) is getattr(aggregation, name.replace("-", "_"))
    rows = random_rows(16, 5, 3, np.float64)
    assert torch.equal(get("mean")(rows, 2).vector, mean(rows).vector)
    weighted = get("mean")(rows, weights=[1, 0, 0, 0, 0])
    np.testing.assert_allclose(weighted.vector.numpy(), rows[0])
    names = "bulyan, caf, centered-clipping, coordinate-median, geometric-median, krum, mda, "
    with pytest.raises(ValueError, match=f"must be one of {names}.*got 'medain'"):
        get("medain")
