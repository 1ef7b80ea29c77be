"""Noise laws against their distribution functions and characteristic functions."""

import numpy as np
import pytest
from scipy import stats

from blackthorn.strategies import tail_index
from blackthorn.tasks.noise_laws import NoiseLaw, symmetric_stable


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(seed))


@pytest.mark.parametrize(
    ("law", "distribution"),
    [
        (NoiseLaw("gaussian"), stats.norm()),
        (NoiseLaw("cauchy"), stats.cauchy()),
        (NoiseLaw("student-t", dof=2.5), stats.t(2.5)),
        (NoiseLaw("stable", alpha=2.0), stats.norm(scale=np.sqrt(2))),
        (NoiseLaw("stable", alpha=1.0), stats.cauchy()),
        (NoiseLaw("gaussian", scale=3.0), stats.norm(scale=3.0)),
        (NoiseLaw("stable", alpha=1.0, scale=0.5), stats.cauchy(scale=0.5)),
    ],
    # A distribution's own name holds its address, which differs between the tests' processes.
    ids=lambda value: str(value) if isinstance(value, NoiseLaw) else "distribution",
)
def test_draws_have_their_law_s_distribution_function(
    law: NoiseLaw, distribution: stats.rv_continuous
) -> None:
    sample = law.draw(rng(), (4, 5000)).ravel()
    assert stats.kstest(sample, distribution.cdf).pvalue > 1e-3


@pytest.mark.parametrize("alpha", [0.3, 0.5, 0.9, 1.0, 1.2, 1.5, 1.9, 2.0])
def test_stable_draws_have_their_characteristic_function(alpha: float) -> None:
    # E cos(tX) = exp(-|t|^α); the mean of 4·10^5 cosines is within 5 deviations of 1/sqrt(2n).
    sample = symmetric_stable(rng(int(10 * alpha)), alpha, (400_000,))
    for t in (0.1, 0.5, 1.0, 2.0):
        assert np.cos(t * sample).mean() == pytest.approx(np.exp(-(t**alpha)), abs=6e-3)
        assert np.sin(t * sample).mean() == pytest.approx(0, abs=6e-3)


@pytest.mark.parametrize("alpha", [0.5, 1.0, 1.5, 2.0])
def test_the_tail_index_is_found_again(alpha: float) -> None:
    law = NoiseLaw("stable", alpha=alpha, scale=3.0)
    assert tail_index(law.draw(rng(1), (200_000,))) == pytest.approx(alpha, abs=0.1)


def test_very_fat_tails_are_infinite_and_never_nan() -> None:
    alpha = 0.01
    sample = symmetric_stable(rng(), alpha, (100_000,))
    assert not np.isnan(sample).any()
    assert 0 < np.isinf(sample).sum() < 200  # P(|X| > 1.8e308) is about 8e-4
    assert np.abs(np.mean(sample > 0) - 0.5) < 0.01
    # As α -> 0, |X|^α tends to 1 / W in law: α ln|X| to Gumbel's.
    with np.errstate(divide="ignore"):
        logarithms = alpha * np.log(np.abs(sample))
    assert stats.kstest(logarithms, stats.gumbel_r.cdf).statistic < 0.02


def test_without_scale_there_is_no_noise() -> None:
    assert not NoiseLaw("cauchy", scale=0.0).draw(rng(), (3, 2)).any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "levy"}, "noise-law is 'levy': allowed are gaussian, cauchy, stable, student-t"),
        ({"name": "stable", "alpha": 0.0}, "noise-alpha is 0.0: it must be above 0"),
        ({"name": "stable", "alpha": 2.1}, "noise-alpha is 2.1: .* at most 2"),
        ({"name": "student-t", "dof": 0.0}, "noise-dof is 0.0"),
        ({"name": "gaussian", "scale": -1.0}, "noise-scale is -1.0"),
        ({"name": "gaussian", "scale": np.inf}, "noise-scale is inf"),
    ],
)
def test_numbers_out_of_range_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NoiseLaw(**options)
