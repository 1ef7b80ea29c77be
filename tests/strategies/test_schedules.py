"""The schedules against the theorems' inequalities, whose terms they are meant to balance."""

import math
from collections.abc import Callable
from typing import Any, Literal

import pytest

from blackthorn.strategies.schedules import (
    ClippingSchedule,
    Spread,
    fat_clipping_schedule,
    private_schedule,
    resilient_schedule,
    two_sided_schedule,
)

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


def test_under_gaussian_noise_pi_has_fedavgs_rate_and_pr_does_not_gain_from_k() -> None:
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
def test_values_outside_of_the_theorems_are_refused_in_one_line(
    change: dict[str, Any], expected: str
) -> None:
    values = {"clients": 5, "local_steps": 2, "rounds": 10, "alpha": 1.5, **change}
    with pytest.raises(ValueError, match=expected) as caught:
        fat_clipping_schedule("pi", **values)
    assert "\n" not in str(caught.value)


# Data and Diggavi.


def test_theorem_1_fails_as_seldom_as_the_paper_s_example_says() -> None:
    """K = 1250, ε = 1/10, γ = 100, ε′ = (1/3 − 1/10)/γ: at most T/H · e⁻³⁰ (page 5)."""
    slack = (1 / 3 - 1 / 10) / 100
    plan = resilient_schedule(1, 10**6, 1250, 0.1, 1.0, Spread(1.0, 1.0), slack=slack)
    assert plan.failure == pytest.approx(10**6 * math.exp(-30), rel=0.5)
    assert plan.failure < 10**6 * math.exp(-30) < 1e-7


@pytest.mark.parametrize("mu", [None, 0.05])
@pytest.mark.parametrize("batches", [True, False])
def test_the_resilient_schedule_is_the_theorem_s(batches: bool, mu: float | None) -> None:
    """The bounds of Theorems 1 and 2, written out, with the O's constants 1."""
    h, r, k, eps, smooth, kappa2, s2b, d, slack = 7, 25, 200, 0.125, 2.0, 3.0, 0.4, 50, 0.1
    spread = Spread(kappa2, s2b if batches else None, d)
    plan = resilient_schedule(
        h, r, k, eps, smooth, spread, slack=slack if batches else None, strong_convexity=mu
    )
    if batches:
        sigma0 = 25 * h**2 * s2b / slack * (1 + 3 * d / (2 * k)) + 28 * h**2 * kappa2
        gamma = 3 * sigma0 * (eps + slack) / h + 11 * h * s2b + 36 * h * kappa2
        step, factors, number = 8, (13.0, 4.5), 1
        largest = (1 / 3 - eps) / slack
        failure = r * math.exp(-((2 * largest - 1) ** 2) * slack**2 * (1 - eps) * k / 8)
    else:
        gamma = 2 * h**2 * kappa2 * eps / h + 25 * h * kappa2
        step, factors, number, failure = 5, (14.0, 4.8), 2, 0.0
    assert plan.theorem == number
    assert plan.local_lr == pytest.approx(1 / (step * h * smooth))
    assert plan.failure == pytest.approx(min(1.0, failure))
    if mu is None:
        assert plan.remaining == pytest.approx(2 * step * h * smooth / (h * r))
        error = factors[1] * gamma
    else:
        assert plan.remaining == pytest.approx((1 - mu / (2 * step * h * smooth)) ** (h * r))
        error = factors[0] * gamma / mu**2
    assert h * plan.error_a_step == pytest.approx(error)
    # The most local steps whose error is no larger: that of h is, that of h + 1 is not.
    assert plan.local_steps_for(error * (1 + 1e-9)) == h
    assert plan.local_steps_for(error * (1 + 0.9 / h)) == h
    assert plan.local_steps_for(error / (2 * h)) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"corrupt": 0.4}, "corrupt-fraction = 0.4"),
        ({"slack": 0.5}, "slack = 0.5"),
        ({"corrupt": 1 / 3}, "slack = 0"),
        ({"smoothness": 0.0}, "smoothness = 0"),
        ({"rounds": 0}, "rounds = 0"),
        ({"strong_convexity": 9.0}, "mu = 9"),
    ],
)
def test_what_the_resilient_theorem_does_not_cover_is_refused(
    options: dict[str, Any], message: str
) -> None:
    given: dict[str, Any] = {
        **{"local_steps": 7, "rounds": 25, "cohort": 200, "corrupt": 0.125, "smoothness": 1.0},
        **{"spread": Spread(1.0, 1.0), **options},
    }
    with pytest.raises(ValueError, match=f"{message} is not allowed"):
        resilient_schedule(**given)


# Das et al.


def test_the_private_schedule_is_the_theorems() -> None:
    """Theorem 1's σ² = q K C² ln(1/δ)/(n² ε²) of the mean, z = r σ/C; Theorem 2's β, K and E."""
    n, r, d, eps, delta, bound, smooth, alpha, gamma = (
        10**5,
        500,
        100,
        2.0,
        1e-5,
        4.0,
        3.0,
        2.0,
        5.0,
    )
    plan = private_schedule(n, r, d, eps, delta, bound, smooth, alpha=alpha, gamma=gamma)
    rho = math.sqrt(d * math.log(1 / delta)) / (n * eps)
    assert plan.rho == pytest.approx(rho)
    assert plan.rate == pytest.approx(rho / (2 * alpha * smooth))
    steps = 8
    assert plan.rounds == pytest.approx(2 * alpha * gamma / (bound / steps * steps) / rho**2)
    assert plan.most_local_steps == pytest.approx(alpha / (2 * rho))
    sigma = math.sqrt(plan.rounds * bound**2 * math.log(1 / delta)) / (n * eps)
    assert plan.noise_multiplier == pytest.approx(r * sigma / bound)
    # What the noise moves the model in K rounds, √(K β² d σ²), is γ/L, whatever the budget.
    assert plan.rounds * plan.rate**2 * d * sigma**2 == pytest.approx((gamma / smooth) ** 2)
    # The full theorem's η = γ/(Ĉ L E K ρ) is the abridged one's.
    assert plan.rate == pytest.approx(gamma / (bound * smooth * plan.rounds * rho))


@pytest.mark.parametrize(
    ("options", "message"),
    [({"clients": 10}, "clients = 10"), ({"delta": 1.0}, "delta = 1"), ({"alpha": 0.5}, "alpha")],
)
def test_what_the_private_theorem_does_not_cover_is_refused(
    options: dict[str, Any], message: str
) -> None:
    given: dict[str, Any] = {
        **{"clients": 10**5, "cohort": 500, "dimension": 100, "epsilon": 2.0, "delta": 1e-5},
        **{"clip_norm": 4.0, "smoothness": 3.0, **options},
    }
    with pytest.raises(ValueError, match=f"{message}.* is not allowed"):
        private_schedule(**given)


# Zhang et al.


def test_the_two_sided_schedule_is_section_3_1_s() -> None:
    p, q, t, smooth, gradient = 80, 32, 10**10, 2.0, 1.5
    plan = two_sided_schedule(p, q, t, smooth, gradient)
    assert plan.server_lr == pytest.approx(math.sqrt(q * p))
    assert plan.local_lr == pytest.approx(1 / (math.sqrt(t) * q * smooth))
    assert plan.clip_norm == pytest.approx(plan.local_lr * q * gradient)
    assert plan.broken == ()
    # The terms of Theorem 3.1 that FedAvg has too, at most of the order 1/√(PQT) + 1/T.
    product = plan.server_lr * plan.local_lr
    terms = (1 / (product * q * t), plan.local_lr**2 * q**2, product / p)
    assert max(terms) <= 4 * plan.rate
    assert len(two_sided_schedule(p, q, 50, smooth, gradient).broken) == 3
    # One client has no second condition.
    assert "(P - 1)" not in "".join(two_sided_schedule(1, q, 50, smooth, gradient).broken)
