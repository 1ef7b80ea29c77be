"""Mixing before aggregation: nearest neighbours and buckets."""

import itertools
import math

import numpy as np
import pytest
import torch
from rule_checks import (
    BOTH_DTYPES,
    HUGE,
    FloatType,
    attacked_rows,
    naive_distances,
    random_rows,
)

from blackthorn.strategies.aggregation import (
    Buckets,
    mix,
    multi_krum,
    nearest_neighbours,
    rage,
    trace_back,
)


@BOTH_DTYPES
@pytest.mark.parametrize("seed", range(10))
def test_mixing_averages_every_rows_nearest_neighbours(seed: int, dtype: FloatType) -> None:
    rng = np.random.default_rng([seed, 7])
    count = int(rng.integers(1, 15))
    b = int(rng.integers(0, (count - 1) // 2 + 1))
    rows = random_rows([seed, 8], count, int(rng.integers(1, 30)), dtype)
    distances = naive_distances(rows)
    mixed = mix(rows, nearest_neighbours(rows, b)).numpy()
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
    mixed = mix(rows, nearest_neighbours(rows, 3)).numpy()
    for row in mixed[3:]:
        np.testing.assert_allclose(row, expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize(("count", "size"), [(10, 1), (10, 2), (10, 3), (10, 10), (1, 1)])
def test_bucketing_partitions_the_rows(count: int, size: int) -> None:
    """Row i carries 2^i: a bucket's sum names its members."""
    rows = np.diag(2.0 ** np.arange(count))
    buckets = mix(rows, Buckets(size)(rows, 0, np.random.default_rng(1))).numpy()
    assert len(buckets) == math.ceil(count / size)
    members = [set(np.flatnonzero(bucket)) for bucket in buckets]
    assert sorted(itertools.chain(*members)) == list(range(count))
    assert [len(m) for m in members[:-1]] == [size] * (len(members) - 1)
    for bucket, group in zip(buckets, members, strict=True):
        for i in group:
            assert bucket[i] == pytest.approx(2.0**i / len(group), rel=1e-15)


def test_bucketing_draws_from_its_generator() -> None:
    rows = random_rows(11, 12, 4, np.float64)
    same = [Buckets(3)(rows, 0, np.random.default_rng(5)) for _ in range(2)]
    assert torch.equal(*same)
    generator = np.random.default_rng(5)
    one, two = (Buckets(3)(rows, 0, generator) for _ in range(2))
    assert not torch.equal(one, two)
    # A given pair shares a bucket of 3 among 12 rows with probability 2/11: 2000 draws, ± 4 σ.
    together = 0
    for _ in range(2000):
        matrix = Buckets(3)(range(12), 0, generator)
        together += int(bool((matrix[:, 0] * matrix[:, 7]).sum() > 0))
    assert together / 2000 == pytest.approx(2 / 11, abs=0.035)


def test_trace_back_tells_clients_from_mixed_rows() -> None:
    rows, _ = attacked_rows()
    generator = np.random.default_rng(3)
    corrupt = torch.ones(10, dtype=torch.bool)
    while (
        corrupt.sum() > 3
    ):  # until two of the four corrupt rows share a bucket: RAGE needs b < K/3
        matrix = Buckets(2)(rows, 0, generator)
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


def test_mixing_refuses_a_majority() -> None:
    with pytest.raises(ValueError, match="num_corrupt < K/2"):
        nearest_neighbours(np.zeros((4, 2)), 2)
