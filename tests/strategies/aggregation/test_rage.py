"""RAGE against Algorithm 2 as it stands: the d×d covariance and its eigendecomposition."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from rule_checks import HUGE, distance, spread_rows

from blackthorn.strategies.aggregation import rage

# rows(generator, K, d, b) -> [K, d]
Rows = Callable[[np.random.Generator, int, int, int], np.ndarray]


@dataclass
class Naive:
    survivors: np.ndarray
    weights: np.ndarray
    result: np.ndarray
    iterations: int
    decided: bool  # every decision on the way was far from a tie that rounding could turn


def naive_rage(
    rows: np.ndarray, b: int, *, stop: str = "count", average: str = "uniform", bound: float = 0.0
) -> Naive:
    """Algorithm 2 in d dimensions, float64, with the stop rules of Appendix F.

    Which weight becomes zero is a decision: with λ1 close to λ2 the eigenvector, and with a
    weight close to the threshold of 1e-6/K the survivor, depends on the last bits in any
    implementation. Such cases are marked (`decided` false) and not compared.
    """
    g = np.asarray(rows, dtype=np.float64)
    count = len(g)
    w = np.full(count, 1 / count)
    iterations, decided = 0, True
    while True:
        zeros = np.count_nonzero(w == 0)
        if (stop == "count" and zeros >= b) or (stop == "appendix-f" and zeros > b):
            break
        share = w / w.sum()
        alive = w > 0
        # Rows of weight 0 are left out of the sums: 0 · 1e25 is 0 only without rounding.
        mu = share[alive] @ g[alive]
        away = g - mu
        sigma = (away[alive] * share[alive, None]).T @ away[alive]
        eigenvalues, vectors = np.linalg.eigh(sigma)
        largest = eigenvalues[-1]
        scale = (g[alive] ** 2).sum(axis=1).max()
        if largest <= 1e-20 * scale or (stop == "spectral" and largest <= bound):
            break
        if stop == "spectral":
            decided &= largest > 1.001 * bound
        if len(eigenvalues) > 1:
            decided &= eigenvalues[-2] < (1 - 1e-4) * largest
        tau = (away @ vectors[:, -1]) ** 2
        new = np.where(alive, (1 - tau / tau[alive].max()) * w, 0.0)
        decided &= not ((new > 1e-9 / count) & (new < 1e-4 / count)).any()
        new[new < 1e-6 / count] = 0.0
        if not new.any():
            break
        w = new
        iterations += 1
    survivors = w > 0
    averaging = w if average == "weighted" else survivors.astype(float)
    result = averaging[survivors] @ g[survivors] / averaging.sum()
    return Naive(survivors, w, result, iterations, bool(decided))


def shifted(rng: np.random.Generator, count: int, dim: int, b: int) -> np.ndarray:
    rows = spread_rows(rng, count, dim)
    rows[:b] += rng.uniform(0.5, 30) * rng.standard_normal(dim)
    return rows


def honest_only(
    rng: np.random.Generator,
    count: int,
    dim: int,
    b: int,  # noqa: ARG001 (all cases have these arguments)
) -> np.ndarray:
    return spread_rows(rng, count, dim)


def tied_outliers(rng: np.random.Generator, count: int, dim: int, b: int) -> np.ndarray:
    rows = spread_rows(rng, count, dim)
    rows[:b] = 20 * rng.standard_normal(dim)
    return rows


def clusters(rng: np.random.Generator, count: int, dim: int, b: int) -> np.ndarray:
    """The rows stand on two points, b (at least one) of them on the second."""
    rows = np.tile(rng.standard_normal(dim), (count, 1))
    rows[: max(b, 1)] += rng.standard_normal(dim)
    return rows


def zero_rows(rng: np.random.Generator, count: int, dim: int, b: int) -> np.ndarray:
    rows = spread_rows(rng, count, dim)
    rows[rng.integers(count)] = 0
    rows[:b] = 0
    return rows


def huge_rows(rng: np.random.Generator, count: int, dim: int, b: int) -> np.ndarray:
    rows = spread_rows(rng, count, dim)
    rows[:b] = HUGE * rng.standard_normal((b, dim))
    return rows


def huge_tied_rows(rng: np.random.Generator, count: int, dim: int, b: int) -> np.ndarray:
    rows = spread_rows(rng, count, dim)
    rows[:b] = HUGE * rng.standard_normal(dim)
    return rows


def huge_and_moderate_rows(rng: np.random.Generator, count: int, dim: int, b: int) -> np.ndarray:
    rows = shifted(rng, count, dim, b)
    rows[: b // 2] = HUGE * rng.standard_normal((b // 2, dim))
    return rows


KINDS: list[Rows] = [
    shifted,
    honest_only,
    tied_outliers,
    clusters,
    zero_rows,
    huge_rows,
    huge_tied_rows,
    huge_and_moderate_rows,
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stop", ["count", "appendix-f", "spectral"])
def test_random_cases_agree_with_algorithm_2(kind: Rows, stop: str) -> None:
    """40 cases of each kind and stop rule, 960 in all; few may be too close to call."""
    rng = np.random.default_rng([KINDS.index(kind), len(stop)])
    compared = 0
    for case in range(40):
        count = int(rng.integers(1, 7)) if case % 4 == 0 else int(rng.integers(4, 25))
        dim = int(rng.integers(1, 30))
        b = int(rng.integers(0, (count - 1) // 3 + 1))
        dtype = np.float32 if case % 2 else np.float64
        rows = rng.permutation(kind(rng, count, dim, b)).astype(dtype)
        average = "weighted" if case % 3 == 0 else "uniform"
        sigma0_squared = 10 ** rng.uniform(-2, 0.5) if stop == "spectral" else None
        bound = 11 * (sigma0_squared or 0.0)
        expected = naive_rage(rows, b, stop=stop, average=average, bound=bound)
        if not expected.decided:
            continue
        compared += 1
        actual = rage(rows, b, stop=stop, average=average, sigma0_squared=sigma0_squared)
        label = f"case {case}: K = {count}, d = {dim}, b = {b}, {average}"
        assert actual.survivors.tolist() == expected.survivors.tolist(), label
        assert actual.iterations == expected.iterations, label
        np.testing.assert_allclose(
            actual.weights.numpy(), expected.weights, rtol=1e-6, atol=1e-9 / count, err_msg=label
        )
        assert distance(actual.vector, expected.result) < 1e-6, label
    assert compared >= 35


@pytest.mark.parametrize("seed", range(3))
def test_more_coordinates_than_a_block(seed: int) -> None:
    """The Gram matrix is summed over blocks of columns; the oracle sees only the row space."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((12, 40_000)).astype(np.float32)
    rows[:3] += 0.05 * rng.standard_normal((3, 40_000)).astype(np.float32) + 0.03
    # An orthonormal basis of the rows keeps their geometry: 12 coordinates instead of 40 000.
    basis, _ = np.linalg.qr(rows.T.astype(np.float64))
    expected = naive_rage(rows @ basis, 3)
    actual = rage(rows, 3)
    assert expected.decided
    assert actual.survivors.tolist() == expected.survivors.tolist()
    np.testing.assert_allclose(actual.weights.numpy(), expected.weights, rtol=1e-6)
    expected_mean = rows[expected.survivors].astype(np.float64).mean(axis=0)
    assert distance(actual.vector, expected_mean) < 1e-6


def test_it_removes_what_ruins_the_mean() -> None:
    rng = np.random.default_rng(0)
    honest = rng.standard_normal((15, 200)) + 1
    attack = np.tile(-50 * honest.mean(axis=0), (5, 1))
    rows = np.concatenate([attack, honest])
    result = rage(rows, 5)
    assert result.survivors.tolist() == [False] * 5 + [True] * 15
    np.testing.assert_allclose(result.vector.numpy(), honest.mean(axis=0), rtol=1e-12)
    assert np.linalg.norm(rows.mean(axis=0) - honest.mean(axis=0)) > 100


# Stop rules, averages.


def line_rows() -> np.ndarray:
    """Nine rows on a line, with distinct distances from their centre."""
    return np.array([[0.0], [0.1], [0.25], [0.3], [0.5], [0.62], [7.0], [13.0], [30.0]])


@pytest.mark.parametrize("b", [0, 1, 2])
def test_count_removes_b_and_appendix_f_one_more(b: int) -> None:
    rows = line_rows()
    count = rage(rows, b)
    assert np.flatnonzero(~count.survivors.numpy()).tolist() == list(range(9 - b, 9))
    assert count.iterations == b
    more = rage(rows, b, stop="appendix-f")
    assert np.flatnonzero(~more.survivors.numpy()).tolist() == list(range(8 - b, 9))
    assert more.iterations == b + 1


def test_no_corrupt_rows_is_the_plain_mean() -> None:
    rows = line_rows()
    result = rage(rows, 0)
    assert result.iterations == 0
    np.testing.assert_allclose(result.vector.numpy(), rows.mean(axis=0), rtol=1e-15)
    np.testing.assert_allclose(result.weights.numpy(), 1 / 9, rtol=1e-15)


def test_spectral_stops_at_the_bound() -> None:
    """With w uniform the largest eigenvalue of 1-d rows is their variance."""
    rows = line_rows()
    first = rows.var()
    assert rage(rows, 2, stop="spectral", sigma0_squared=first / 10.99).iterations == 0
    once = rage(rows, 2, stop="spectral", sigma0_squared=first / 11.01)
    assert once.iterations == 1
    assert np.flatnonzero(~once.survivors.numpy()).tolist() == [8]
    # A larger constant makes the same bound of a smaller σ0².
    wide = rage(rows, 2, stop="spectral", sigma0_squared=first / 21.98, spectral_constant=22.0)
    assert wide.iterations == 0
    # The bound, not b, decides how many go.
    tight = rage(rows, 0, stop="spectral", sigma0_squared=0.3 / 11)
    assert np.flatnonzero(~tight.survivors.numpy()).tolist() == [6, 7, 8]


def test_spectral_goes_on_until_a_single_point_is_left() -> None:
    """Algorithm 2 with σ0² → 0 ends with equal rows, or with rows that tie."""
    result = rage(line_rows(), 2, stop="spectral", sigma0_squared=1e-9)
    kept = line_rows()[result.survivors.numpy()]
    assert 1 <= len(kept) <= 2


def test_both_averages_of_four_rows_are_those_by_hand() -> None:
    rows = np.array([[0.0], [1.0], [2.0], [9.0]])
    # μ = 3, τ = 9, 4, 1, 36: weights (27, 32, 35, 0) / 144.
    uniform = rage(rows, 1)
    weighted = rage(rows, 1, average="weighted")
    np.testing.assert_allclose(uniform.vector.numpy(), [1.0], rtol=1e-14)
    np.testing.assert_allclose(weighted.vector.numpy(), [(32 + 70) / 94], rtol=1e-14)
    for result in (uniform, weighted):
        np.testing.assert_allclose(
            result.weights.numpy(), np.array([27, 32, 35, 0]) / 144, rtol=1e-13
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop": "never"}, "stop = 'never' is not allowed: count, appendix-f, spectral"),
        ({"average": "median"}, "average must be one of uniform, weighted: got 'median'"),
        ({"stop": "spectral"}, "needs sigma0_squared > 0: got None"),
        ({"stop": "spectral", "sigma0_squared": 0.0}, "sigma0_squared > 0: got 0.0"),
        ({"stop": "spectral", "sigma0_squared": float("nan")}, "sigma0_squared > 0: got nan"),
        ({"sigma0_squared": 1.0}, "only used by stop = 'spectral'"),
        (
            {"stop": "spectral", "sigma0_squared": 1.0, "spectral_constant": 10.0},
            "spectral_constant must be at least 11: got 10.0",
        ),
        ({"coordinates": 0}, "coordinates must be at least 1: got 0"),
        ({"coordinates": 1}, "needs a generator"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rage(np.zeros((9, 2)), 2, **options)


# Coordinates.


def half_poisoned(rng: np.random.Generator) -> np.ndarray:
    """Row 0 differs from the others in the first half of its coordinates only."""
    rows = 1e-3 * rng.standard_normal((10, 60))
    rows[0, :30] += 10.0
    return rows


def test_the_filter_sees_only_the_drawn_coordinates() -> None:
    """One coordinate finds row 0 when it is one of the poisoned half: in about half the draws.
    (Drawn otherwise, it removes row 0 by chance, 1 in 10.) 400 draws: 55 % ± 4 σ = 10 %."""
    rng = np.random.default_rng(3)
    rows = half_poisoned(rng)
    found = 0
    for _ in range(400):
        result = rage(rows, 1, coordinates=1, generator=rng)
        survivors = result.survivors.numpy()
        assert survivors.sum() == 9
        np.testing.assert_allclose(
            result.vector.numpy(), rows[survivors].mean(axis=0), rtol=1e-9, atol=1e-15
        )
        found += not survivors[0]
    assert 0.45 < found / 400 < 0.65


def test_coordinates_are_drawn_without_replacement() -> None:
    """Any 59 of 60 coordinates contain one of two poisoned; with replacement 1 in 7 would not."""
    rng = np.random.default_rng(4)
    rows = 1e-3 * rng.standard_normal((10, 60))
    rows[0, [20, 40]] += 10.0
    for _ in range(100):
        assert not rage(rows, 1, coordinates=59, generator=rng).survivors[0]


def test_coordinates_come_from_the_generator_alone() -> None:
    rows = np.random.default_rng(5).standard_normal((20, 500))
    one = rage(rows, 6, coordinates=16, generator=np.random.default_rng(8))
    same = rage(rows, 6, coordinates=16, generator=np.random.default_rng(8))
    assert torch.equal(one.survivors, same.survivors)
    generator = np.random.default_rng(8)
    draws = [
        tuple(rage(rows, 6, coordinates=16, generator=generator).survivors.tolist())
        for _ in range(6)
    ]
    assert len(set(draws)) > 1


@pytest.mark.parametrize("coordinates", [60, 1024])
def test_all_coordinates_are_the_exact_filter_and_draw_nothing(coordinates: int) -> None:
    rows = half_poisoned(np.random.default_rng(6))
    generator = np.random.default_rng(9)
    before = generator.bit_generator.state
    result = rage(rows, 3, coordinates=coordinates, generator=generator)
    assert generator.bit_generator.state == before
    exact = rage(rows, 3)
    assert torch.equal(result.survivors, exact.survivors)
    assert torch.equal(result.vector, exact.vector)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_types_and_shapes_of_the_result(dtype: torch.dtype) -> None:
    rows = torch.from_numpy(spread_rows(np.random.default_rng(1), 9, 5)).to(dtype)
    before = rows.clone()
    result = rage(rows, 2)
    assert torch.equal(rows, before)
    assert result.vector.dtype == dtype
    assert result.vector.shape == (5,)
    assert result.weights.dtype == torch.float64
    assert result.survivors.dtype == torch.bool
    assert result.weights.shape == result.survivors.shape == (9,)


def test_huge_rows_in_the_majority_leave_the_others_exact() -> None:
    """More rows are huge than the median can bear: without a new Gram matrix of the survivors
    the rows of size 1, and the one of size 100 among them, drown in the rounding of 1e25."""
    rng = np.random.default_rng(6)
    small = 0.1 * rng.standard_normal((6, 20))
    small[0, 12] = 100.0
    huge = HUGE * np.diag(np.arange(1.0, 9.0)) @ np.eye(8, 20)
    huge[:, 8:] = HUGE / 100
    rows = np.concatenate([huge, small])
    expected = naive_rage(rows, 3, stop="spectral", bound=11.0)
    assert expected.decided
    assert expected.survivors.tolist() == [False] * 9 + [True] * 5
    result = rage(rows, 3, stop="spectral", sigma0_squared=1.0)
    assert result.survivors.tolist() == expected.survivors.tolist()
    np.testing.assert_allclose(result.vector.numpy(), small[1:].mean(axis=0), rtol=1e-12)
