"""Privacy accounting: golden figures, each against a second library or a closed form."""

import logging
import math
from collections.abc import Callable
from fractions import Fraction

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from opacus.accountants import PRVAccountant
from scipy.optimize import brentq
from scipy.stats import norm

from blackthorn.settings.config import make_config
from blackthorn.strategies import Release, accounting, calibrate_noise_multiplier, spent
from blackthorn.strategies.accounting import Accountant, calibrate

DELTA = 1e-5
WITHIN = 0.005
# (q, z, T) -> RDP, PLD
GOLDEN = [
    ((0.01, 1.0, 1000), 2.1014, 1.8282),
    ((0.1, 1.0, 100), 7.904, 7.047),
    ((0.2, 2.0, 200), 8.029, 7.372),
    ((1.0, 10.0, 100), 4.729, 4.377),
]
FIXED = Release(2.0 / 2, drawn=(100, 1000))


def event(q: float, z: float) -> dp_accounting.DpEvent:
    gaussian = dp_accounting.GaussianDpEvent(z)
    return gaussian if q == 1 else dp_accounting.PoissonSampledDpEvent(q, gaussian)


@pytest.mark.parametrize(("mechanism", "rdp", "pld"), GOLDEN)
def test_every_accountants_figure_is_the_known_one(
    mechanism: tuple[float, float, int], rdp: float, pld: float
) -> None:
    q, z, rounds = mechanism
    charges = [(Release(z, sample_rate=q), rounds)]
    found = {name: spent(charges, DELTA, name) for name in accounting.ACCOUNTANTS}
    assert {name: figure.accountant for name, figure in found.items()} == {
        name: name for name in accounting.ACCOUNTANTS
    }
    assert found["rdp"].epsilon == pytest.approx(rdp, rel=WITHIN)
    assert found["pld"].epsilon == pytest.approx(pld, rel=WITHIN)
    # PRV states an error of 0.01 and is never below the exact figure.
    assert pld * (1 - WITHIN) <= found["prv"].epsilon <= pld * (1 + WITHIN) + 0.011


@pytest.mark.parametrize(("mechanism", "rdp", "pld"), GOLDEN)
def test_golden_figures_by_the_other_library(
    mechanism: tuple[float, float, int], rdp: float, pld: float
) -> None:
    q, z, rounds = mechanism
    theirs = RdpAccountant()
    theirs.compose(event(q, z), rounds)
    ours = spent([(Release(z, sample_rate=q), rounds)], DELTA)
    assert ours.epsilon == pytest.approx(theirs.get_epsilon(DELTA), rel=WITHIN)
    opacus = PRVAccountant()
    opacus.history = [(z, q, rounds)]
    prv = float(opacus.get_epsilon(DELTA))
    assert spent([(Release(z, sample_rate=q), rounds)], DELTA, "pld").epsilon == pytest.approx(
        prv, abs=0.011
    )
    assert prv == pytest.approx(pld, abs=0.02)
    assert rdp > prv


def gaussian_epsilon(z: float, rounds: int, delta: float) -> float:
    """T Gaussian releases are one with z/√T; its exact (ε, δ) curve is in closed form."""
    mu = math.sqrt(rounds) / z

    def excess(epsilon: float) -> float:
        first = norm.cdf(mu / 2 - epsilon / mu)
        return first - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu) - delta

    return float(brentq(excess, 0, 500))


@pytest.mark.parametrize(("z", "rounds"), [(10.0, 100), (4.0, 1), (20.0, 500)])
@pytest.mark.parametrize("delta", [1e-5, 1e-7])
def test_without_sampling_the_figure_is_the_closed_form(
    z: float, rounds: int, delta: float
) -> None:
    exact = gaussian_epsilon(z, rounds, delta)
    charges = [(Release(z), rounds)]
    assert spent(charges, delta, "pld").epsilon == pytest.approx(exact, rel=WITHIN)
    assert exact <= spent(charges, delta, "prv").epsilon <= exact + 0.021
    assert exact < spent(charges, delta).epsilon < 1.25 * exact


def drawn_rdp(order: int, z: float, size: int, population: int) -> float:
    """Wang, Balle and Kasiviswanathan's bound for a Gaussian, with its binomial sums written out.

    Forward differences of e^{(j-1)ε(j)}, ε(j) = j/(2z²), in exact rationals of rounded terms.
    """
    q = Fraction(size, population)

    def b(j: int) -> Fraction:
        return sum(
            (-1) ** i * math.comb(j, i) * Fraction(math.exp((i - 1) * i / (2 * z * z)))
            for i in range(j + 1)
        )

    total = Fraction(1)
    for j in range(2, order + 1):
        if j == 2:
            e2 = math.exp(2 / (2 * z * z))
            term = Fraction(min(4 * (e2 - 1), 2 * e2))
        else:
            low, high = abs(b(2 * (j // 2))), abs(b(2 * ((j + 1) // 2)))
            term = min(
                4 * Fraction(math.sqrt(low) * math.sqrt(high)),
                2 * Fraction(math.exp((j - 1) * j / (2 * z * z))),
            )
        total += q**j * math.comb(order, j) * term
    return math.log(total) / (order - 1)


def test_a_fixed_cohort_against_its_bound_written_out() -> None:
    """100 of 1000 clients, replace-one, z = 2: the sensitivity is 2C, so the multiplier is 1."""
    rounds = 100
    assert spent([(FIXED, rounds)], DELTA).epsilon == pytest.approx(14.05, rel=WITHIN)
    epsilons = [
        rounds * drawn_rdp(order, 1.0, 100, 1000)
        + math.log1p(-1 / order)
        - (math.log(DELTA) + math.log(order)) / (order - 1)
        for order in range(2, 8)
    ]
    assert spent([(FIXED, rounds)], DELTA).epsilon <= min(epsilons) * (1 + 1e-6)
    # Between the integers the bound is interpolated, and a little lower.
    assert spent([(FIXED, rounds)], DELTA).epsilon == pytest.approx(min(epsilons), rel=0.02)


def test_a_fixed_cohort_is_never_poissons_figure() -> None:
    poisson = spent([(Release(2.0, sample_rate=0.1), 100)], DELTA).epsilon
    assert spent([(FIXED, 100)], DELTA).epsilon > 3 * poisson
    with pytest.raises(ValueError, match="no common figure"):
        spent([(FIXED, 1), (Release(2.0, sample_rate=0.1), 1)], DELTA)


@pytest.mark.parametrize(
    ("rounds", "rdp", "prv"), [(50, 1.664, 1.555), (100, 2.148, 2.012), (200, 2.876, 2.695)]
)
def test_the_calibrated_multiplier_is_the_known_one_and_meets_the_budget(
    rounds: int, rdp: float, prv: float
) -> None:
    goldens: dict[Accountant, float] = {"rdp": rdp, "prv": prv}
    for accountant, golden in goldens.items():
        z = calibrate_noise_multiplier(5.0, DELTA, 0.2, rounds, accountant)
        assert z == pytest.approx(golden, rel=0.01)
    z = calibrate_noise_multiplier(5.0, DELTA, 0.2, rounds, "rdp")
    theirs = RdpAccountant()
    theirs.compose(event(0.2, z), rounds)
    assert theirs.get_epsilon(DELTA) == pytest.approx(5.0, rel=WITHIN)


def test_calibration_keeps_within_the_budget_and_wastes_none() -> None:
    for epsilon, q, rounds in [(0.5, 0.05, 30), (5.0, 0.2, 100), (40.0, 1.0, 10)]:
        z = calibrate_noise_multiplier(epsilon, 1e-6, q, rounds)
        cost = spent([(Release(z, sample_rate=q), rounds)], 1e-6).epsilon
        assert epsilon * (1 - 1e-3) <= cost <= epsilon


def test_calibration_of_a_single_gaussian_by_pld_is_the_closed_form() -> None:
    z = calibrate(2.0, DELTA, Release, 1, "pld")
    assert gaussian_epsilon(z, 1, DELTA) == pytest.approx(2.0, rel=WITHIN)


def test_unequal_rounds_add_up() -> None:
    """In RDP ten Gaussian rounds at z and ten at 2z are ten at the harmonic mean's z."""
    z = 4.0
    both = spent([(Release(z), 10), (Release(2 * z), 10)], DELTA).epsilon
    one = spent([(Release(z / math.sqrt(1.25)), 10)], DELTA).epsilon
    assert both == pytest.approx(one, rel=1e-9)
    theirs = PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    theirs.compose(event(0.1, 1.0), 20).compose(event(0.1, 2.0), 30)
    charges = [(Release(1.0, 0.1), 20), (Release(2.0, 0.1), 30)]
    prv = spent(charges, DELTA, "prv")
    assert prv.accountant == "prv"
    assert theirs.get_epsilon(DELTA) <= prv.epsilon + 1e-3
    assert prv.epsilon == pytest.approx(theirs.get_epsilon(DELTA), abs=0.02)


def test_no_release_costs_nothing_and_one_without_noise_costs_everything() -> None:
    assert spent([], DELTA).epsilon == 0
    assert spent([(Release(1.0), 0)], DELTA).epsilon == 0
    assert spent([(Release(0.0), 1)], DELTA, "prv").epsilon == math.inf


@pytest.mark.parametrize("accountant", ["prv", "pld"])
@pytest.mark.parametrize(
    ("charges", "delta", "why"),
    [
        ([(Release(0.05, 0.5), 3)], DELTA, "epsilon is beyond"),
        ([(Release(1.0, 0.5), 10)], 1e-12, "delta"),
        ([(Release(0.09, 1e-4), 1)], DELTA, "0.09"),
    ],
)
def test_out_of_range_the_figure_is_rdps(
    accountant: accounting.Accountant,
    charges: list[accounting.Charge],
    delta: float,
    why: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, logger="blackthorn"):
        figure = spent(charges, delta, accountant)
    assert figure == spent(charges, delta, "rdp")
    assert figure.accountant == "rdp"
    assert why in caplog.text


@pytest.mark.parametrize("answer", [RuntimeError("mean differs"), math.nan, math.inf, -1.0])
def test_a_library_that_fails_costs_tightness_and_nothing_else(
    answer: float | Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(self: PRVAccountant, delta: float, **options: float) -> float:
        del self, delta, options
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(PRVAccountant, "get_epsilon", broken)
    charges = [(Release(1.0, 0.1), 100)]
    with caplog.at_level(logging.WARNING, logger="blackthorn"):
        assert spent(charges, DELTA, "prv") == spent(charges, DELTA, "pld")
    assert "the figure is pld's" in caplog.text
    monkeypatch.setattr(accounting, "composed_epsilon", lambda *_: broken(None, DELTA))
    with caplog.at_level(logging.WARNING, logger="blackthorn"):
        assert spent(charges, DELTA, "prv") == spent(charges, DELTA, "rdp")
    assert "the figure is rdp's" in caplog.text


def test_prv_leaves_cohorts_without_replacement_to_pld(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="blackthorn"):
        figure = spent([(FIXED, 10)], DELTA, "prv")
    assert figure == spent([(FIXED, 10)], DELTA, "pld")
    assert figure.accountant == "pld"
    assert "without replacement" in caplog.text


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: spent([], 0.0), "delta = 0"),
        (lambda: spent([], 1.0), "delta = 1"),
        (lambda: spent([], DELTA, "gdp"), "accountant = 'gdp'"),  # type: ignore[arg-type]
        (lambda: Release(-1.0), "noise multiplier = -1"),
        (lambda: Release(math.nan), "noise multiplier = nan"),
        (lambda: Release(1.0, 0.0), "sample rate = 0"),
        (lambda: Release(1.0, 1.5), "sample rate = 1.5"),
        (lambda: Release(1.0, drawn=(11, 10)), "11 of 10"),
        (lambda: Release(1.0, drawn=(0, 10)), "clients drawn = 0"),
        (lambda: Release(1.0, drawn=(1.5, 10)), "clients drawn = 1.5"),  # type: ignore[arg-type]
        (lambda: Release(1.0, shares=2.5), "shares = 2.5"),  # type: ignore[arg-type]
        (lambda: spent([(Release(1.0), -1)], DELTA), "releases = -1"),
        (lambda: spent([(Release(1.0), 2.5)], DELTA), "releases = 2.5"),  # type: ignore[list-item]
        (lambda: spent([(Release(1.0), math.nan)], DELTA, "pld"), "releases = nan"),  # type: ignore[list-item]
        (lambda: spent([(Release(1e4, 1e-8), 10**13)], DELTA), "releases = 10000000000000"),
        (lambda: spent([(Release(1e4, 1e-8), 10**12)] * 2, DELTA), "releases = 2000000000000"),
        (lambda: calibrate_noise_multiplier(0.0, DELTA, 0.1, 10), "epsilon = 0"),
        (lambda: calibrate_noise_multiplier(1.0, DELTA, 0.1, 0), "rounds = 0"),
        (lambda: calibrate_noise_multiplier(1.0, 2.0, 0.1, 1), "delta = 2"),
    ],
)
def test_wrong_values_are_one_line(wrong: Callable[[], object], said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        wrong()
    assert "\n" not in str(caught.value)


def _of_any_type(kind: type) -> Release:
    return Release(kind(300.0), drawn=(np.uint8(100), np.uint8(200)), groups=np.int8(1))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, Fraction, int])
def test_a_figure_is_the_same_whatever_type_its_numbers_have(kind: type) -> None:
    """A sum of counts overflowed in NumPy's small integers, and z² in its small floats; what was
    so computed once was remembered for Python's own numbers, which are equal."""
    accounting._rdp.cache_clear()
    accounting._rdp_epsilon_poisson.cache_clear()
    accounting._rdp_epsilon_drawn.cache_clear()
    charges = [(Release(kind(300)), np.uint8(200)), (Release(kind(300)), np.uint8(100))]
    written_out = min(
        300 * a / (2 * 300**2) + math.log((a - 1) / a) - math.log(DELTA * a) / (a - 1)
        for a in accounting._ORDERS
    )
    for accountant in accounting.ACCOUNTANTS:
        told = spent(charges, DELTA, accountant)  # type: ignore[arg-type]
        assert told == spent([(Release(300.0), 300)], DELTA, accountant)
    assert spent(charges, DELTA).epsilon == pytest.approx(written_out, rel=1e-9)  # type: ignore[arg-type]
    assert _of_any_type(kind) == Release(300.0, drawn=(100, 200))
    assert type(_of_any_type(kind).noise_multiplier) is float
    assert all(type(n) is int for n in _of_any_type(kind).drawn or ())


@pytest.mark.parametrize(
    ("z", "rounds", "delta", "figure"),
    [
        (0.1, 1, 1e-5, True),
        (0.05, 1000, 1e-5, True),
        (0.05, 1, 1e-100, False),
        (0.03, 1, 1e-5, False),
        (0.03, 1, 0.5, False),
        (0.02, 1, 1e-5, False),
        (1.0, 10**6, 1e-100, True),
    ],
)
@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_no_figure_is_for_noise_that_ends_beside_a_client(
    z: float, rounds: int, delta: float, figure: bool, accountant: Accountant
) -> None:
    """Numbers end at R = 36.5. What they reach in T rounds only with the client there has
    probability T P(N > R - 1/z), which δ is not below, whatever ε."""
    epsilon = spent([(Release(z), rounds)], delta, accountant).epsilon
    assert math.isfinite(epsilon) == figure
    impossible_without = rounds * norm.sf(36.47 - 1 / z)
    if figure:
        assert impossible_without < 1e-9 * delta
    else:
        assert impossible_without > 1e-9 * delta


@pytest.mark.parametrize("delta", [0.0, 1e-300, 1e-101, 1.0, math.nan])
def test_a_delta_that_no_tail_reaches_is_refused(delta: float) -> None:
    with pytest.raises(ValueError, match="is not allowed: at least 1e-100, less than 1"):
        spent([(Release(1.0), 1)], delta)
    with pytest.raises(ValueError, match="is not allowed"):
        make_config({"delta": delta})
