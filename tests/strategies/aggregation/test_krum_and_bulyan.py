"""Krum, Multi-Krum and Bulyan against their definitions, written naively in float64."""

import math

import numpy as np
import pytest
import torch
from rule_checks import (
    BOTH_DTYPES,
    HUGE,
    FloatType,
    check,
    naive_distances,
    naive_scores,
    random_rows,
)

from blackthorn.strategies.aggregation import (
    bulyan,
    krum,
    multi_krum,
)


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


@BOTH_DTYPES
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


@BOTH_DTYPES
@pytest.mark.parametrize("seed", range(25))
def test_bulyan_is_the_papers_algorithm_written_naively(seed: int, dtype: FloatType) -> None:
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
