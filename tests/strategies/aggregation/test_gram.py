"""The fast Gram product: as good as the exact one where it answers, silent where it is not."""

import tracemalloc

import numpy as np
import pytest
import torch

from blackthorn.strategies.aggregation import Rule, aggregate, bulyan, krum, multi_krum, rage
from blackthorn.strategies.aggregation.gram import (
    centred_gram_matrix,
    gram_matrix,
    plain_gram_matrix,
    squared_distances,
)

K, D = 30, 50_000


def gaussian(seed: int = 0, *, common: float = 1.0, size: float = 1.0) -> np.ndarray:
    """Rows [K, D] that share a vector `common` times as long as what tells them apart."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((K, D)) + common * rng.standard_normal(D)
    return (size * rows).astype(np.float32)


def exact_products(rows: np.ndarray) -> np.ndarray:
    wide = rows.astype(np.float64)
    return wide @ wide.T


@pytest.mark.parametrize("size", [1e-12, 1.0, 1e12])
@pytest.mark.parametrize("heavy_tails", [False, True])
@pytest.mark.parametrize("signs", [False, True])
def test_rounding_is_a_millionth_of_the_rows_lengths(
    size: float, heavy_tails: bool, signs: bool
) -> None:
    rows = gaussian(size=size)
    if heavy_tails:
        rows *= np.random.default_rng(1).standard_cauchy((K, D)).astype(np.float32)
    rows = rows if signs else np.abs(rows)
    gram = plain_gram_matrix(torch.from_numpy(rows))
    exact = exact_products(rows)
    lengths = np.sqrt(np.diag(exact))
    assert gram is not None
    assert (np.abs(gram - exact) / np.outer(lengths, lengths)).max() < 1e-6


def test_columns_beyond_the_last_full_panel_and_chosen_rows_count() -> None:
    rows = np.zeros((9, 200_001), dtype=np.float32)
    rng = np.random.default_rng(2)
    rows[:, -3000:] = rng.standard_normal((9, 3000))
    chosen = np.array([8, 1, 5, 2])
    gram = plain_gram_matrix(torch.from_numpy(rows), chosen)
    assert gram is not None
    np.testing.assert_allclose(gram, exact_products(rows)[np.ix_(chosen, chosen)], atol=1e-2)


@pytest.mark.parametrize("common", [30.0, 1e5])
def test_what_all_rows_share_is_no_cause_of_rounding(common: float) -> None:
    """Distances beside a common vector 30 or 1e5 times as long: only the exact product has them."""
    rows = gaussian(common=common)
    assert plain_gram_matrix(torch.from_numpy(rows)) is None
    distances = squared_distances(gram_matrix(torch.from_numpy(rows)))
    wide = rows.astype(np.float64)
    expected = ((wide[:, None, :1000] - wide[None, :, :1000]) ** 2).sum(axis=2)
    few = squared_distances(gram_matrix(torch.from_numpy(rows[:, :1000].copy())))
    np.testing.assert_allclose(few, expected, rtol=1e-9)
    assert np.isfinite(distances).all()


@pytest.mark.parametrize("spoil", ["overflow", "underflow", "equal", "one number away"])
def test_rows_that_float32_products_cannot_tell_apart_are_left_to_the_exact_matrix(
    spoil: str,
) -> None:
    rows = gaussian()
    if spoil == "overflow":
        rows[3] *= np.float32(1e25)
    elif spoil == "underflow":
        rows *= np.float32(1e-21)
    else:
        rows[:] = rows[0]
        if spoil == "one number away":
            rows[:, 7] += 1e-3 * np.arange(K, dtype=np.float32)
    assert plain_gram_matrix(torch.from_numpy(rows)) is None
    expected = centred_gram_matrix(torch.from_numpy(rows))
    np.testing.assert_array_equal(gram_matrix(torch.from_numpy(rows)), expected)


def test_equal_rows_have_equal_entries_and_distance_zero() -> None:
    """Colluders that send one vector tie, to the last bit, wherever they stand."""
    rows = gaussian()
    twins = [4, 11, 29]
    rows[twins] = -50 * rows[4]
    rows[[7, 8]] = rows[20]
    gram = plain_gram_matrix(torch.from_numpy(rows))
    assert gram is not None
    distances = squared_distances(gram)
    for group in (twins, [7, 8, 20]):
        assert (distances[np.ix_(group, group)] == 0).all()
        assert (gram[group] == gram[group[0]]).all()
    result = rage(rows, 3)
    assert result.survivors.tolist() == [row not in twins for row in range(K)]
    assert result.iterations == 1


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("rule", [rage, krum, multi_krum, bulyan])
def test_a_row_that_is_not_finite_is_found_without_looking_for_it(rule: Rule, value: float) -> None:
    rows = gaussian()
    rows[5, 40_000] = value
    with pytest.raises(ValueError, match="row 5"):
        rule(rows, 2)


def test_a_million_tiny_differences() -> None:
    """Updates of 1e-5 in a million coordinates: Krum takes the row that float64 takes."""
    rng = np.random.default_rng(3)
    rows = (1e-5 * rng.standard_normal((12, 1_000_000))).astype(np.float32)
    rows += np.float32(1e-5) * rng.standard_normal(1_000_000).astype(np.float32)
    distances = squared_distances(exact_products(rows))
    scores = np.sort(distances, axis=1)[:, 1:9].sum(axis=1)
    chosen = krum(rows, 2).survivors.numpy()
    assert plain_gram_matrix(torch.from_numpy(rows)) is not None
    assert np.flatnonzero(chosen).tolist() == [int(np.argmin(scores))]


def test_no_rule_needs_memory_of_the_size_of_the_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.from_numpy(np.random.default_rng(4).standard_normal((15, 600_000), np.float32))
    monkeypatch.setattr(aggregate, "_MOST_THREADS", 2)
    for rule in (rage, krum, multi_krum, bulyan):
        tracemalloc.start()
        rule(rows, 3)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        # The updates are 36 MB. The result and its sum in float64 take 7.2, two threads' blocks
        # in Bulyan 12.
        assert peak < 24 << 20


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_gram_matrix_of_differences(dtype: type[np.floating]) -> None:
    """⟨u_i − c, u_j − c⟩ with c in the span: differences of entries are the exact products."""
    rng = np.random.default_rng(10)
    rows = (1e-5 * rng.standard_normal((7, 50_000)) + 3.0).astype(dtype)
    gram = gram_matrix(torch.from_numpy(rows))
    away = rows.astype(np.float64) - rows[2].astype(np.float64)
    about_row_2 = gram - gram[2] - gram[2][:, None] + gram[2, 2]
    scale = (away**2).sum(axis=1).max()
    np.testing.assert_allclose(about_row_2, away @ away.T, rtol=0, atol=1e-12 * scale)
    subset = np.array([6, 0, 2])
    about_zero = centred_gram_matrix(
        torch.from_numpy(rows), rows=subset, centre=torch.zeros(50_000)
    )
    wide = rows[subset].astype(np.float64)
    np.testing.assert_allclose(about_zero, wide @ wide.T, rtol=1e-12)


def test_gram_matrix_needs_little_memory() -> None:
    rows = torch.zeros(16, 500_000)
    tracemalloc.start()
    gram_matrix(rows)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 << 20  # the rows themselves are 32 MB
