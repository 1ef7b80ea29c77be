"""`blackthorn calibrate`: settings from formulas instead of trials."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from blackthorn.settings.config import ConfigError
from blackthorn.settings.rounding import exact, upward

if TYPE_CHECKING:
    from blackthorn.strategies.accounting import Accountant, Release

app = typer.Typer(
    help="Settings from formulas instead of trials.\n\n"
    "Example: blackthorn calibrate dp --epsilon 2 --rounds 100 --sample-rate 0.1",
    no_args_is_help=True,
)
console = Console()

Rounds = Annotated[int, typer.Option(help="Communication rounds T.")]
Smoothness = Annotated[float, typer.Option(help="L, the gradients' Lipschitz constant.")]
Delta = Annotated[float, typer.Option(help="delta of the budget.")]

# What each kind of neighbours is for, in the order of the table's columns.
_RELATIONS = {
    "add-remove": "one client is there or not: participation = poisson, or full",
    "zero-out": "one client's contributions are zero: fixed or full; no amplification by sampling",
    "replace-one": "one client is another: fixed or full; sensitivity 2 x clip-norm",
}
# Of a run; docs/privacy.md has the whole.
_AGAINST = (
    "This holds against everybody but the server; not the run's own clients for replace-one with",
    "a share below 1, where k that pool what they know face a cohort of n of m - k, nor with noise",
    "at the clients, where z sqrt(1 - k/s) is left against k that pool their shares.",
)
_ORDERS = "ORDERS OF MAGNITUDE, not tuned values: start a search here; do not expect to end here."
_NAMES = {"pr": "FAT-Clipping-PR", "pi": "FAT-Clipping-PI"}


@app.command("fat-clipping")
def fat_clipping(
    clients: Annotated[int, typer.Option(help="Clients m in a round.")],
    local_steps: Annotated[int, typer.Option(help="Local steps K in a round.")],
    rounds: Rounds,
    alpha: Annotated[float, typer.Option(help="Tail index of the noise, above 1 and up to 2.")],
    mu: Annotated[
        float | None, typer.Option(help="Strong convexity; without it: the non-convex theorems.")
    ] = None,
) -> None:
    """Orders of magnitude of FAT-Clipping's rates and thresholds (Yang et al., Theorems 1 to 4).

    Example: blackthorn calibrate fat-clipping --clients 10 --local-steps 5 --rounds 100 --alpha 1.5
    """
    with _in_one_line():
        text = "\n\n".join(
            _schedule(variant, clients, local_steps, rounds, alpha, mu) for variant in ("pr", "pi")
        )
    strong = "" if mu is None else f", mu = {mu:g}"
    head = f"FAT-Clipping with m = {clients}, K = {local_steps}, T = {rounds}, alpha = {alpha:g}"
    left_out = "The theorems' constants (smoothness, size of the noise) are left out."
    _print([head + strong, _ORDERS, left_out, "", text])


@app.command("rage")
def rage(
    clients: Annotated[int, typer.Option(help="Clients K in a round.")],
    local_steps: Annotated[int, typer.Option(help="Local steps H in a round.")],
    rounds: Annotated[int, typer.Option(help="Communication rounds, T/H.")],
    corrupt_fraction: Annotated[float, typer.Option(help="Share of them that are corrupt.")],
    smoothness: Smoothness,
    dissimilarity: Annotated[
        float, typer.Option(help="kappa^2, between the clients' gradients (squared gradient).")
    ],
    batch_variance: Annotated[
        float | None,
        typer.Option(help="sigma^2/b of a batch's gradient; without it: full batches."),
    ] = None,
    dimension: Annotated[int, typer.Option(help="Numbers d of the model.")] = 1,
    slack: Annotated[float | None, typer.Option(help="epsilon' of Theorem 1.")] = None,
    mu: Annotated[
        float | None, typer.Option(help="Strong convexity; without it: the non-convex bound.")
    ] = None,
    error: Annotated[
        float | None, typer.Option(help="What error may stay: how many local steps are allowed?")
    ] = None,
) -> None:
    """Step size, number of local steps and probability of failure of Byzantine-resilient local SGD
    (Data and Diggavi, Theorems 1 and 2), as orders of magnitude.

    Example: blackthorn calibrate rage --clients 200 --local-steps 7 --rounds 25
    --corrupt-fraction 0.125 --smoothness 10 --dissimilarity 1
    """
    from blackthorn.strategies.schedules import Spread, resilient_schedule

    spread = Spread(dissimilarity, batch_variance, dimension)
    steps: int | None = None
    with _in_one_line():
        plan = resilient_schedule(
            *(local_steps, rounds, clients, corrupt_fraction, smoothness, spread),
            slack=slack,
            strong_convexity=mu,
        )
        if error is not None:
            steps = plan.local_steps_for(error)
    stays = "distance to the minimum" if mu is not None else "gradient norm"
    left = "of the squared distance" if mu is not None else "x (F(x_0) - F(x*)) of the gradient's"
    lines = [
        f"RAGE (Theorem {plan.theorem}), K = {clients}, H = {local_steps}, {rounds} rounds",
        _ORDERS,
        "",
        f"  local-lr                       {plan.local_lr:.3g}",
        f"  what the rounds leave          {plan.remaining:.3g} {left}",
        f"  error that stays               {plan.error_a_step * local_steps:.3g} (squared "
        f"{stays}), linear in H",
        f"  probability of failure         at most {plan.failure:.3g}",
    ]
    if steps is not None:
        lines.append(f"  local-steps for that error     at most {steps}")
    _print(lines)


@app.command("dp-fedavg")
def dp_fedavg(
    clients: Annotated[int, typer.Option(help="Clients n in the population.")],
    sample_rate: Annotated[float, typer.Option(help="r/n, with which a client joins a round.")],
    dimension: Annotated[int, typer.Option(help="Numbers d of the model.")],
    epsilon: Annotated[float, typer.Option(help="Budget of the whole run.")],
    clip_norm: Annotated[float, typer.Option(help="C, in gradient units.")],
    smoothness: Smoothness,
    delta: Delta = 1e-5,
    alpha: Annotated[float, typer.Option(help="Theorem 2's alpha, at least 1.")] = 1.0,
    gamma: Annotated[float, typer.Option(help="Theorem 2's gamma, about L x distance.")] = 1.0,
) -> None:
    """Rate, rounds and local steps of DP-FedAvg and DP-NormFedAvg (Das et al., Theorem 2), and the
    order of the noise by their Theorem 1, whose constant is unknown: the noise of a run is
    `calibrate dp`'s.

    Example: blackthorn calibrate dp-fedavg --clients 3000 --sample-rate 0.2 --dimension 7850
    --epsilon 5 --clip-norm 62.5 --smoothness 10
    """
    from blackthorn.strategies.schedules import private_schedule

    with _in_one_line():
        plan = private_schedule(
            *(clients, sample_rate * clients, dimension, epsilon, delta, clip_norm, smoothness),
            alpha=alpha,
            gamma=gamma,
        )
    _print(
        [
            f"DP-FedAvg and DP-NormFedAvg (Theorems 1 and 2), n = {clients}, rho = {plan.rho:.3g}",
            _ORDERS,
            "",
            f"  local-lr (server-lr = 1)       {plan.rate:.3g}",
            f"  num-server-rounds              {plan.rounds:.3g}",
            f"  local-steps                    at most {plan.most_local_steps:.3g}",
            f"  noise-multiplier, its order    {plan.noise_multiplier:.3g} (Theorem 1 with q = 1; "
            "for a claim: calibrate dp)",
        ]
    )


@app.command("ce-fedavg")
def ce_fedavg(
    clients: Annotated[int, typer.Option(help="Clients P in a round.")],
    local_steps: Annotated[int, typer.Option(help="Local steps Q in a round.")],
    rounds: Rounds,
    smoothness: Smoothness,
    gradient: Annotated[
        float, typer.Option(help="c', at least the longest stochastic gradient.")
    ] = 1.0,
) -> None:
    """Two-sided rates and threshold of CE-FedAvg and DP-FedAvg (Zhang et al., section 3.1 and
    Corollary 3.2.1), as orders of magnitude.

    Example: blackthorn calibrate ce-fedavg --clients 80 --local-steps 32 --rounds 200
    --smoothness 10
    """
    from blackthorn.strategies.schedules import two_sided_schedule

    with _in_one_line():
        plan = two_sided_schedule(clients, local_steps, rounds, smoothness, gradient)
    broken = "; ".join(plan.broken)
    _print(
        [
            f"CE-FedAvg (section 3.1), P = {clients}, Q = {local_steps}, T = {rounds}",
            _ORDERS,
            "",
            f"  server-lr                      {plan.server_lr:.3g}",
            f"  local-lr                       {plan.local_lr:.3g}",
            f"  clip-norm (parameter units)    {plan.clip_norm:.3g}",
            f"  bound on the squared gradient norm: {plan.rate:.3g}",
            f"  conditions of Theorem 3.1      {'NOT met: ' + broken if broken else 'met'}",
        ]
    )


@contextmanager
def _in_one_line() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ConfigError(str(error)) from error
    except (OverflowError, ZeroDivisionError):
        raise ConfigError("the schedule is beyond the range of floating-point numbers") from None


def _print(lines: Sequence[str]) -> None:
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


@app.command("dp")
def dp(
    rounds: Rounds,
    epsilon: Annotated[
        float | None, typer.Option(help="Budget of the whole run: what noise does it ask for?")
    ] = None,
    noise_multiplier: Annotated[
        float | None, typer.Option(help="In place of --epsilon, z: what does the run cost?")
    ] = None,
    delta: Delta = 1e-5,
    sample_rate: Annotated[
        float,
        typer.Option(
            help="Probability q with which a client joins a round (Poisson), or the share of them "
            "that a fixed cohort has."
        ),
    ] = 1.0,
    bands: Annotated[
        int,
        typer.Option(help="Groups of clients that take turns (participation = rotating)."),
    ] = 1,
    accountant: Annotated[
        str | None, typer.Option(help="One of rdp, prv, pld; without it: all of them.")
    ] = None,
) -> None:
    """The noise multiplier that a privacy budget asks for, or the epsilon that a noise multiplier
    costs (--noise-multiplier in place of --epsilon), by accountant and by neighbours.

    Example: blackthorn calibrate dp --epsilon 5 --delta 1e-5 --sample-rate 0.2 --rounds 100
    """
    from blackthorn.strategies.accounting import ACCOUNTANTS, calibrate, spent
    from blackthorn.strategies.release import MOST

    if (epsilon is None) == (noise_multiplier is None):
        raise ConfigError(
            f"--epsilon {epsilon} with --noise-multiplier {noise_multiplier} is not allowed: give "
            "one of the two"
        )
    if accountant is not None and accountant not in ACCOUNTANTS:
        allowed = ", ".join(ACCOUNTANTS)
        raise ConfigError(f"accountant = {accountant!r} is not allowed: {allowed}")
    if not 1 <= rounds <= MOST:
        raise ConfigError(f"rounds = {rounds} is not allowed: 1 to {MOST:g}")
    if bands < 1 or (bands > 1 and sample_rate != 1.0):
        raise ConfigError(
            f"bands = {bands} with sample-rate = {exact(sample_rate)} is not allowed: 1 or more, "
            "and of clients that take turns none is drawn (leave --sample-rate out)"
        )
    if noise_multiplier is not None and not noise_multiplier > 0:
        raise ConfigError(f"noise-multiplier = {noise_multiplier} is not allowed: above 0")
    if epsilon is not None:
        known, wanted = f"epsilon = {exact(epsilon)}", "noise-multiplier z"
    else:
        known, wanted = f"noise-multiplier z = {exact(noise_multiplier or 0.0)}", "epsilon"
    asked = f"a share {exact(sample_rate)}" if bands == 1 else f"one of {bands} groups in turn"
    lines = [
        f"{known}, delta = {exact(delta)}: {wanted} for {rounds} rounds that each ask {asked} of "
        "the clients",
        "",
        f"{'accountant':12}" + "".join(f"{kind:>14}" for kind in _RELATIONS),
    ]

    def figure(kind: str, by: "Accountant") -> float:
        release = partial(_release, kind, sample_rate, bands)
        if epsilon is not None:
            return calibrate(epsilon, delta, release, rounds, by)
        return spent([(release(noise_multiplier or 0.0), rounds)], delta, by).epsilon

    for name in ACCOUNTANTS:
        if accountant not in (None, name):
            continue
        try:
            found = [figure(kind, name) for kind in _RELATIONS]
        except ValueError as error:
            raise ConfigError(str(error)) from error
        lines.append(f"{name:12}" + "".join(f"{upward(value, 5):>14}" for value in found))
    lines += ["", *(f"{kind:12}  {meaning}" for kind, meaning in _RELATIONS.items())]
    lines += ["", "The noise of a round's sum has the standard deviation z x clip-norm.", *_AGAINST]
    if bands > 1:
        lines += ["", *_of_the_sums(bands, rounds)]
    _print(lines)


def _of_the_sums(bands: int, rounds: int) -> list[str]:
    """How large the noise is in what the rounds add up to."""
    from blackthorn.strategies.noise_record import summed_deviations

    banded, apart = ((float((summed_deviations(b, rounds) ** 2).mean()) ** 0.5) for b in (bands, 1))
    return [
        "The noise of the sums over the rounds so far, root of its mean square over the rounds, in",
        f"multiples of z x clip-norm: {banded:.4g} with banded-noise, {apart:.4g} without.",
    ]


def _release(neighbours: str, sample_rate: float, bands: int, noise_multiplier: float) -> "Release":
    from blackthorn.strategies.accounting import Release

    if bands > 1:
        return Release(noise_multiplier / (1 + (neighbours == "replace-one")), groups=bands)
    if neighbours == "add-remove":
        return Release(noise_multiplier, sample_rate=sample_rate)
    if neighbours == "zero-out":
        return Release(noise_multiplier)
    # The sensitivity is 2 clip-norm; what is drawn enters as a share alone.
    share = Fraction(sample_rate).limit_denominator(10**6)
    if share < sample_rate:
        # Upwards: never a smaller share than is asked for.
        share = Fraction(math.ceil(sample_rate * 10**6), 10**6)
    return Release(noise_multiplier / 2, drawn=share.as_integer_ratio())


def _schedule(
    variant: Literal["pr", "pi"],
    clients: int,
    local_steps: int,
    rounds: int,
    alpha: float,
    mu: float | None,
) -> str:
    # Imports torch and Flower, which take seconds: not for everybody who runs another command.
    from blackthorn.strategies.schedules import fat_clipping_schedule

    plan = fat_clipping_schedule(variant, clients, local_steps, rounds, alpha, strong_convexity=mu)
    threshold = "left open" if plan.clip_norm is None else f"{plan.clip_norm:.3g}"
    measure = "squared gradient norm" if mu is None else "distance of the loss to its minimum"
    small = plan.local_lr_at_most / local_steps
    note = f" (better {small:.3g}: the bound's own terms ask for 1/K of it)"
    lines = [
        f"{_NAMES[variant]} (Theorem {plan.theorem}), order of",
        f"  server-lr x local-lr           {plan.global_lr:.3g}",
        f"  local-lr                       at most {plan.local_lr_at_most:.3g}"
        + (note if plan.theorem == 4 else ""),
        f"  clip-norm (gradient units)     {threshold}",
        f"  bound on the {measure}: {plan.rate:.3g}",
    ]
    return "\n".join(lines)
