"""Numerical composition of privacy losses: dp-accounting's distributions, and what it lacks.

A privacy loss distribution (PLD) is built from a profile δ(ε) by connecting the dots (Doroshenko
et al., arXiv 2207.04380): on the grid of losses it is the profile, between them above it. So every
ε from here is an upper bound. All in float64.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from .release import Charge, Release

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

# Finer than this no figure moves by 1/5000.
_COARSEST = 1e-3
# Of a release's standard deviation: its variance is then overstated by less than 1/2000.
_INTERVALS_A_DEVIATION = 20
_MOST_INTERVALS = 1e5
# How far out the noise is followed, in its standard deviations: e^-50 is left, and counted as lost.
_REACH = 10.0
# What float64 rounds away: of δ in the transforms, and of every release's profile. Not given away.
_ROUNDING = 1e-5
_ROUNDING_A_RELEASE = 2e-16
_CLOSED_FORM_ERROR = 1e-12


def gaussian_epsilon(charges: Sequence[Charge], delta: float) -> float:
    """ε of Gaussian releases without sampling, exact (Balle & Wang, arXiv 1805.06530).

    T releases with multipliers z_t are one with (Σ 1/z_t²)^(-1/2).
    """
    from dp_accounting.gaussian_mechanism import get_epsilon_gaussian

    precision = sum(count / release.noise_multiplier**2 for release, count in charges)
    with np.errstate(divide="ignore"):
        # Where δ(ε) is 0 in float64 its logarithm may be infinite.
        found = float(get_epsilon_gaussian(1 / math.sqrt(precision), delta, _CLOSED_FORM_ERROR))
    return found and found * (1 + 4 * _CLOSED_FORM_ERROR) + 4 * _CLOSED_FORM_ERROR


def composed_epsilon(charges: Sequence[Charge], delta: float) -> float:
    """ε at δ of all `charges`, of one kind of neighbours, from above."""
    from dp_accounting.pld import privacy_loss_distribution

    interval = _interval([release for release, _ in charges])
    total = privacy_loss_distribution.identity(interval)
    for release, count in charges:
        total = total.compose(_loss_distribution(release, interval).self_compose(count))
    rounded = sum(count for _, count in charges) * _ROUNDING_A_RELEASE
    return float(total.get_epsilon_for_delta(delta * (1 - _ROUNDING) - rounded))


def _loss_distribution(release: Release, interval: float) -> "PrivacyLossDistribution":
    from dp_accounting.pld import pld_pmf, privacy_loss_distribution

    if release.drawn is None:
        return privacy_loss_distribution.from_gaussian_mechanism(
            release.noise_multiplier,
            sampling_prob=release.sample_rate,
            value_discretization_interval=interval,
        )
    last = math.ceil(_largest_loss(release) / interval)
    profile = drawn_profile(release, np.arange(-last, last + 1) * interval)
    pmf = pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(interval, -last, last, profile)
    return privacy_loss_distribution.PrivacyLossDistribution(pmf)


def drawn_profile(release: Release, epsilons: np.ndarray) -> np.ndarray:
    """δ(ε) [k] of one release of a cohort of n of m drawn without replacement; ε [k], any sign.

    Balle, Barthe & Gaboardi (arXiv 1807.01647, Theorem 11), for neighbours that differ in one
    client replaced by another: with q = n/m and e^ε₀ = 1 + (e^ε − 1)/q,

        δ(ε) = q δ₀(ε₀),  δ₀(ε₀) = Φ(1/(2z) − ε₀ z) − e^ε₀ Φ(−1/(2z) − ε₀ z)   for ε ≥ 0.

    The relation is symmetric, so that δ(ε) = 1 − e^ε + e^ε δ(−ε) for ε < 0. Each value is attained
    by a pair of populations: all others at one end, the one client at the same or the other.
    """
    # Imported here, as in entropy.py.
    from scipy.special import ndtr

    size, population = release.drawn or (1, 1)
    rate, z = size / population, release.noise_multiplier
    losses = np.abs(epsilons)
    odds = np.expm1(losses) / rate
    inner = np.log1p(odds)
    above = ndtr(1 / (2 * z) - inner * z) - (1 + odds) * ndtr(-1 / (2 * z) - inner * z)
    positive = rate * np.clip(above, 0.0, 1.0)
    ratio = np.exp(np.minimum(epsilons, 0.0))
    negative = -np.expm1(np.minimum(epsilons, 0.0)) + ratio * positive
    return np.where(epsilons < 0, negative, positive)


def _interval(releases: Sequence[Release]) -> float:
    """The grid of losses: fine for the smallest release, and no finer than memory allows."""
    deviation = min(_rate(r) * _root_of_divergence(r.noise_multiplier) for r in releases)
    largest = max(_largest_loss(release) for release in releases)
    return min(_COARSEST, max(deviation / _INTERVALS_A_DEVIATION, largest / _MOST_INTERVALS))


def _root_of_divergence(z: float) -> float:
    """(e^(1/z²) − 1)^½, the standard deviation of a small loss (χ² of two Gaussians 1 apart)."""
    return math.sqrt(math.expm1(min(1 / z**2, 100.0)))


def _largest_loss(release: Release) -> float:
    z = release.noise_multiplier
    unsampled = _REACH / z + 1 / (2 * z * z)
    return math.log1p(_rate(release) * math.expm1(min(unsampled, 700.0)))


def _rate(release: Release) -> float:
    if release.drawn is not None:
        return release.drawn[0] / release.drawn[1]
    return release.sample_rate
