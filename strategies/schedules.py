"""Orders of magnitude for rates, thresholds and local steps, from the papers' theorems.

FAT-Clipping (Yang et al., Theorems 1 to 4), Byzantine-resilient local SGD (Data and Diggavi,
Theorems 1 and 2), DP-FedAvg (Das et al., Theorems 1 and 2), CE-FedAvg (Zhang et al., section 3).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ClippingSchedule:
    """What a theorem prescribes up to constants. Orders, not tuned values.

    `global_lr` is η_g η_l; `local_lr_at_most` bounds η_l; `clip_norm` is λ in gradient units
    (None where the theorem leaves it open); `rate` is the bound's order. In Theorem 4 the printed
    bound on η_l leaves the term K² η_l² λ^{2−α} of the theorem's own inequality K² times above
    `rate`: with a further factor 1/K all terms are of one order.
    """

    theorem: int
    global_lr: float
    local_lr_at_most: float
    clip_norm: float | None
    rate: float


def fat_clipping_schedule(
    variant: Literal["pr", "pi"],
    clients: int,
    local_steps: int,
    rounds: int,
    alpha: float,
    *,
    strong_convexity: float | None = None,
) -> ClippingSchedule:
    """The schedule for m = `clients`, K = `local_steps`, T = `rounds` and tail index `alpha`.

    Without `strong_convexity` μ: Theorem 2 (pr) or 4 (pi), non-convex; with it: Theorem 1 or 3,
    with the constant c = 1. Raises ValueError unless 1 < alpha <= 2 and all counts are positive.
    """
    if not 1 < alpha <= 2:
        raise ValueError(f"alpha = {alpha:g} is not allowed: the theorems need 1 < alpha <= 2")
    for name, value in (("clients", clients), ("local-steps", local_steps), ("rounds", rounds)):
        if value < 1:
            raise ValueError(f"{name} = {value} is not allowed: at least 1")
    if strong_convexity is None:
        nonconvex = _theorem_2 if variant == "pr" else _theorem_4
        return nonconvex(clients, local_steps, rounds, alpha)
    if not 0 < strong_convexity < math.inf:
        raise ValueError(f"mu = {strong_convexity:g} is not allowed: greater than 0 and finite")
    convex = _theorem_1 if variant == "pr" else _theorem_3
    return convex(clients, local_steps, rounds, alpha, strong_convexity)


def _theorem_2(m: int, k: int, t: int, a: float) -> ClippingSchedule:
    e = 3 * a - 2
    return ClippingSchedule(
        theorem=2,
        global_lr=m ** ((2 * a - 2) / e) * k ** (-(a + 2) / e) * t ** (-a / e),
        local_lr_at_most=(m * t) ** ((1 - a) / e) * k ** ((4 - 4 * a) / e),
        clip_norm=(m * k**4 * t) ** (1 / e),
        rate=(m * t) ** ((2 - 2 * a) / e) * k ** ((4 - 2 * a) / e),
    )


def _theorem_4(m: int, k: int, t: int, a: float) -> ClippingSchedule:
    e = 3 * a - 2
    return ClippingSchedule(
        theorem=4,
        global_lr=m ** ((2 * a - 2) / e) * (k * t) ** (-a / e),
        local_lr_at_most=(m * k * t) ** (-a / (6 * a - 4)),
        clip_norm=(m * k * t) ** (1 / e),
        rate=(m * k * t) ** ((2 - 2 * a) / e),
    )


def _convex_global_lr(m: int, k: int, t: int, mu: float) -> float:
    # η_g η_l K = (2c/μ) ln(T)/(mKT), but never below the 2/(μT) that the theorem asks for.
    return max(2 / mu * math.log(t) / (m * k * t), 2 / (mu * t)) / k


def _theorem_1(m: int, k: int, t: int, a: float, mu: float) -> ClippingSchedule:
    return ClippingSchedule(
        theorem=1,
        global_lr=_convex_global_lr(m, k, t, mu),
        local_lr_at_most=(m * k * t) ** ((1 - a) / a),
        clip_norm=None,
        rate=(m * t) ** ((2 - 2 * a) / a) * k ** (2 / a),
    )


def _theorem_3(m: int, k: int, t: int, a: float, mu: float) -> ClippingSchedule:
    return ClippingSchedule(
        theorem=3,
        global_lr=_convex_global_lr(m, k, t, mu),
        local_lr_at_most=(m * t) ** -0.5 * k**-1.5,
        clip_norm=(m * k * t) ** (1 / a),
        rate=(m * k * t) ** ((2 - 2 * a) / a),
    )


@dataclass(frozen=True)
class ResilientSchedule:
    """Data and Diggavi's Theorem 1 (mini-batches) or 2 (full batches), with 1 for the constants
    that are written as O.

    `local_lr` is η. `remaining` is what R rounds leave of the squared distance at the start, as a
    factor (strongly convex), or of the squared gradient norm, per unit of F(x_0) − F(x*); for small
    steps both depend on the rounds R = T/H alone. `error_a_step` is the error that stays, 13 Γ/μ²
    or 9/2 Γ (Theorem 2: 14 Γ/μ², 24/5 Γ), per local step: Γ is linear in H. `failure` is the
    probability with which nothing of it holds, at most 1.
    """

    theorem: int
    local_lr: float
    remaining: float
    error_a_step: float
    failure: float

    def local_steps_for(self, error: float) -> int:
        """H, the most local steps whose error is at most `error`; 0: one is too many."""
        if self.error_a_step == 0:
            raise ValueError("variance and dissimilarity are 0: any number of local steps will do")
        return math.floor(error / self.error_a_step)


@dataclass(frozen=True)
class Spread:
    """How far gradients are from each other: κ² between clients, σ²/b of a batch's gradient about
    its client's (None: the batch is all examples), and the dimension d."""

    dissimilarity: float
    batch_variance: float | None = None
    dimension: int = 1


def resilient_schedule(
    local_steps: int,
    rounds: int,
    cohort: int,
    corrupt: float,
    smoothness: float,
    spread: Spread,
    *,
    slack: float | None = None,
    strong_convexity: float | None = None,
) -> ResilientSchedule:
    """The schedule for H = `local_steps`, R = `rounds`, K = `cohort`, ε = `corrupt` and
    L = `smoothness`.

    `slack` is ε′ of Theorem 1, by default half of what ε leaves of a third; γ is the largest that
    the theorem allows, (1/3 − ε)/ε′. Raises ValueError unless the theorem's conditions hold.
    """
    counts = {"local-steps": local_steps, "rounds": rounds, "clients": cohort}
    positive = {**counts, "smoothness": smoothness}
    if strong_convexity is not None:
        positive["mu"] = strong_convexity
    _check_positive(positive)
    left = 1 / 3 - corrupt
    if not 0 <= corrupt <= 1 / 3:
        raise ValueError(f"corrupt-fraction = {corrupt:g} is not allowed: from 0 to a third")
    if spread.batch_variance is None:
        # Theorem 2: Γ = 2Υ²/H + 25Hκ², Υ = O(Hκ√ε).
        gamma = (2 * corrupt + 25) * spread.dissimilarity
        weights, theorem, room, failure = (14.0, 24 / 5), 2, 5, 0.0
    else:
        slack = left / 2 if slack is None else slack
        if not 0 < slack < 2 * left:
            raise ValueError(
                f"slack = {slack:g} is not allowed with corrupt-fraction = {corrupt:g}: above 0 "
                f"and below {2 * left:g}, so that a gamma above 1/2 is left"
            )
        # Γ = 3Υ²/H + 11Hσ²/b + 36Hκ², Υ² = O(σ0² (ε + ε′)).
        noise = spread.batch_variance
        of_batches = 25 * noise / slack * (1 + 3 * spread.dimension / (2 * cohort))
        upsilon = (of_batches + 28 * spread.dissimilarity) * (corrupt + slack)
        gamma = 3 * upsilon + 11 * noise + 36 * spread.dissimilarity
        weights, theorem, room = (13.0, 9 / 2), 1, 8
        # (2γ − 1) ε′ with the largest γ.
        exponent = (2 * left - slack) ** 2 * (1 - corrupt) * cohort / 8
        failure = min(1.0, rounds * math.exp(-exponent))
    steps = local_steps * rounds
    rate = 1 / (2 * room * local_steps * smoothness)
    if strong_convexity is None:
        remaining, error = 1 / (rate * steps), weights[1] * gamma
    else:
        if strong_convexity > smoothness:
            raise ValueError(f"mu = {strong_convexity:g} is not allowed: at most the smoothness")
        remaining = math.exp(steps * math.log1p(-strong_convexity * rate))
        error = weights[0] * gamma / strong_convexity**2
    return ResilientSchedule(theorem, 2 * rate, remaining, error, failure)


@dataclass(frozen=True)
class PrivateSchedule:
    """Das et al.'s Theorems 1 and 2, with 1 for the constant q that the first leaves open.

    `rho` is ρ = √(q d ln(1/δ))/(n ε), `noise_multiplier` z = r σ/C of Theorem 1's σ² at the rounds
    K, `rate` η = β, `rounds` K and `most_local_steps` what E may be at most.
    """

    rho: float
    noise_multiplier: float
    rate: float
    rounds: float
    most_local_steps: float


def private_schedule(
    clients: int,
    cohort: float,
    dimension: int,
    epsilon: float,
    delta: float,
    clip_norm: float,
    smoothness: float,
    *,
    alpha: float = 1.0,
    gamma: float = 1.0,
) -> PrivateSchedule:
    """The schedule for n = `clients`, r = `cohort` expected in a round, d = `dimension`,
    C = `clip_norm` (gradient units), L = `smoothness` and the constants α ≥ 1 and γ of Theorem 2.

    Raises ValueError where ρ is not below 1 (too few clients for the budget).
    """
    names = ("clients", "cohort", "dimension", "epsilon", "clip-norm", "smoothness", "gamma")
    values = (clients, cohort, dimension, epsilon, clip_norm, smoothness, gamma)
    _check_positive(dict(zip(names, values, strict=True)))
    if not 0 < delta < 1:
        raise ValueError(f"delta = {delta:g} is not allowed: between 0 and 1")
    if alpha < 1:
        raise ValueError(f"alpha = {alpha:g} is not allowed: at least 1")
    log = math.log(1 / delta)
    rho = math.sqrt(dimension * log) / (clients * epsilon)
    if rho >= 1:
        raise ValueError(
            f"clients = {clients} is not allowed with dimension = {dimension}, epsilon = "
            f"{epsilon:g} and delta = {delta:g}: the theorem needs rho = {rho:.3g} below 1"
        )
    # Ĉ E = C.
    rounds = 2 * alpha * gamma / (clip_norm * rho**2)
    return PrivateSchedule(
        rho=rho,
        noise_multiplier=cohort / clients * math.sqrt(rounds * log) / epsilon,
        rate=rho / (2 * alpha * smoothness),
        rounds=rounds,
        most_local_steps=alpha / (2 * rho),
    )


@dataclass(frozen=True)
class TwoSidedSchedule:
    """Zhang et al., section 3.1: `server_lr` η_g = √(Q P), `local_lr` η_l = 1/(√T Q L), the order
    1/√(PQT) + 1/T of the bound (`rate`), and Corollary 3.2.1's `clip_norm` c = η_l Q c′ (parameter
    units).

    `broken` names the conditions of Theorem 3.1 that these rates do not meet, as they are printed.
    """

    server_lr: float
    local_lr: float
    clip_norm: float
    rate: float
    broken: tuple[str, ...]


def two_sided_schedule(
    cohort: int, local_steps: int, rounds: int, smoothness: float, gradient: float
) -> TwoSidedSchedule:
    """The schedule for P = `cohort`, Q = `local_steps`, T = `rounds`, L = `smoothness` and c′ =
    `gradient`, which is to be no less than a stochastic gradient's norm."""
    names = ("clients", "local-steps", "rounds", "smoothness", "gradient")
    values = (cohort, local_steps, rounds, smoothness, gradient)
    _check_positive(dict(zip(names, values, strict=True)))
    server_lr = math.sqrt(local_steps * cohort)
    local_lr = 1 / (math.sqrt(rounds) * local_steps * smoothness)
    product = server_lr * local_lr
    conditions = {
        "eta_g eta_l <= P / (96 Q^2)": product <= cohort / (96 * local_steps**2),
        "eta_g eta_l <= P / (6 Q L (P - 1))": product * 6 * local_steps * smoothness * (cohort - 1)
        <= cohort,
        "eta_l <= 1 / (sqrt(60) Q L)": rounds >= 60,
    }
    return TwoSidedSchedule(
        server_lr=server_lr,
        local_lr=local_lr,
        clip_norm=local_lr * local_steps * gradient,
        rate=1 / math.sqrt(cohort * local_steps * rounds) + 1 / rounds,
        broken=tuple(name for name, holds in conditions.items() if not holds),
    )


def _check_positive(values: Mapping[str, float]) -> None:
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name} = {value:g} is not allowed: above 0 and finite")
