"""What released models say about a privacy claim: estimates and lower bounds of ε from canaries."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import stats
from scipy.optimize import brentq
from scipy.special import betainccinv, betaincinv

_LARGEST = 200.0
_GRID = 20_001
# Thresholds that are tried.
_QUANTILES = np.linspace(0, 1, 101)


@dataclass(frozen=True)
class Finding:
    """What one attack says of a claim: ε is at least `found` at `delta`, where `claimed` is claimed
    (it is too high with probability 1 - confidence). `estimate`: what the attack takes ε to be."""

    attack: str
    delta: float
    claimed: float
    found: float
    estimate: float | None = None

    @property
    def refutes(self) -> bool:
        """Whether it contradicts the claim."""
        return self.found > self.claimed


@dataclass(frozen=True)
class OneShot:
    """ε of one run with many canaries (Andrew et al., 2023): a point estimate, and a cautious one
    from a lower confidence bound on the mean, with the law's spread that of canaries that took no
    part."""

    epsilon: float
    epsilon_low: float
    mean: float
    deviation: float


def one_shot_epsilon(
    cosines: np.ndarray, dimension: int, delta: float, confidence: float = 0.95
) -> OneShot:
    """From the cosines [k] of k canaries in random directions to what was released.

    A canary that did not take part has a cosine of law N(0, 1/d); the others' is fitted by a
    Gaussian. ε is where the two laws are (ε, δ)-indistinguishable. A fitted variance counts only
    where a chi-square test tells it from 1/d (at 1 %): far out in the tails, where δ is decided,
    the error of a few hundred canaries would rule. `epsilon_low` is too high with probability
    1 - confidence (Student's t). Raises ValueError for fewer than 10 canaries.
    """
    if len(cosines) < 10:
        raise ValueError(f"{len(cosines)} canaries are not enough to fit a law: at least 10")
    mean, deviation = float(cosines.mean()), float(cosines.std(ddof=1))
    count, spread = len(cosines), 1 / math.sqrt(dimension)
    ratio = (count - 1) * deviation**2 * dimension
    usual = stats.chi2.ppf(0.005, count - 1) <= ratio <= stats.chi2.ppf(0.995, count - 1)
    low = mean - stats.t.ppf(confidence, count - 1) * deviation / math.sqrt(count)
    return OneShot(
        epsilon=gaussian_pair_epsilon(spread, mean, spread if usual else deviation, delta),
        epsilon_low=gaussian_pair_epsilon(spread, max(0.0, low), spread, delta),
        mean=mean,
        deviation=deviation,
    )


def gaussian_pair_epsilon(spread: float, mean: float, deviation: float, delta: float) -> float:
    """The least ε ≥ 0 with which N(0, spread²) and N(mean, deviation²) are (ε, δ)-close."""
    scale = max(spread, deviation)
    x = np.linspace(min(0.0, mean) - 12 * scale, max(0.0, mean) + 12 * scale, _GRID)
    log_p, log_q = stats.norm.logpdf(x, 0, spread), stats.norm.logpdf(x, mean, deviation)
    step = x[1] - x[0]

    def excess(epsilon: float) -> float:
        one = np.maximum(0, np.exp(log_p) - np.exp(epsilon + log_q)).sum() * step
        other = np.maximum(0, np.exp(log_q) - np.exp(epsilon + log_p)).sum() * step
        return float(max(one, other)) - delta

    if excess(0.0) <= 0:
        return 0.0
    return float(brentq(excess, 0.0, _LARGEST)) if excess(_LARGEST) < 0 else math.inf


def lower_bound(
    present: np.ndarray, absent: np.ndarray, delta: float, confidence: float = 0.95
) -> float:
    """An ε that every mechanism with these outcomes has at least, with the given confidence.

    `present` and `absent` are a statistic of independent runs with and without the canary. The
    first halves choose a threshold and a side, the second halves count; (ε, δ) needs
    P(A | one) ≤ e^ε P(A | other) + δ, with Clopper-Pearson bounds on both sides.
    """
    tuning = [values[: len(values) // 2] for values in (present, absent)]
    counting = [values[len(values) // 2 :] for values in (present, absent)]
    chosen, best = _sides(tuning[0].mean())[0], -math.inf
    for threshold in np.unique(np.quantile(np.concatenate(tuning), _QUANTILES)):
        for side in _sides(float(threshold)):
            value = _bound(side, tuning[0], tuning[1], delta, confidence)
            if value > best:
                chosen, best = side, value
    return max(0.0, _bound(chosen, counting[0], counting[1], delta, confidence))


Side = tuple[Callable[[np.ndarray], np.ndarray], bool]


def _sides(threshold: float) -> list[Side]:
    """The event "above" as evidence of presence, and the event "below" as evidence of absence."""
    return [(lambda s: s > threshold, True), (lambda s: s <= threshold, False)]


def _bound(
    side: Side, present: np.ndarray, absent: np.ndarray, delta: float, confidence: float
) -> float:
    event, of_presence = side
    likely, unlikely = (present, absent) if of_presence else (absent, present)
    tail = (1 - confidence) / 2
    low = clopper_pearson(int(event(likely).sum()), len(likely), tail)[0] - delta
    high = clopper_pearson(int(event(unlikely).sum()), len(unlikely), tail)[1]
    return math.log(low / high) if low > 0 else -math.inf


def clopper_pearson(successes: int, trials: int, tail: float) -> tuple[float, float]:
    """Exact bounds on a probability: each is wrong with probability `tail` at most."""
    low = betaincinv(successes, trials - successes + 1, tail) if successes else 0.0
    high = betainccinv(successes + 1, trials - successes, tail) if successes < trials else 1.0
    return float(low), float(high)
