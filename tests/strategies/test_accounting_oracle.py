"""No figure is below what an attacker reaches: bounds from both sides, computed from the mechanism.

The oracle knows two laws on the line, p = (1 − q) N(0, z²) + q N(1, z²) and N(0, z²), the sum along
the direction of the one client. It uses no accountant's code: the losses of a round, rounded down
(or up) to a grid, are convolved by FFT, and the hockey-stick divergence is read off.
"""

import itertools
import math
import warnings
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from scipy import fft
from scipy.optimize import brentq
from scipy.stats import norm

from blackthorn.strategies import Release, accounting, calibrate_noise_multiplier, spent
from blackthorn.strategies.accounting import Accountant, Charge, calibrate
from blackthorn.strategies.privacy_loss import drawn_profile

DELTA = 1e-5
# Under p against N(0, z²) ("remove"), or the reverse ("add").
Round = tuple[float, float, str]


def losses(q: float, z: float, direction: str, edges: np.ndarray) -> np.ndarray:
    """Probability of each cell between `edges` [k] of the loss, and of what lies outside them."""
    sign = 1 if direction == "remove" else -1
    # log(1 − q + q e^((2x − 1)/(2z²))) grows with x: where does it pass the edges?
    odds = np.expm1(sign * edges) / q + 1
    x = np.where(odds > 0, z * z * np.log(np.where(odds > 0, odds, 1.0)) + 0.5, -np.inf)
    below = norm.cdf(x, scale=z)
    if direction == "remove":
        below = (1 - q) * below + q * norm.cdf(x, loc=1, scale=z)
    return np.diff(
        np.concatenate([[0.0], below, [1.0]])
        if sign > 0
        else np.concatenate([[0.0], 1 - below, [1.0]])
    )


def reached(rounds: list[tuple[Round, int]], interval: float, upper: bool) -> Callable:
    """δ(ε) of the rounds together, from above or from below."""
    widest = max(math.log1p(q * math.expm1((9 * z + 0.5) / z**2)) for (q, z, _), _ in rounds)
    cells = math.ceil(widest / interval)
    edges = np.arange(-cells, cells + 1) * interval
    # Of a sum, 12 of its deviations: what is outside wraps around, and counts for `upper`.
    spread = math.sqrt(sum(n * q * q * math.expm1(1 / z**2) for (q, z, _), n in rounds))
    size = fft.next_fast_len(2 * (cells + math.ceil(12 * spread / interval)) + 2, real=True)
    spectrum, lost, first = 1.0, 0.0, 0
    for (q, z, direction), count in rounds:
        mass = losses(q, z, direction, edges)
        # From above a cell's loss is that of its upper edge, and infinite beyond the last; from
        # below it is that of its lower edge, and none at all below the first.
        lost += count * mass[-1] if upper else 0.0
        spectrum = spectrum * fft.rfft(mass[:-1] if upper else mass[1:], size) ** count
        first -= count * cells
    total = fft.irfft(spectrum, size)
    # Index i stands for the loss (i + first) x interval, modulo the size: those above 0 count.
    positive = np.roll(total, first)[: size // 2]
    values = np.arange(size // 2) * interval
    tail = np.append(positive[::-1].cumsum()[::-1], 0.0)
    discounted = np.append((positive * np.exp(-values))[::-1].cumsum()[::-1], 0.0)
    stray = 1e-13 * size**0.5

    def delta(epsilon: float) -> float:
        k = int(epsilon / interval) + 1
        found = float(tail[k] - math.exp(epsilon) * discounted[k])
        return found + lost + stray if upper else found - stray

    return delta


def epsilon_of(delta_at: Callable[[float], float], delta: float) -> float:
    if delta_at(0.0) <= delta:
        return 0.0
    high = 0.1
    while delta_at(high) > delta:
        high *= 2
    return float(brentq(lambda e: delta_at(e) - delta, 0.0, high, xtol=1e-9))


def both_sides(rounds: list[tuple[Round, int]], delta: float, interval: float) -> tuple[float, ...]:
    return tuple(epsilon_of(reached(rounds, interval, upper), delta) for upper in (False, True))


def poisson(*rounds: tuple[float, float, int]) -> list[Charge]:
    return [(Release(z, sample_rate=q), count) for q, z, count in rounds]


@pytest.mark.parametrize("direction", ["remove", "add"])
def test_the_oracle_is_the_closed_form_for_a_gaussian(direction: str) -> None:
    mu = math.sqrt(20) / 5

    def exact(epsilon: float) -> float:
        tail = norm.cdf(-mu / 2 - epsilon / mu)
        return float(norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * tail)

    for upper in (False, True):
        found = reached([((1.0, 5.0, direction), 20)], 1e-4, upper)
        for epsilon in (0.0, 0.5, 3.0):
            assert (found(epsilon) >= exact(epsilon)) == upper
            assert found(epsilon) == pytest.approx(exact(epsilon), rel=0.01)


POISSON = [
    (poisson((0.1, 1.0, 100)), DELTA, 1e-4),
    (poisson((0.01, 1.0, 1000)), DELTA, 2e-5),
    (poisson((0.2, 2.0, 200)), DELTA, 1e-4),
    (poisson((0.3, 0.6, 5)), 1e-4, 1e-3),
    (poisson((0.5, 4.0, 60)), 1e-7, 1e-4),
    (poisson((0.001, 0.7, 500)), DELTA, 2e-5),
    (poisson((0.9, 30.0, 50)), DELTA, 1e-4),
    (poisson((0.05, 15.0, 500)), DELTA, 5e-6),
    (poisson((0.1, 60.0, 100)), DELTA, 5e-6),
    (poisson((0.02, 0.5, 30)), 1e-6, 1e-3),
    (poisson((0.1, 1.0, 20), (0.1, 2.0, 30)), DELTA, 1e-4),
    (poisson((1.0, 9.0, 10), (0.2, 1.5, 40)), DELTA, 1e-4),
]


@pytest.mark.parametrize(("charges", "delta", "interval"), POISSON)
def test_no_accountant_is_below_what_an_attacker_reaches(
    charges: list[Charge], delta: float, interval: float
) -> None:
    def rounds(direction: str) -> list[tuple[Round, int]]:
        return [((r.sample_rate, r.noise_multiplier, direction), n) for r, n in charges]

    sides = [both_sides(rounds(direction), delta, interval) for direction in ("remove", "add")]
    lower, upper = (max(pair) for pair in zip(*sides, strict=True))
    assert upper < 1.03 * lower
    found = {name: spent(charges, delta, name) for name in accounting.ACCOUNTANTS}
    for figure in found.values():
        assert lower <= figure.epsilon <= found["rdp"].epsilon
    assert found["pld"].epsilon <= upper * 1.005
    # An error of 1 % of the figure, on both sides.
    assert found["prv"].epsilon <= upper * 1.03


DRAWN = [
    (1.0, (100, 1000), 100, 1e-4),
    (2.0, (1, 10), 50, 1e-4),
    (0.5, (1, 100), 10, 1e-3),
    (5.0, (9, 10), 100, 1e-4),
    (20.0, (3, 10), 100, 1e-5),
]


@pytest.mark.parametrize(("z", "drawn", "count", "interval"), DRAWN)
def test_a_fixed_cohort_is_not_below_what_an_attacker_reaches(
    z: float, drawn: tuple[int, int], count: int, interval: float
) -> None:
    """All others sit at one end. The one client sits at the other end in the one population and
    with them in its neighbour ("remove"), or the reverse, or now this and now that."""
    q = drawn[0] / drawn[1]
    half = count // 2
    pairs: list[list[tuple[Round, int]]] = [
        [((q, z, "remove"), count)],
        [((q, z, "add"), count)],
        [((q, z, "remove"), half), ((q, z, "add"), count - half)],
    ]
    lower = max(both_sides(rounds, DELTA, interval)[0] for rounds in pairs)
    charges = [(Release(z, drawn=drawn), count)]
    pld, rdp = (spent(charges, DELTA, name) for name in ("pld", "rdp"))
    assert pld.accountant == "pld"
    assert lower <= pld.epsilon <= 1.15 * lower
    assert pld.epsilon < rdp.epsilon


def test_a_fixed_cohorts_figure() -> None:
    """100 of 1000 clients, z = 2 against a sensitivity of 2C: RDP says 14.05."""
    figure = spent([(Release(1.0, drawn=(100, 1000)), 100)], DELTA, "pld")
    # 7.047 is what Poisson sampling at this rate and multiplier costs: the pair above.
    assert 7.047 < figure.epsilon < 7.9


VALUES = (-1.0, 0.0, 1.0)


def mixture(population: tuple[float, ...], size: int, z: float, x: np.ndarray) -> np.ndarray:
    cohorts = list(itertools.combinations(population, size))
    return sum(norm.pdf(x, loc=sum(cohort), scale=2 * z) for cohort in cohorts) / len(cohorts)


@pytest.mark.parametrize("z", [0.4, 1.0, 3.0])
def test_the_profile_of_a_drawn_cohort_is_the_worst_of_all_small_populations(z: float) -> None:
    """Every population of 4 clients at −1, 0 or 1 and every neighbour, cohorts of 2, by sums over
    all cohorts and a quadrature over the line. A client moves the sum by up to 2: noise 2z."""
    size, m = 2, 4
    x = np.linspace(-2 - 20 * z, 2 + 20 * z, 4001)
    epsilons = np.array([0.0, 0.1, 0.7, 2.0, -0.3, -1.5])
    worst = np.zeros(len(epsilons))
    for others in itertools.combinations_with_replacement(VALUES, m - 1):
        laws = [mixture((*others, own), size, z, x) for own in VALUES]
        for p, other in itertools.permutations(laws, 2):
            gains = np.maximum(p - np.exp(epsilons)[:, None] * other, 0.0)
            worst = np.maximum(worst, gains.sum(axis=1) * (x[1] - x[0]))
    profile = drawn_profile(Release(z, drawn=(size, m)), epsilons)
    np.testing.assert_array_less(worst, profile + 1e-6)
    np.testing.assert_allclose(profile, worst, atol=1e-5)


def gaussian_epsilon(z: float, rounds: int, delta: float) -> float:
    mu = math.sqrt(rounds) / z

    def excess(epsilon: float) -> float:
        first = norm.cdf(mu / 2 - epsilon / mu)
        return float(first - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu) - delta)

    return float(brentq(excess, 0.0, 500.0, xtol=1e-13))


@pytest.mark.parametrize(
    ("epsilon", "rounds", "exact"), [(0.01, 10_000, 24_378.5), (0.1, 100, 307.5)]
)
@pytest.mark.parametrize("accountant", ["prv", "pld"])
def test_a_small_budget_without_sampling_asks_for_the_exact_noise(
    epsilon: float, rounds: int, exact: float, accountant: Accountant
) -> None:
    z = calibrate_noise_multiplier(epsilon, DELTA, 1.0, rounds, accountant)
    assert z == pytest.approx(exact, rel=5e-4)
    assert epsilon * (1 - 1e-3) <= gaussian_epsilon(z, rounds, DELTA) <= epsilon
    rdp = calibrate_noise_multiplier(epsilon, DELTA, 1.0, rounds, "rdp")
    assert z < rdp


@pytest.mark.parametrize("accountant", ["prv", "pld"])
def test_a_small_budget_with_sampling_asks_for_little_more_than_a_gaussian(
    accountant: Accountant,
) -> None:
    """Under much noise q and z enter as z/q alone: the central limit of every such mechanism."""
    q, rounds, epsilon = 0.1, 10_000, 0.01
    z = calibrate_noise_multiplier(epsilon, DELTA, q, rounds, accountant)
    assert z == pytest.approx(q * 24_378.5, rel=2e-3)


@pytest.mark.parametrize("delta", [1e-3, DELTA, 1e-12])
@pytest.mark.parametrize(("z", "rounds"), [(0.08, 3), (0.3, 1), (5.0, 100), (1e4, 7)])
def test_without_sampling_every_range_is_exact(z: float, rounds: int, delta: float) -> None:
    exact = gaussian_epsilon(z, rounds, delta) if z < 1e3 or delta < 1e-4 else 0.0
    for accountant in ("prv", "pld"):
        figure = spent([(Release(z), rounds)], delta, accountant)
        assert figure.accountant == accountant
        assert exact <= figure.epsilon <= exact * (1 + 1e-6) + 1e-9


def test_unequal_rounds_without_sampling_are_one() -> None:
    charges = [(Release(3.0), 4), (Release(6.0), 20), (Release(9.0, drawn=(5, 5)), 9)]
    alone = 1 / math.sqrt(4 / 9 + 20 / 36 + 9 / 81)
    for accountant in ("prv", "pld"):
        found = spent(charges, DELTA, accountant)
        assert found.epsilon == pytest.approx(gaussian_epsilon(alone, 1, DELTA), rel=1e-9)


@pytest.mark.parametrize(
    "charges",
    [
        poisson((1e-5, 0.5, 1000)),
        poisson((0.1, 2437.85, 10_000)),
        poisson((1e-3, 1.0, 100_000)),
        poisson((0.01, 1e9, 1)),
        [(Release(1.0, drawn=(900, 1000)), 10)],
        [(Release(0.3), 1)],
    ],
)
def test_no_accountant_answers_worse_than_rdp_or_far_above_another(charges: list[Charge]) -> None:
    rdp, prv, pld = (spent(charges, DELTA, name).epsilon for name in accounting.ACCOUNTANTS)
    assert pld <= prv * (1 + 1e-3)
    assert prv <= min(rdp, 1.03 * pld + 1e-9)


def test_no_library_warns_past_what_is_quiet(recwarn: pytest.WarningsRecorder) -> None:
    """A figure at the edge of the orders makes Opacus warn, of its own grid as of ours."""
    accounting._rdp.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for z, q in ((2.0, 0.2), (25.0, 0.2), (1e3, 1e-3), (1e3, 1.0)):
            for name in accounting.ACCOUNTANTS:
                assert spent([(Release(z, sample_rate=q), 10)], DELTA, name).epsilon >= 0
    assert not recwarn.list


@pytest.mark.parametrize("z", [5e-324, 1e-160, 1e-30])
def test_noise_that_could_be_told_from_none_is_infinite(z: float) -> None:
    for name in accounting.ACCOUNTANTS:
        for release in (Release(z), Release(z, sample_rate=0.1), Release(z, drawn=(1, 2))):
            assert spent([(release, 1)], DELTA, name).epsilon > 1e50


def test_a_fixed_cohorts_calibration_keeps_to_the_budget() -> None:
    drawn = Fraction(1, 5)
    z = calibrate(2.0, DELTA, lambda z: Release(z, drawn=(1, 5)), 20, "pld")
    rounds: list[tuple[Round, int]] = [((float(drawn), z, "remove"), 20)]
    assert both_sides(rounds, DELTA, 1e-4)[0] <= 2.0
    assert spent([(Release(z, drawn=(1, 5)), 20)], DELTA, "pld").epsilon == pytest.approx(
        2.0, rel=1e-3
    )
