"""The discrete noise, what it is worth, and the way of an update to integers: each against its
definition, computed in another way."""

import math
import os
from fractions import Fraction
from itertools import product

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld.privacy_loss_distribution import from_discrete_gaussian_mechanism
from scipy.linalg import hadamard
from scipy.stats import chisquare, hypergeom

from blackthorn.secure_aggregation import discrete_gaussian as sampler
from blackthorn.secure_aggregation.accounting import concentrated_epsilon
from blackthorn.secure_aggregation.discrete_gaussian import discrete_gaussian
from blackthorn.secure_aggregation.graph import Terms, neighbourhoods
from blackthorn.secure_aggregation.masks import reduced, system_stream
from blackthorn.secure_aggregation.quantisation import Quantisation, rotated

SESSION = bytes(range(32))


def pmf(variance: int, reach: int) -> np.ndarray:
    """P(x) of N_Z(0, variance) for |x| ≤ reach, by its definition."""
    weights = np.exp(-(np.arange(-reach, reach + 1.0) ** 2) / (2 * variance))
    return weights / weights.sum()


def fits(drawn: np.ndarray, variance: int) -> float:
    """p-value of a chi-square test, far numbers counted together."""
    reach = 8 * math.isqrt(variance) + 8
    expected = pmf(variance, reach) * len(drawn)
    observed = np.bincount(drawn + reach, minlength=2 * reach + 1)
    often = expected > 8
    rest = [observed[~often].sum()], [expected[~often].sum()]
    pair = (np.append(observed[often], rest[0]), np.append(expected[often], rest[1]))
    keep = pair[1] > 1
    found, due = pair[0][keep], pair[1][keep]
    return float(chisquare(found, due * found.sum() / due.sum()).pvalue)


@pytest.mark.parametrize("variance", [1, 2, 5, 49, 1000])
def test_the_noise_has_the_law_of_the_discrete_gaussian(variance: int) -> None:
    drawn = discrete_gaussian(60_000, variance, system_stream())
    assert drawn.shape == (60_000,)
    assert fits(drawn, variance) > 1e-6


@pytest.mark.parametrize("variance", [2**20, 2**40, 2**56])
def test_wide_noise_has_its_mean_and_variance(variance: int) -> None:
    drawn = discrete_gaussian(40_000, variance, system_stream()).astype(float)
    assert abs(drawn.mean()) < 6 * math.sqrt(variance / 40_000)
    assert abs(drawn.var() / variance - 1) < 6 * math.sqrt(2 / 40_000)


def test_what_float64_cannot_decide_is_decided_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """With every number in doubt the law is the same: the exact way and the quick one agree."""
    monkeypatch.setattr(sampler, "_ROUNDINGS", 1e3)
    assert fits(discrete_gaussian(1500, 3, system_stream()), 3) > 1e-6


def test_the_exact_decisions_are_those_of_the_real_numbers() -> None:
    """⌊−t ln U⌋ between its values at both ends of what a word leaves open, and U < exp(−γ)."""
    for word in (1, 3, 2**40, 2**52, 2**53 - 1):
        for scale in (1, 7, 1000):
            ends = [-scale * math.log(end / 2**53) for end in (word + 1, word)]
            found = sampler._floor_of_log(word, scale, os.urandom)
            assert math.floor(ends[0] - 1e-9) <= found <= math.floor(ends[1] + 1e-9)
    below = sampler._is_below_exp
    assert below(0, Fraction(30), os.urandom)
    assert not below(2**53 - 1, Fraction(1, 10**6), os.urandom)
    assert below(2**53 - 1, Fraction(0), os.urandom)
    # exp(-1) = 0.36787944117144233...
    edge = int(0.36787944117144233 * 2**53)
    assert below(edge - 10, Fraction(1), os.urandom)
    assert not below(edge + 10, Fraction(1), os.urandom)


@pytest.mark.parametrize("variance", [0, 2**57, 1.5])
def test_a_variance_that_cannot_be_drawn_is_refused(variance: float) -> None:
    with pytest.raises(ValueError, match="variance"):
        discrete_gaussian(1, variance, os.urandom)  # type: ignore[arg-type]


# The charge.


def renyi(first: np.ndarray, second: np.ndarray, order: float) -> float:
    there = (first > 0) & (second > 0)
    logs = order * np.log(first[there]) + (1 - order) * np.log(second[there])
    return float(np.logaddexp.reduce(logs) / (order - 1))


@pytest.mark.parametrize("survivors", [2, 3, 5])
@pytest.mark.parametrize("variance", [0.25, 0.5, 1, 3])
def test_the_bound_holds_for_the_exact_law_of_the_sum(survivors: int, variance: float) -> None:
    """The law of the sum by convolution, in one coordinate, against a client that moves it by Δ."""
    reach = 60
    one = np.exp(-(np.arange(-reach, reach + 1.0) ** 2) / (2 * variance))
    law = one / one.sum()
    for _ in range(survivors - 1):
        law = np.convolve(law, one / one.sum())
    for moved in (1, 2):
        epsilon = concentrated_epsilon(survivors, variance, moved, 1)
        shifted, still = np.pad(law, (moved, 0)), np.pad(law, (0, moved))
        for order in (1.5, 2, 4, 16):
            assert renyi(shifted, still, order) <= order * epsilon**2 / 2 * (1 + 1e-9) + 1e-12


def test_in_many_coordinates_the_bound_is_the_papers() -> None:
    """Proposition 14's numbers, written out for three survivors."""
    variance, moved, dimension = 0.5, 2.0, 100
    tau = 10 * (math.exp(-(math.pi**2) * 0.5) + math.exp(-(math.pi**2) * 2 / 3))
    share = moved / math.sqrt(3 * variance)
    due = min(math.sqrt(share**2 + tau * dimension / 2), share + tau * math.sqrt(dimension))
    assert concentrated_epsilon(3, variance, moved, dimension) == pytest.approx(due, rel=1e-12)
    assert concentrated_epsilon(3, 100.0, moved, dimension) == pytest.approx(
        moved / math.sqrt(300), rel=1e-12
    )
    with pytest.raises(ValueError, match="variance"):
        concentrated_epsilon(3, 0.2, 1.0, 1)


@pytest.mark.parametrize("multiplier", [1.0, 3.0])
def test_the_charge_is_no_less_than_the_other_librarys_and_hardly_more_than_the_gaussians(
    multiplier: float,
) -> None:
    """dp-accounting's loss distribution of the discrete Gaussian (one survivor, sensitivity 3)."""
    moved, delta, rounds = 3, 1e-5, 10
    epsilon = concentrated_epsilon(1, (multiplier * moved) ** 2, moved, 1)
    assert epsilon == pytest.approx(1 / multiplier)
    ours = dp_accounting.rdp.RdpAccountant()
    ours.compose(dp_accounting.GaussianDpEvent(1 / epsilon), rounds)
    exact = from_discrete_gaussian_mechanism(multiplier * moved, moved).self_compose(rounds)
    assert exact.get_epsilon_for_delta(delta) <= ours.get_epsilon(delta)
    assert ours.get_epsilon(delta) <= 1.2 * exact.get_epsilon_for_delta(delta)


# Rotation, rounding, modulus.


def test_the_rotation_is_hadamards_and_its_own_inverse() -> None:
    vector = np.random.default_rng(0).standard_normal(64)
    assert np.allclose(rotated(vector), hadamard(64) @ vector / 8, atol=1e-12)
    assert np.allclose(rotated(rotated(vector)), vector, atol=1e-12)


def made(**changes: float) -> Quantisation:
    values = {
        **{"bound": 0.7, "multiplier": 2.0, "survivors": 8, "clients": 10},
        **{"bits": 16, "dimension": 100, **changes},
    }
    return Quantisation(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize("changes", [{}, {"bits": 24}, {"dimension": 3}, {"clients": 100}])
def test_the_numbers_are_those_of_their_definitions(changes: dict[str, float]) -> None:
    one = made(**changes)
    padded = 2 ** math.ceil(math.log2(one.dimension))
    length = one.scale * one.bound
    squares = (
        (length + math.sqrt(padded)) ** 2,
        length**2 + padded / 4 + math.sqrt(2 * 0.5) * (length + math.sqrt(padded) / 2),
    )
    assert one.padded == padded
    assert one.sensitivity**2 == pytest.approx(min(squares))
    # The multiplier is z with n' survivors, of the sensitivity with its rounding.
    assert math.sqrt(one.survivors * one.variance) / one.sensitivity == pytest.approx(
        one.multiplier, rel=2e-3
    )
    assert math.sqrt(one.survivors * one.variance) >= one.multiplier * one.sensitivity
    # Within a per cent of the noise without rounding.
    assert one.deviation == pytest.approx(one.multiplier * one.bound, rel=0.01)
    # No coordinate wraps, and at a scale a little larger the bound would not say so.
    reach = 2 * math.log(4 * padded * 2**40)
    for scale, holds in ((one.scale, True), (1.01 * one.scale, False)):
        rotated_part = scale * one.clients * one.bound * min(1, math.sqrt(reach / padded))
        deviation = math.sqrt(reach * one.clients * one.variance) * scale / one.scale
        assert (rotated_part + one.clients + deviation < 2 ** (one.bits - 1)) == holds


def vectors(dimension: int) -> list[np.ndarray]:
    generator = np.random.default_rng(3)
    spike = np.zeros(dimension)
    spike[0] = 1e3
    return [
        *(generator.standard_normal(dimension) * scale for scale in (1e-3, 1.0, 1e6)),
        spike,
        np.full(dimension, 1e200),
        np.zeros(dimension),
    ]


@pytest.mark.parametrize("dimension", [1, 5, 100])
def test_no_update_is_longer_than_the_sensitivity_that_is_charged(dimension: int) -> None:
    one = made(dimension=dimension)
    for vector in vectors(dimension):
        for _ in range(20):
            found = one.quantised(vector, SESSION, os.urandom)
            assert sum(int(x) ** 2 for x in found) <= one.sensitivity**2


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_update_that_is_not_finite_counts_as_nothing(value: float) -> None:
    one = made(dimension=4)
    found = one.quantised(np.array([0.1, value, 0.0, 0.2]), SESSION, os.urandom)
    assert not found.any()


def test_every_rounding_of_a_vector_at_the_bound_is_within_the_unconditional_sensitivity() -> None:
    """All 2^4 roundings of some vectors of length C, with s C small: ‖q‖ ≤ s C + √d'."""
    generator = np.random.default_rng(5)
    for _ in range(50):
        vector = generator.standard_normal(4)
        vector *= 3.7 / np.linalg.norm(vector)
        for up in product((0, 1), repeat=4):
            assert np.linalg.norm(np.floor(vector) + up) <= 3.7 + 2.0


def test_rounding_is_unbiased_and_the_sum_comes_back_within_it() -> None:
    one = made(dimension=50)
    vector = np.random.default_rng(1).standard_normal(50)
    clipped = vector * min(1.0, one.bound / float(np.linalg.norm(vector)))
    total, times = np.zeros(one.padded, np.int64), 200
    for _ in range(times):
        total += one.quantised(vector, SESSION, os.urandom)
    # Of so many clients' sum nothing may wrap here: it is restored in parts.
    back = one.restored(reduced(total // times, 16), SESSION)
    assert np.abs(back - clipped).max() < 8 / one.scale
    mean = rotated(total / times / one.scale)
    assert np.isfinite(mean).all()


def test_the_noise_of_the_sum_is_that_of_the_multiplier_with_the_fewest_survivors() -> None:
    """The mutation "noise of those who vanished not made up for" would leave √(n'/n) of it."""
    one = made(dimension=1000, clients=10, survivors=6, multiplier=5.0)
    drawn = sum(
        discrete_gaussian(one.padded, one.variance, system_stream()) for _ in range(one.survivors)
    )
    back = one.restored(reduced(np.asarray(drawn), 16), SESSION)
    assert back.std() == pytest.approx(5.0 * 0.7, rel=0.1)


@pytest.mark.parametrize("dimension", [1, 64, 1000])
def test_nothing_wraps_where_all_clients_send_the_same_longest_update(dimension: int) -> None:
    one = made(dimension=dimension, clients=40, survivors=32, multiplier=0.5)
    generator = np.random.default_rng(0)
    for trial in range(6):
        vector = generator.standard_normal(dimension) if trial % 2 else np.eye(1, dimension)[0]
        vector *= one.bound / np.linalg.norm(vector)
        session, total = os.urandom(32), np.zeros(one.padded, np.int64)
        for _ in range(one.clients):
            total += one.quantised(vector, session, os.urandom)
            total += discrete_gaussian(one.padded, one.variance, system_stream())
        assert np.abs(total).max() < 2 ** (one.bits - 1)
        back = one.restored(reduced(total, one.bits), session)
        assert (
            np.linalg.norm(back - one.clients * vector)
            < 2 * one.deviation * math.sqrt(2 * dimension) + 3 * one.deviation
        )


@pytest.mark.parametrize(
    "changes",
    [
        {"bits": 8, "dimension": 1000},
        {"bits": 16, "clients": 40_000, "survivors": 30_000},
        {"bits": 8, "clients": 200, "survivors": 150},
        {"bits": 16, "multiplier": 1e6},
    ],
)
def test_bits_that_are_too_few_are_refused(changes: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"secure-bits = .* is not allowed"):
        made(**changes)


# Who is whose neighbour.


def test_neighbours_are_each_others_and_as_many_as_the_degree() -> None:
    for count, degree in ((10, 4), (11, 6), (5, 4), (5, 20)):
        found = neighbourhoods([*range(count)], degree, np.random.default_rng(0))
        for one, others in found.items():
            assert len({*others} - {one}) == min(degree, count - 1)
            assert all(one in found[other] for other in others)


def test_up_to_128_clients_everybody_sees_how_many_have_survived() -> None:
    assert Terms(128, 103).is_complete
    assert Terms(128, 103).fewest_alive(128) == 103
    assert Terms(128, 103).fewest_neighbours == 102


@pytest.mark.parametrize(("clients", "gone"), [(300, 60), (1000, 100)])
def test_the_degree_is_the_least_by_tails_summed_up_by_hand(clients: int, gone: int) -> None:
    def tail(population: int, marked: int, drawn: int, least: int) -> float:
        ways = sum(
            math.comb(marked, x) * math.comb(population - marked, drawn - x)
            for x in range(max(0, least), min(marked, drawn) + 1)
        )
        return float(Fraction(ways, math.comb(population, drawn)))

    def enough(degree: int) -> bool:
        helpers, needed = math.ceil(clients / 5), (degree + 1) // 2 + 1
        return (
            clients * tail(clients - 1, helpers, degree, needed) <= 2**-40
            and clients * tail(clients, helpers + gone, degree // 2, degree // 2) <= 2**-40
            and clients * tail(clients - 1, gone, degree, degree + 2 - needed) <= 2**-20
        )

    degree = Terms(clients, clients - gone, 0.5).degree
    assert enough(degree)
    assert not enough(degree - 2)
    assert hypergeom.sf(degree, clients, gone, degree) == 0


@pytest.mark.parametrize(
    ("clients", "survivors", "threshold"),
    [(10, 6, 2 / 3), (10, 5, 0.5), (10, 2, 0.5), (10, 11, 0.5), (10, 9, 0.4), (10, 10, 1.0)],
)
def test_terms_that_do_not_hold_together_are_refused(
    clients: int, survivors: int, threshold: float
) -> None:
    with pytest.raises(ValueError, match="not allowed"):
        Terms(clients, survivors, threshold)
