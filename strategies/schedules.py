"""Orders of magnitude for FAT-Clipping's rates and thresholds (Yang et al., Theorems 1 to 4)."""

import math
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
