"""What (ε, δ) a sequence of Gaussian releases costs, and how much noise a budget asks for.

Releases are inert data; the accounting itself is that of two libraries: Opacus for Rényi
accounting (RDP) and numerical composition (PRV), dp-accounting for privacy loss distributions
(PLD) and for cohorts of fixed size. Every figure is an upper bound on ε; outside of the numerical
range of PRV and PLD the RDP figure, which is larger, is given instead, with a warning.
"""

import logging
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

Accountant = Literal["rdp", "prv", "pld"]
ACCOUNTANTS: tuple[Accountant, ...] = ("rdp", "prv", "pld")

logger = logging.getLogger("blackthorn")

_ORDERS = (
    *(1 + x / 10 for x in range(1, 100)),
    *range(11, 64),
    *(64, 72, 80, 96, 112, 128, 160, 192, 256, 384, 512, 768, 1024),
)
# Where PRV and PLD are trusted: beyond, their grids grow to gigabytes or drown in rounding.
_LARGEST_EPSILON = 100.0
_SMALLEST_MULTIPLIER = 0.1
_SMALLEST_DELTA = 1e-10
_MUCH_NOISE = 20.0
_LEAST_EPSILON = 0.01
_PRV_ERROR = 0.01
_PRV_LARGEST_GRID = 2**24


@dataclass(frozen=True)
class Release:
    """One noised sum: N(0, (z S)² I) on a sum that neighbouring populations move by at most S.

    `noise_multiplier` z is relative to that sensitivity S. `sample_rate` q: each client joined on
    its own with probability q (neighbours: one client added or removed). `drawn` = (n, m): n of m
    clients were drawn without replacement (neighbours: one client replaced by another). With
    q = 1 and nothing drawn there is no amplification by sampling.

    Raises ValueError for values out of range.
    """

    noise_multiplier: float
    sample_rate: float = 1.0
    drawn: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.noise_multiplier < math.inf:
            raise ValueError(
                f"noise multiplier = {self.noise_multiplier} is not allowed: 0 or more, finite"
            )
        if not 0 < self.sample_rate <= 1:
            raise ValueError(f"sample rate = {self.sample_rate} is not allowed: 0 to 1, not 0")
        if self.drawn is not None and not 1 <= self.drawn[0] <= self.drawn[1]:
            raise ValueError(
                f"a cohort of {self.drawn[0]} of {self.drawn[1]} clients is not allowed: "
                "from 1 to all of them"
            )


Charge = tuple[Release, int]


@dataclass(frozen=True)
class Figure:
    """An upper bound on ε, and the accountant that gave it (not always the one asked for)."""

    epsilon: float
    accountant: Accountant


def spent(charges: Sequence[Charge], delta: float, accountant: Accountant = "rdp") -> Figure:
    """ε at `delta` of all `charges`: releases, each with how often it happened.

    Infinite where there is a release without noise. Raises ValueError for a delta outside (0, 1),
    an unknown accountant, or both kinds of neighbours in one sum.
    """
    check_delta(delta)
    if accountant not in ACCOUNTANTS:
        raise ValueError(f"accountant = {accountant!r} is not allowed: {', '.join(ACCOUNTANTS)}")
    counted = _merged(charges)
    drawn = [release for release, _ in counted if release.drawn is not None]
    if drawn and any(release.sample_rate < 1 for release, _ in counted):
        raise ValueError("Poisson and fixed cohorts have different neighbours: no common figure")
    if not counted:
        return Figure(0.0, accountant)
    if any(release.noise_multiplier == 0 for release, _ in counted):
        return Figure(math.inf, accountant)
    upper = _rdp_epsilon(counted, delta)
    if accountant == "rdp":
        return Figure(upper, "rdp")
    compute = _prv_epsilon if accountant == "prv" else _pld_epsilon
    try:
        problem = _out_of_range(counted, delta, upper, bool(drawn))
        epsilon = math.nan if problem else compute(counted, delta)
        problem = problem or ("" if 0 <= epsilon < math.inf else f"its answer is {epsilon}")
    except (ArithmeticError, MemoryError, RuntimeError, ValueError) as error:
        problem = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    if problem:
        logger.warning(
            "accountant %s is out of its range (%s): the figure is RDP's", accountant, problem
        )
        return Figure(upper, "rdp")
    return Figure(epsilon, accountant)


def calibrate_noise_multiplier(
    epsilon: float,
    delta: float,
    sample_rate: float,
    rounds: int,
    accountant: Accountant = "rdp",
) -> float:
    """The smallest z with which `rounds` rounds of the Gaussian mechanism, each client joining with
    probability `sample_rate`, cost at most (`epsilon`, `delta`); within 0.02 %, from above.

    Raises ValueError for values out of range.
    """
    return calibrate(
        epsilon, delta, lambda z: Release(z, sample_rate=sample_rate), rounds, accountant
    )


def calibrate(
    epsilon: float,
    delta: float,
    release: Callable[[float], Release],
    rounds: int,
    accountant: Accountant = "rdp",
) -> float:
    """As calibrate_noise_multiplier, for any kind of release, given as a function of z."""
    check_delta(delta)
    if not _LEAST_EPSILON <= epsilon < math.inf:
        raise ValueError(f"epsilon = {epsilon} is not allowed: {_LEAST_EPSILON} or more, finite")
    if rounds < 1:
        raise ValueError(f"rounds = {rounds} is not allowed: at least 1")

    def excess(z: float, by: Accountant) -> float:
        return spent([(release(z), rounds)], delta, by).epsilon - epsilon

    upper = _smallest(lambda z: excess(z, "rdp"), 1.0, epsilon)
    if accountant == "rdp":
        return upper
    # The others ask for less noise than RDP, and cost more to ask.
    return _smallest(lambda z: excess(z, accountant), upper, epsilon)


def _smallest(excess: Callable[[float], float], start: float, epsilon: float) -> float:
    """The z above which `excess` over `epsilon`, decreasing in z, is not positive."""
    from scipy.optimize import brentq

    high = start
    while excess(high) > 0:
        high *= 2
        if high > 1e6:
            raise ValueError(
                f"epsilon = {epsilon} is not allowed: no noise multiplier up to 10^6 keeps to it"
            )
    low = high / 1.4
    while excess(low) <= 0:
        high, low = low, low / 1.4
        if low < 1e-6:
            raise ValueError("this epsilon needs no noise that could be told from none")
    root = float(brentq(excess, low, high, xtol=1e-4 * low, rtol=1e-5))
    while excess(root) > 0:
        root *= 1 + 1e-4
    return min(root, high)


def check_delta(delta: float) -> None:
    """Raises ValueError for a δ outside (0, 1)."""
    if not 0 < delta < 1:
        raise ValueError(f"delta = {delta} is not allowed: between 0 and 1")


def _merged(charges: Sequence[Charge]) -> list[Charge]:
    total: dict[Release, int] = {}
    for release, count in charges:
        if count < 0:
            raise ValueError(f"{count} releases are not allowed: 0 or more")
        if count:
            total[release] = total.get(release, 0) + count
    return list(total.items())


def _out_of_range(charges: Sequence[Charge], delta: float, upper: float, drawn: bool) -> str:
    if drawn:
        return "only RDP accounts for cohorts drawn without replacement"
    if delta < _SMALLEST_DELTA:
        return f"delta = {delta:g} is below {_SMALLEST_DELTA:g}"
    if upper > _LARGEST_EPSILON:
        return f"epsilon is beyond {_LARGEST_EPSILON:g}"
    smallest = min(release.noise_multiplier for release, _ in charges)
    if smallest < _SMALLEST_MULTIPLIER:
        return f"noise multiplier {smallest:g} is below {_SMALLEST_MULTIPLIER:g}"
    return ""


def _rdp_epsilon(charges: Sequence[Charge], delta: float) -> float:
    if any(release.drawn is not None for release, _ in charges):
        return _rdp_epsilon_drawn(tuple(charges), delta)
    from opacus.accountants.analysis.rdp import get_privacy_spent

    curve = [0.0] * len(_ORDERS)
    for release, count in charges:
        step = _rdp_curve(release.sample_rate, release.noise_multiplier)
        curve = [total + count * one for total, one in zip(curve, step, strict=True)]
    usable = [(a, r) for a, r in zip(_ORDERS, curve, strict=True) if r < math.inf]
    if not usable:
        return math.inf
    orders, values = zip(*usable, strict=True)
    with warnings.catch_warnings():
        # That the best order is the first or last one makes the bound loose, not wrong.
        warnings.simplefilter("ignore")
        epsilon, _ = get_privacy_spent(orders=list(orders), rdp=list(values), delta=delta)
    return max(0.0, float(epsilon))


@lru_cache(maxsize=256)
def _rdp_curve(sample_rate: float, noise_multiplier: float) -> tuple[float, ...]:
    """RDP of one release at every order (infinite where Opacus has no number)."""
    from opacus.accountants.analysis.rdp import compute_rdp

    # Under much noise the fractional orders are never the best, and take Opacus seconds.
    quick = sample_rate == 1 or noise_multiplier < _MUCH_NOISE
    orders = [a for a in _ORDERS if quick or a == int(a)]
    values = compute_rdp(q=sample_rate, noise_multiplier=noise_multiplier, steps=1, orders=orders)
    curve = {a: float(value) for a, value in zip(orders, values, strict=True) if value == value}
    return tuple(curve.get(a, math.inf) for a in _ORDERS)


@lru_cache(maxsize=256)
def _rdp_epsilon_drawn(charges: tuple[Charge, ...], delta: float) -> float:
    import dp_accounting
    from dp_accounting.rdp import RdpAccountant

    relation = dp_accounting.NeighboringRelation.REPLACE_ONE
    accountant = RdpAccountant(neighboring_relation=relation)
    for release, count in charges:
        event: dp_accounting.DpEvent = dp_accounting.GaussianDpEvent(release.noise_multiplier)
        if release.drawn is not None:
            size, population = release.drawn
            event = dp_accounting.SampledWithoutReplacementDpEvent(population, size, event)
        accountant.compose(event, count)
    return float(accountant.get_epsilon(delta))


def _prv_epsilon(charges: Sequence[Charge], delta: float) -> float:
    from opacus.accountants import PRVAccountant

    total = sum(count for _, count in charges)
    mesh = _PRV_ERROR / math.sqrt(total * math.log(12 / (delta / 1000)) / 2)
    reach = 2 * (_rdp_epsilon(charges, delta / 4000) + 3)
    if reach / mesh > _PRV_LARGEST_GRID:
        raise ArithmeticError(f"a grid of {reach / mesh:.3g} points")
    accountant = PRVAccountant()
    accountant.history = [(r.noise_multiplier, r.sample_rate, count) for r, count in charges]
    with warnings.catch_warnings():
        # Opacus takes logarithms of 0 in branches whose values it then discards.
        warnings.simplefilter("ignore", RuntimeWarning)
        return float(accountant.get_epsilon(delta, eps_error=_PRV_ERROR))


def _pld_epsilon(charges: Sequence[Charge], delta: float) -> float:
    import dp_accounting
    from dp_accounting.pld import PLDAccountant

    accountant = PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    for release, count in charges:
        event: dp_accounting.DpEvent = dp_accounting.GaussianDpEvent(release.noise_multiplier)
        if release.sample_rate < 1:
            event = dp_accounting.PoissonSampledDpEvent(release.sample_rate, event)
        accountant.compose(event, count)
    return float(accountant.get_epsilon(delta))
