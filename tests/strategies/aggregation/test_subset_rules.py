"""Rules that choose among subsets or reweigh rows, against their definitions in d dimensions."""

from itertools import combinations

import numpy as np
import pytest
from byzfl import ARC, MDA, Meamed, MoNNA

from blackthorn.strategies import aggregation

Rows = np.ndarray


@pytest.fixture(params=range(8))
def rows(request: pytest.FixtureRequest) -> Rows:
    """Gaussian rows [K, d]; in every other case the first fifth of them is far away."""
    rng = np.random.default_rng([request.param, 77])
    count, dim = int(rng.integers(5, 12)), int(rng.integers(1, 9))
    found = rng.standard_normal((count, dim)) + 2 * rng.standard_normal(dim)
    if request.param % 2:
        found[: count // 5] = -50 * found.mean(axis=0)
    return found


def minorities(rows: Rows) -> list[int]:
    return list(range((len(rows) + 1) // 2))


def largest_variance(rows: Rows, weights: Rows) -> tuple[float, Rows, Rows]:
    """λ_max, its eigenvector and the mean, from the covariance [d, d] itself."""
    shares = weights / weights.sum()
    mean = shares @ rows
    values, vectors = np.linalg.eigh((rows - mean).T @ np.diag(shares) @ (rows - mean))
    return float(values[-1]), vectors[:, -1], mean


def test_mean_around_median_is_byzfls(rows: Rows) -> None:
    for b in minorities(rows):
        found = aggregation.mean_around_median(rows, b).vector
        np.testing.assert_allclose(found, Meamed(f=b)(rows), rtol=1e-12)


def test_monna_with_a_pivot_of_its_own_is_byzfls(rows: Rows) -> None:
    for b in minorities(rows):
        found = aggregation.monna(rows, b, pivot=rows[2]).vector
        np.testing.assert_allclose(found, MoNNA(f=b, idx=2)(rows), rtol=1e-9)


def test_monna_averages_the_rows_nearest_to_the_median(rows: Rows) -> None:
    for b in minorities(rows):
        distance = np.linalg.norm(rows - np.median(rows, axis=0), axis=1)
        nearest = np.argsort(distance)[: len(rows) - b]
        found = aggregation.monna(rows, b)
        assert set(np.flatnonzero(found.survivors)) == set(nearest)
        np.testing.assert_allclose(found.vector, rows[nearest].mean(axis=0), rtol=1e-12)


def test_mda_averages_a_subset_of_the_smallest_diameter(rows: Rows) -> None:
    distance = np.linalg.norm(rows[:, None] - rows[None], axis=2)
    for b in minorities(rows):
        found = aggregation.mda(rows, b)
        kept = np.flatnonzero(found.survivors)
        subsets = list(combinations(range(len(rows)), len(rows) - b))
        diameters = [distance[np.ix_(subset, subset)].max() for subset in subsets]
        assert len(kept) == len(rows) - b
        np.testing.assert_allclose(distance[np.ix_(kept, kept)].max(), min(diameters))
        np.testing.assert_allclose(found.vector, rows[kept].mean(axis=0), rtol=1e-12)
        if np.sum(np.isclose(diameters, min(diameters))) == 1 and b < len(rows) - 1:
            np.testing.assert_allclose(found.vector, MDA(f=b)(rows), rtol=1e-9)


@pytest.mark.parametrize("count", [40, 120])
def test_mda_finds_a_tight_majority_among_many(count: int) -> None:
    """Far more subsets than could be gone through: comb(120, 30) is about 1e28."""
    rng = np.random.default_rng(count)
    b = count // 4
    rows = rng.standard_normal((count, 30))
    attackers = rng.permutation(count)[:b]
    rows[attackers] += 20 * rng.standard_normal((b, 30))
    kept = np.flatnonzero(aggregation.mda(rows, b).survivors)
    assert set(kept) == set(range(count)) - set(attackers)


def test_smea_averages_the_subset_of_the_smallest_variance(rows: Rows) -> None:
    for b in minorities(rows):
        found = aggregation.smea(rows, b)
        subsets = [list(s) for s in combinations(range(len(rows)), len(rows) - b)]
        variances = [largest_variance(rows[s], np.ones(len(s)))[0] for s in subsets]
        expected = rows[subsets[int(np.argmin(variances))]].mean(axis=0)
        np.testing.assert_allclose(found.vector, expected, rtol=1e-9)


def test_smea_refuses_more_subsets_than_it_can_go_through() -> None:
    with pytest.raises(ValueError, match="num_corrupt = 10 with K = 30 leaves 30045015: at most"):
        aggregation.smea(np.zeros((30, 2)), 10)


def test_caf_is_its_definition(rows: Rows) -> None:
    for b in minorities(rows):
        weights = np.ones(len(rows))
        best, smallest = rows.mean(axis=0), np.inf
        while weights.sum() > len(rows) - 2 * b or smallest == np.inf:
            variance, vector, mean = largest_variance(rows, weights)
            if variance < smallest:
                best, smallest = mean, variance
            scores = ((rows - mean) @ vector) ** 2
            # Rows that are out stay out.
            weights = weights * (1 - scores / scores[weights > 0].max())
        found = aggregation.caf(rows, b)
        np.testing.assert_allclose(found.vector, best, rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(found.weights.numpy() @ rows, found.vector, rtol=1e-9)


def test_caf_of_equal_rows_is_the_row() -> None:
    rows = np.full((7, 3), 2.5)
    np.testing.assert_array_equal(aggregation.caf(rows, 3).vector, rows[0])


def test_adaptive_clipping_is_byzfls(rows: Rows) -> None:
    for b in minorities(rows):
        exact = 2 * b * (len(rows) - b) % len(rows) != 0  # byzfl rounds whole numbers down at times
        if exact or b == 0:
            found = aggregation.mix(rows, aggregation.adaptive_clipping(rows, b))
            np.testing.assert_allclose(found, ARC(f=b)(rows.copy()), rtol=1e-12)


def test_adaptive_clipping_clips_the_longest_to_the_next() -> None:
    rows = np.diag([1.0, 2.0, 3.0, 40.0])
    clipped = aggregation.mix(rows, aggregation.adaptive_clipping(rows, 1))  # ⌊2 · 1/4 · 3⌋ = 1
    np.testing.assert_array_equal(clipped, np.diag([1.0, 2.0, 3.0, 3.0]))
