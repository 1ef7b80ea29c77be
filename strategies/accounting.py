"""What (ε, δ) a sequence of Gaussian releases costs, and how much noise a budget asks for.

The accounting itself is that of two libraries: Opacus for Rényi accounting (RDP) and numerical
composition (PRV), dp-accounting for privacy loss distributions (PLD) and for cohorts of fixed size.
Every figure is an upper bound on ε, and the least that is known: where PRV is out of its numerical
range PLD answers, where PLD is RDP does, with a warning, and no accountant answers worse than RDP.
"""

import logging
import math
import warnings
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Literal

from .noise import LARGEST_NORMAL
from .privacy_loss import composed_epsilon, gaussian_epsilon
from .release import Charge, Release, real, whole

Accountant = Literal["rdp", "prv", "pld"]
ACCOUNTANTS: tuple[Accountant, ...] = ("rdp", "prv", "pld")

logger = logging.getLogger("blackthorn")

_ORDERS = (*range(2, 65), 72, 80, 96, 112, 128, 160, 192, 256, 384, 512, 768, 1024)
_TENTHS = tuple(1 + x / 10 for x in range(1, 100))
# Without replacement the bound is for integers, interpolated in between.
_DRAWN_ORDERS = (*range(2, 13), 14, 16, 20, 24, 28, 32, 40, 48, 64, 96, 128, 256)
# Where PRV and PLD are trusted: beyond, their grids grow to gigabytes or drown in rounding.
# (Without sampling they need no grid.)
_LARGEST_EPSILON = 100.0
# Below, its square is no number, and epsilon beyond all of them.
_NO_NOISE = 1e-150
# Of delta, what the end of the noise's tails may take for a figure to hold: nothing of its digits.
_CUT_SHARE = 1e-9
# Below, too little of such tails is left beside it.
LEAST_DELTA = 1e-100
_SMALLEST_MULTIPLIER = 0.1
_SMALLEST_DELTA = 1e-10
_MUCH_NOISE = 20.0
_LEAST_EPSILON = 0.01
# PRV's error in ε: this part of it, and this at most; what is reported includes it.
_PRV_ERROR = 0.01
_PRV_LARGEST_GRID = 2**22
# Opacus integrates the mean loss of one round in 22 pieces, to 1.49e-8 each.
_PRV_MEAN_ERROR = 22 * 1.49e-8


@dataclass(frozen=True)
class Figure:
    """An upper bound on ε, and the accountant that gave it (not always the one asked for)."""

    epsilon: float
    accountant: Accountant


def spent(charges: Sequence[Charge], delta: float, accountant: Accountant = "rdp") -> Figure:
    """ε at `delta` of all `charges`: releases, each with how often it happened.

    Infinite where there is a release without noise, or where noise ends before a client's influence
    is hidden in it (`_cut`). Raises ValueError for a delta outside [10^-100, 1), counts that are no
    integers or more than 10^12, an unknown accountant, or both kinds of neighbours in one sum.
    """
    figure, problem = _answer(charges, delta, accountant)
    if problem:
        logger.warning("%s", _told(accountant, problem, figure))
    return figure


def replaced(charges: Sequence[Charge], delta: float, accountant: Accountant) -> str | None:
    """A line where the figure of `spent` is another accountant's than the one asked for."""
    figure, problem = _answer(charges, delta, accountant)
    return _told(accountant, problem, figure) if problem else None


def _told(accountant: Accountant, problem: str, figure: Figure) -> str:
    who = figure.accountant
    return f"accountant {accountant} is out of its range ({problem}): the figure is {who}'s"


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
    rounds = whole("rounds", rounds)

    def excess(z: float, by: Accountant) -> float:
        return _answer([(release(z), rounds)], delta, by)[0].epsilon - epsilon

    found = _smallest(lambda z: excess(z, "rdp"), 1.0, epsilon)
    if accountant != "rdp":
        # The others ask for less noise than RDP, and cost more to ask.
        found = _smallest(lambda z: excess(z, accountant), found, epsilon)
        # Says once who answered.
        spent([(release(found), rounds)], delta, accountant)
    return found


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
    """Raises ValueError for a δ outside [10^-100, 1)."""
    if not LEAST_DELTA <= delta < 1:
        raise ValueError(f"delta = {delta} is not allowed: at least {LEAST_DELTA:g}, less than 1")


def _answer(charges: Sequence[Charge], delta: float, accountant: Accountant) -> tuple[Figure, str]:
    """The figure, and why another accountant than the one asked for gave it ("": it did not)."""
    check_delta(delta)
    delta = real("delta", delta)
    if accountant not in ACCOUNTANTS:
        raise ValueError(f"accountant = {accountant!r} is not allowed: {', '.join(ACCOUNTANTS)}")
    counted = _merged(charges)
    drawn = any(release.drawn is not None for release, _ in counted)
    if drawn and any(release.sample_rate < 1 for release, _ in counted):
        raise ValueError("Poisson and fixed cohorts have different neighbours: no common figure")
    if not counted:
        return Figure(0.0, accountant), ""
    if is_unbounded(counted, delta):
        return Figure(math.inf, accountant), ""
    upper = Figure(_rdp_epsilon(counted, delta), "rdp")
    return (upper, "") if accountant == "rdp" else _composed(accountant, counted, delta, upper)


def is_unbounded(charges: Sequence[Charge], delta: float) -> bool:
    """Whether there is so little noise that no finite ε holds at δ."""
    if any(release.noise_multiplier < _NO_NOISE for release, _ in charges):
        return True
    return _cut(_merged(charges)) > _CUT_SHARE * delta


def _cut(charges: Sequence[Charge]) -> float:
    """What δ may not be below, whatever ε: Σ P(N > R − 1/z), N normal, for numbers that end at R.

    A client moves a release by 1/z deviations at most. Beyond R − 1/z there are outputs that are
    impossible without it.
    """
    return sum(
        count * math.erfc((LARGEST_NORMAL - 1 / release.noise_multiplier) / math.sqrt(2)) / 2
        for release, count in charges
    )


def _composed(
    accountant: Accountant, charges: Sequence[Charge], delta: float, upper: Figure
) -> tuple[Figure, str]:
    """As `_answer`, by PRV or PLD: never worse than `upper`, RDP's."""
    try:
        problem = _out_of_range(accountant, charges, delta, upper.epsilon)
        compute = _prv_epsilon if accountant == "prv" else composed_epsilon
        if all(_is_whole(release) for release, _ in charges):
            # Then both compose the same normal law, without any grid.
            problem, compute = "", gaussian_epsilon
        epsilon = math.nan if problem else compute(charges, delta)
        problem = problem or ("" if 0 <= epsilon < math.inf else f"its answer is {epsilon}")
    except (ArithmeticError, MemoryError, RuntimeError, ValueError, Warning) as error:
        problem = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    if not problem:
        figure = Figure(epsilon, accountant)
    elif accountant == "prv":
        figure, _ = _composed("pld", charges, delta, upper)
    else:
        figure = upper
    return min(figure, upper, key=lambda one: one.epsilon), problem


def _merged(charges: Sequence[Charge]) -> list[Charge]:
    total: dict[Release, int] = {}
    for release, count in charges:
        if count != 0:
            # Of clients that take turns each is in every b-th of them.
            turns = -(-whole("releases", count) // release.groups)
            once = replace(release, groups=1)
            # Of more, what one of them costs is lost in the rounding of its logarithm.
            total[once] = whole("releases", total.get(once, 0) + turns)
    return list(total.items())


def _is_whole(release: Release) -> bool:
    """Whether everybody takes part, in Gaussian noise: there is nothing that sampling could
    amplify."""
    if release.concentrated:
        return False
    if release.drawn is not None:
        return release.drawn[0] == release.drawn[1]
    return release.sample_rate == 1


def _out_of_range(
    accountant: Accountant, charges: Sequence[Charge], delta: float, upper: float
) -> str:
    if accountant == "prv" and any(release.drawn is not None for release, _ in charges):
        return "it knows no cohorts drawn without replacement"
    if any(release.concentrated for release, _ in charges):
        return "of discrete noise a bound by RDP is known alone"
    if delta < _SMALLEST_DELTA:
        return f"delta = {delta:g} is below {_SMALLEST_DELTA:g}"
    if upper > _LARGEST_EPSILON:
        return f"epsilon is beyond {_LARGEST_EPSILON:g}"
    smallest = min(release.noise_multiplier for release, _ in charges)
    if smallest < _SMALLEST_MULTIPLIER:
        return f"noise multiplier {smallest:g} is below {_SMALLEST_MULTIPLIER:g}"
    return ""


def _rdp_epsilon(charges: Sequence[Charge], delta: float) -> float:
    whole = tuple((replace(release, drawn=None), count) for release, count in charges)
    epsilon = _rdp_epsilon_poisson(whole, delta)
    if any(release.drawn is not None for release, _ in charges):
        # Its bound can be worse than none: drawing never costs.
        epsilon = min(epsilon, _rdp_epsilon_drawn(tuple(charges), delta))
    return epsilon


@lru_cache(maxsize=256)
def _rdp_epsilon_poisson(charges: tuple[Charge, ...], delta: float) -> float:
    """The least over orders α of the bound (K(α) − ln δ + (α−1) ln(α−1) − α ln α) / (α−1).

    K(α), (α−1) times the RDP, is convex in α, as is the rest of what is divided: so the bound has
    one valley. Beside the best whole order are the tenths, for each of which Opacus takes long.
    """

    @cache
    def bound(order: float) -> float:
        return _rdp_bound(charges, delta, order)

    best = _valley(bound, _ORDERS)
    beside = [order for order in _TENTHS if abs(order - best) < 1]
    return max(0.0, min(bound(best), bound(_valley(bound, beside)) if beside else math.inf))


def _valley(bound: Callable[[float], float], orders: Sequence[float]) -> float:
    """The order at which `bound`, which falls and then rises over them, is least."""
    place = bisect_left(
        range(len(orders) - 1), True, key=lambda i: bound(orders[i]) <= bound(orders[i + 1])
    )
    return orders[place]


def _rdp_bound(charges: Sequence[Charge], delta: float, order: float) -> float:
    """ε at δ by the RDP of this order alone; infinite where Opacus has no number."""
    from opacus.accountants.analysis.rdp import get_privacy_spent

    rdp = sum(
        count * _rdp(release.sample_rate, release.noise_multiplier, order)
        for release, count in charges
    )
    if rdp == math.inf:
        return math.inf
    with warnings.catch_warnings():
        # That the best order is the first or last one makes the bound loose, not wrong.
        warnings.simplefilter("ignore")
        return float(get_privacy_spent(orders=order, rdp=rdp, delta=delta)[0])


@lru_cache(maxsize=4096)
def _rdp(sample_rate: float, noise_multiplier: float, order: float) -> float:
    """RDP of one release (infinite where Opacus has no number)."""
    from opacus.accountants.analysis.rdp import compute_rdp

    if sample_rate < 1 and noise_multiplier >= _MUCH_NOISE and order != int(order):
        # Under much noise the fractional orders are never the best, and take Opacus seconds.
        return math.inf
    (rdp,) = compute_rdp(q=sample_rate, noise_multiplier=noise_multiplier, steps=1, orders=[order])
    return math.inf if math.isnan(rdp) else float(rdp)


@lru_cache(maxsize=256)
def _rdp_epsilon_drawn(charges: tuple[Charge, ...], delta: float) -> float:
    import dp_accounting
    from dp_accounting.rdp import RdpAccountant

    relation = dp_accounting.NeighboringRelation.REPLACE_ONE
    accountant = RdpAccountant(_DRAWN_ORDERS, relation)
    for release, count in charges:
        event: dp_accounting.DpEvent = dp_accounting.GaussianDpEvent(release.noise_multiplier)
        if release.drawn is not None:
            size, population = release.drawn
            event = dp_accounting.SampledWithoutReplacementDpEvent(population, size, event)
        accountant.compose(event, count)
    return float(accountant.get_epsilon(delta))


def _prv_epsilon(charges: Sequence[Charge], delta: float) -> float:
    """ε with PRV's own error, which is 1 % of it or less."""
    error = _PRV_ERROR * min(1.0, _rdp_epsilon(charges, delta))
    while True:
        epsilon = _prv_epsilon_within(error, charges, delta)
        # By RDP's figure it may have been far too coarse; ends where the grid is too large.
        if not error > 2 * _PRV_ERROR * epsilon:
            return epsilon
        error = _PRV_ERROR * epsilon


def _prv_epsilon_within(error: float, charges: Sequence[Charge], delta: float) -> float:
    from opacus.accountants import PRVAccountant
    from scipy.integrate import IntegrationWarning

    total = sum(count for _, count in charges)
    mean_error = total * _PRV_MEAN_ERROR
    if mean_error > error:
        raise ArithmeticError(f"the mean loss is known to {mean_error:.2g}")
    mesh = error / math.sqrt(total * math.log(12 / (delta / 1000)) / 2)
    reach = 2 * (_rdp_epsilon(charges, delta / 4000) + 3)
    if reach / mesh > _PRV_LARGEST_GRID:
        raise ArithmeticError(f"a grid of {reach / mesh:.3g} points")
    accountant = PRVAccountant()
    accountant.history = [(r.noise_multiplier, r.sample_rate, count) for r, count in charges]
    with warnings.catch_warnings():
        # Opacus takes logarithms of 0 in branches whose values it then discards, and says of its
        # own grid that an order is its last one.
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", IntegrationWarning)
        return float(accountant.get_epsilon(delta, eps_error=error)) + mean_error
