"""The schedules against the theorems' inequalities, whose terms they are meant to balance."""

import math
from collections.abc import Callable
from typing import Any, Literal

import pytest

from blackthorn.strategies.schedules import ClippingSchedule, fat_clipping_schedule

ALPHAS = [1.01, 1.25, 1.5, 1.75, 2.0]
Terms = Callable[[float, float, float, float, ClippingSchedule], dict[str, float]]


def threshold(schedule: ClippingSchedule) -> float:
    """The clip norm, of a theorem that prescribes one."""
    assert schedule.clip_norm is not None
    return schedule.clip_norm


def theorem_2(m: float, k: float, t: float, a: float, s: ClippingSchedule) -> dict[str, float]:
    """The terms of Theorem 2's inequality without L, G and f(x_1) - f(x_T)."""
    lr, clip = s.local_lr_at_most, threshold(s)
    return {
        "descent": 1 / (s.global_lr * k * t),
        "drift": lr**2 * k**2,
        "bias": k**2 * clip ** (-2 * (a - 1)),
        "drift x bias": lr * k**2 * clip ** (1 - a),
        "variance": s.global_lr / m * k * clip ** (2 - a),
    }


def theorem_4(m: float, k: float, t: float, a: float, s: ClippingSchedule) -> dict[str, float]:
    """The same of Theorem 4, with η_l at 1/K of its printed limit (see the last test)."""
    lr, clip = s.local_lr_at_most / k, threshold(s)
    return {
        "descent": 1 / (s.global_lr * k * t),
        "bias": clip ** (-2 * (a - 1)),
        "drift": lr**2 * k**2 * clip ** (2 - a),
        "variance": s.global_lr / m * clip ** (2 - a),
    }


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("scaled", ["m", "k", "t"])
@pytest.mark.parametrize(("variant", "terms"), [("pr", theorem_2), ("pi", theorem_4)])
def test_every_term_scales_as_the_rate(
    variant: Literal["pr", "pi"], terms: Terms, scaled: str, alpha: float
) -> None:
    """Exponents as slopes between two sizes: the constants drop out."""
    size = {"m": 8, "k": 6, "t": 500}
    larger = {**size, scaled: 1024 * size[scaled]}
    plans = [fat_clipping_schedule(variant, s["m"], s["k"], s["t"], alpha) for s in (size, larger)]
    values = [
        terms(s["m"], s["k"], s["t"], alpha, plan)
        for s, plan in zip((size, larger), plans, strict=True)
    ]
    slope = math.log(plans[1].rate / plans[0].rate)
    for term in values[0]:
        assert math.log(values[1][term] / values[0][term]) == pytest.approx(slope, abs=1e-9), term


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize(("variant", "terms"), [("pr", theorem_2), ("pi", theorem_4)])
def test_every_term_has_the_size_of_the_rate(
    variant: Literal["pr", "pi"], terms: Terms, alpha: float
) -> None:
    plan = fat_clipping_schedule(variant, 12, 7, 300, alpha)
    for term, value in terms(12, 7, 300, alpha, plan).items():
        assert value == pytest.approx(plan.rate, rel=1e-9), term


@pytest.mark.parametrize(("variant", "terms"), [("pr", theorem_2), ("pi", theorem_4)])
def test_no_other_rate_and_threshold_do_better(variant: Literal["pr", "pi"], terms: Terms) -> None:
    """At the schedule the largest term is smallest: any change of rate or threshold raises it."""
    plan = fat_clipping_schedule(variant, 12, 7, 300, 1.4)
    for lr_factor in (0.5, 0.9, 1.0, 1.1, 2.0):
        for clip_factor in (0.5, 0.9, 1.0, 1.1, 2.0):
            other = ClippingSchedule(
                theorem=plan.theorem,
                global_lr=plan.global_lr * lr_factor,
                local_lr_at_most=0.0,
                clip_norm=threshold(plan) * clip_factor,
                rate=plan.rate,
            )
            worst = max(terms(12, 7, 300, 1.4, other).values())
            if (lr_factor, clip_factor) == (1.0, 1.0):
                assert worst == pytest.approx(plan.rate, rel=1e-9)
            else:
                assert worst > 1.01 * plan.rate


def test_gaussian_noise() -> None:
    """α = 2, with numbers: PI is FedAvg's rate 1/√(mKT); PR does not gain from K."""
    pi = fat_clipping_schedule("pi", 16, 25, 100, 2.0)
    assert pi.theorem == 4
    assert pi.global_lr == pytest.approx(math.sqrt(16 / (25 * 100)))
    assert pi.local_lr_at_most == pytest.approx(40_000**-0.25)
    assert pi.clip_norm == pytest.approx(40_000**0.25)
    assert pi.rate == pytest.approx(1 / 200)
    pr = fat_clipping_schedule("pr", 16, 25, 100, 2.0)
    assert pr.theorem == 2
    assert pr.global_lr == pytest.approx(4 / 25 / 10)
    assert pr.local_lr_at_most == pytest.approx(1600**-0.25 / 25)
    assert pr.clip_norm == pytest.approx(25 * 1600**0.25)
    assert pr.rate == pytest.approx(1 / 40)


def test_strongly_convex_with_gaussian_noise() -> None:
    """Theorem 3: 1/(mKT); Theorem 1: K/(mT)."""
    pi = fat_clipping_schedule("pi", 16, 25, 100, 2.0, strong_convexity=0.5)
    assert pi.theorem == 3
    assert pi.rate == pytest.approx(1 / 40_000)
    assert pi.clip_norm == pytest.approx(200)
    assert pi.local_lr_at_most == pytest.approx(1 / 40 / 125)
    pr = fat_clipping_schedule("pr", 16, 25, 100, 2.0, strong_convexity=0.5)
    assert pr.theorem == 1
    assert pr.rate == pytest.approx(25 / 1600)
    assert pr.local_lr_at_most == pytest.approx(1 / 200)
    assert pr.clip_norm is None


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("scaled", ["m", "k", "t"])
def test_theorem_3_balances_its_terms(scaled: str, alpha: float) -> None:
    """λ^{-2(α-1)} and η_l² K² λ^{2-α} have the rate's order."""
    size = {"m": 8, "k": 6, "t": 500}
    larger = {**size, scaled: 64 * size[scaled]}
    bias, drift, rate = [], [], []
    for s in (size, larger):
        plan = fat_clipping_schedule("pi", s["m"], s["k"], s["t"], alpha, strong_convexity=0.1)
        bias.append(threshold(plan) ** (-2 * (alpha - 1)))
        drift.append((plan.local_lr_at_most * s["k"]) ** 2 * threshold(plan) ** (2 - alpha))
        rate.append(plan.rate)
    assert bias[1] / bias[0] == pytest.approx(rate[1] / rate[0])
    assert drift[1] / drift[0] == pytest.approx(rate[1] / rate[0])


@pytest.mark.parametrize("variant", ["pr", "pi"])
@pytest.mark.parametrize(("clients", "rounds"), [(1, 2), (10, 1000), (3, 10**6)])
def test_strongly_convex_rate_meets_the_theorems_condition(
    variant: Literal["pr", "pi"], clients: int, rounds: int
) -> None:
    """η_g η_l K is 2 ln(T)/(μ mKT), but at least 2/(μT)."""
    mu, steps = 0.25, 7
    plan = fat_clipping_schedule(variant, clients, steps, rounds, 1.5, strong_convexity=mu)
    wanted = 2 * math.log(rounds) / (mu * clients * steps * rounds)
    assert plan.global_lr * steps == pytest.approx(max(wanted, 2 / (mu * rounds)))


def test_pi_is_never_slower_and_pr_pays_for_local_steps() -> None:
    for alpha in ALPHAS:
        for steps in (2, 10, 100):
            pi = fat_clipping_schedule("pi", 10, steps, 1000, alpha)
            pr = fat_clipping_schedule("pr", 10, steps, 1000, alpha)
            assert pi.rate < pr.rate
        single = [fat_clipping_schedule(v, 10, 1, 1000, alpha) for v in ("pr", "pi")]
        # One local step: the two algorithms are one.
        assert single[0].rate == pytest.approx(single[1].rate)
        assert single[0].clip_norm == pytest.approx(single[1].clip_norm)
        assert single[0].global_lr == pytest.approx(single[1].global_lr)


def test_printed_limit_of_theorem_4_is_a_factor_k_too_large() -> None:
    """η_l ≤ (mKT)^{-α/(6α-4)}, as printed, leaves K² η_l² λ^{2-α} K² times above the rate."""
    m, k, t, alpha = 8, 6, 500, 1.5
    plan = fat_clipping_schedule("pi", m, k, t, alpha)
    assert plan.local_lr_at_most == pytest.approx((m * k * t) ** (-alpha / (6 * alpha - 4)))
    printed = k**2 * plan.local_lr_at_most**2 * threshold(plan) ** (2 - alpha)
    assert printed == pytest.approx(k**2 * plan.rate)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"alpha": 1.0}, "alpha = 1 is not allowed"),
        ({"alpha": 2.01}, "alpha = 2.01 is not allowed"),
        ({"alpha": math.nan}, "alpha = nan is not allowed"),
        ({"clients": 0}, "clients = 0 is not allowed"),
        ({"local_steps": -1}, "local-steps = -1 is not allowed"),
        ({"rounds": 0}, "rounds = 0 is not allowed"),
        ({"strong_convexity": 0.0}, "mu = 0 is not allowed"),
        ({"strong_convexity": math.nan}, "mu = nan is not allowed"),
        ({"strong_convexity": math.inf}, "mu = inf is not allowed"),
    ],
)
def test_wrong_values(change: dict[str, Any], expected: str) -> None:
    values = {"clients": 5, "local_steps": 2, "rounds": 10, "alpha": 1.5, **change}
    with pytest.raises(ValueError, match=expected) as caught:
        fat_clipping_schedule("pi", **values)
    assert "\n" not in str(caught.value)
