"""The tail index against the exponents of the laws that the samples were drawn from."""

import math

import numpy as np
import pytest
import torch

from blackthorn.strategies.tail_index import tail_index

ALPHAS = [0.5, 1.0, 1.5, 2.0]


def symmetric_stable(
    alpha: float, size: int | tuple[int, int], generator: np.random.Generator
) -> np.ndarray:
    """Chambers, Mallows, Stuck: symmetric α-stable samples (Cauchy at 1, N(0, 2) at 2)."""
    angle = generator.uniform(-math.pi / 2, math.pi / 2, size)
    wait = generator.exponential(size=size)
    power = (np.cos((1 - alpha) * angle) / wait) ** ((1 - alpha) / alpha)
    return np.sin(alpha * angle) / np.cos(angle) ** (1 / alpha) * power


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("shift", [0.0, 40.0])
def test_the_index_of_a_million_stable_scalars_is_found_whatever_their_shift(
    alpha: float, shift: float
) -> None:
    samples = symmetric_stable(alpha, 1_000_000, np.random.default_rng(11)) + shift
    assert tail_index(samples) == pytest.approx(alpha, abs=0.05)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_the_index_of_stable_vectors_is_found_whatever_their_offset(alpha: float) -> None:
    generator = np.random.default_rng(12)
    samples = symmetric_stable(alpha, (200_000, 5), generator) + np.array([0, 1, -30, 500, 7.0])
    assert tail_index(torch.from_numpy(samples)) == pytest.approx(alpha, abs=0.05)


def test_norms_answer_one_whatever_the_law() -> None:
    """Why vectors are summed as vectors: the norms of Gaussian vectors, uncentred, look like 1."""
    samples = np.random.default_rng(13).standard_normal((100_000, 20))
    norms = np.linalg.norm(samples, axis=1)
    sums = norms.reshape(-1, 10).sum(axis=1)
    on_norms = math.log(10) / (np.log(sums).mean() - np.log(norms).mean())
    assert on_norms == pytest.approx(1.0, abs=0.05)
    assert tail_index(samples) == pytest.approx(2.0, abs=0.05)


@pytest.mark.parametrize("block_size", [2, 5, 100])
def test_the_index_is_found_with_other_block_sizes(block_size: int) -> None:
    samples = symmetric_stable(1.5, 1_000_000, np.random.default_rng(14))
    assert tail_index(samples, block_size) == pytest.approx(1.5, abs=0.05)


def test_the_index_of_seven_samples_is_that_by_hand() -> None:
    # Median 0; block sums 6 and -10; the two zeros have no logarithm.
    samples = np.array([2.0, 4.0, 0.0, -7.0, -3.0, 0.0, 99.0])
    growth = (math.log(6) + math.log(10)) / 2 - math.log(2 * 4 * 7 * 3) / 4
    assert tail_index(samples, 3) == pytest.approx(math.log(3) / growth, rel=1e-12)


def test_an_odd_number_of_samples_contains_its_own_median() -> None:
    samples = np.random.default_rng(15).standard_normal(11 * 9_091)
    assert len(samples) % 2 == 1
    assert tail_index(samples, 11) == pytest.approx(2.0, abs=0.1)


def test_samples_are_left_as_they_are() -> None:
    samples = torch.arange(40.0)
    tail_index(samples)
    assert torch.equal(samples, torch.arange(40.0))


def test_sums_shorter_than_samples_have_no_finite_index() -> None:
    assert tail_index(np.array([1.0, -1.1, 2.0, -1.9] * 5), 2) == math.inf


@pytest.mark.parametrize(
    ("samples", "block_size", "message"),
    [
        (np.ones(5), 10, "fill one block of 10: got 5"),
        (np.ones(0), 10, r"shape \[n\] or \[n, d\]"),
        (np.ones(20), 1, "block_size must be at least 2: got 1"),
        (np.ones(20), 10, "samples must vary"),
        (np.array([1.0, np.nan] * 10), 10, "finite"),
        (np.ones((20, 2, 2)), 10, "shape"),
    ],
)
def test_samples_and_block_sizes_without_an_index_are_refused(
    samples: np.ndarray, block_size: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        tail_index(samples, block_size)
