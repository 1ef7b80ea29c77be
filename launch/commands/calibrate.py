"""`blackthorn calibrate`: settings from formulas instead of trials."""

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
_NAMES = {"pr": "FAT-Clipping-PR", "pi": "FAT-Clipping-PI"}


@app.command("fat-clipping")
def fat_clipping(
    clients: Annotated[int, typer.Option(help="Clients m in a round.")],
    local_steps: Annotated[int, typer.Option(help="Local steps K in a round.")],
    rounds: Annotated[int, typer.Option(help="Communication rounds T.")],
    alpha: Annotated[float, typer.Option(help="Tail index of the noise, above 1 and up to 2.")],
    mu: Annotated[
        float | None, typer.Option(help="Strong convexity; without it: the non-convex theorems.")
    ] = None,
) -> None:
    """Orders of magnitude of FAT-Clipping's rates and thresholds (Yang et al., Theorems 1 to 4).

    Example: blackthorn calibrate fat-clipping --clients 10 --local-steps 5 --rounds 100 --alpha 1.5
    """
    try:
        text = "\n\n".join(
            _schedule(variant, clients, local_steps, rounds, alpha, mu) for variant in ("pr", "pi")
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    except OverflowError:
        raise ConfigError("the schedule is beyond the range of floating-point numbers") from None
    console.print(
        f"FAT-Clipping with m = {clients}, K = {local_steps}, T = {rounds}, alpha = {alpha:g}"
        f"{'' if mu is None else f', mu = {mu:g}'}\n"
        "ORDERS OF MAGNITUDE, not tuned values: the theorems' constants (smoothness, size of the\n"
        "noise) are left out. Start a search here; do not expect to end here.\n\n" + text,
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


@app.command("dp")
def dp(
    rounds: Annotated[int, typer.Option(help="Communication rounds T.")],
    epsilon: Annotated[
        float | None, typer.Option(help="Budget of the whole run: what noise does it ask for?")
    ] = None,
    noise_multiplier: Annotated[
        float | None, typer.Option(help="In place of --epsilon, z: what does the run cost?")
    ] = None,
    delta: Annotated[float, typer.Option(help="delta of the budget.")] = 1e-5,
    sample_rate: Annotated[
        float,
        typer.Option(
            help="Probability q with which a client joins a round (Poisson), or the share of them "
            "that a fixed cohort has."
        ),
    ] = 1.0,
    accountant: Annotated[
        str | None, typer.Option(help="One of rdp, prv, pld; without it: all of them.")
    ] = None,
) -> None:
    """The noise multiplier that a privacy budget asks for, or the epsilon that a noise multiplier
    costs (--noise-multiplier in place of --epsilon), by accountant and by neighbours.

    Example: blackthorn calibrate dp --epsilon 5 --delta 1e-5 --sample-rate 0.2 --rounds 100
    """
    from blackthorn.strategies.accounting import ACCOUNTANTS, calibrate, spent

    if (epsilon is None) == (noise_multiplier is None):
        raise ConfigError(
            f"--epsilon {epsilon} with --noise-multiplier {noise_multiplier} is not allowed: give "
            "one of the two"
        )
    if accountant is not None and accountant not in ACCOUNTANTS:
        allowed = ", ".join(ACCOUNTANTS)
        raise ConfigError(f"accountant = {accountant!r} is not allowed: {allowed}")
    if rounds < 1:
        raise ConfigError(f"rounds = {rounds} is not allowed: at least 1")
    if noise_multiplier is not None and not noise_multiplier > 0:
        raise ConfigError(f"noise-multiplier = {noise_multiplier} is not allowed: above 0")
    if epsilon is not None:
        known, wanted = f"epsilon = {exact(epsilon)}", "noise-multiplier z"
    else:
        known, wanted = f"noise-multiplier z = {exact(noise_multiplier or 0.0)}", "epsilon"
    lines = [
        f"{known}, delta = {exact(delta)}: {wanted} for {rounds} rounds that each ask a share "
        f"{exact(sample_rate)} of the clients",
        "",
        f"{'accountant':12}" + "".join(f"{kind:>14}" for kind in _RELATIONS),
    ]

    def figure(kind: str, by: "Accountant") -> float:
        release = partial(_release, kind, sample_rate)
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
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def _release(neighbours: str, sample_rate: float, noise_multiplier: float) -> "Release":
    from blackthorn.strategies.accounting import Release

    if neighbours == "add-remove":
        return Release(noise_multiplier, sample_rate=sample_rate)
    if neighbours == "zero-out":
        return Release(noise_multiplier)
    # The sensitivity is 2 clip-norm; what is drawn enters as a share alone.
    share = Fraction(sample_rate).limit_denominator(10**6)
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
