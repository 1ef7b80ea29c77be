"""Ways to spend one privacy budget, side by side: their noise, what it does, and who is trusted.

What is expected of a model is a rule of thumb, of public numbers alone. Updates of length u, all of
one direction, carry it T u in T rounds; the noise carries it N, which is z_Δ C √d/r times the
deviation of what T rounds of noise add up to (√T where each is drawn anew), and where the clients
add it √(1 + 1/s) times that, with the server's share. N²/(N² + T² u²) is the
part of the squared way that is noise, and about that part of what the model would gain over
guessing is taken to be lost. Updates that do not agree carry it less far: that much at the least.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from blackthorn.reporting.figures import BLUE, ORANGE, legend_above, new_axes, new_figure, save
from blackthorn.settings.rounding import downward
from blackthorn.strategies import (
    ClipNorm,
    FixedParticipation,
    FullParticipation,
    PoissonParticipation,
    PrivacyPlan,
    RotatingParticipation,
    calibrated,
)
from blackthorn.strategies.accounting import Accountant, calibrate
from blackthorn.strategies.adaptive_threshold import AdaptiveThreshold
from blackthorn.strategies.noise_record import round_deviations, summed_deviations

_SERVER = "the server"
_SECRET = "the server; that nobody sees who takes part"
_CLIENTS = "every client to add its share; against the server itself: little"


@dataclass(frozen=True)
class Question:
    """What is planned: m clients, T rounds, (epsilon, delta), of a model of d parameters, with
    1/`groups` of the clients in a round; C and a usual length u of updates, in one unit."""

    clients: int
    rounds: int
    epsilon: float
    delta: float
    dimension: int
    groups: int
    clip_norm: float = 1.0
    update_norm: float = 1.0
    accountant: Accountant = "pld"


@dataclass(frozen=True)
class Option:
    """One way. `multiplier`: z of what is charged; `round_noise`: length of the noise on the last
    round's mean update, which is the longest, and `total_noise` of that on all rounds together,
    both in the unit of C; `lost`: the part of what could be gained that is expected to be lost.
    `refused`: why it cannot be had, and all of them NaN."""

    name: str
    settings: str
    cohort: float
    trusted: str
    multiplier: float = math.nan
    round_noise: float = math.nan
    total_noise: float = math.nan
    lost: float = math.nan
    refused: str = ""


def compare(question: Question) -> list[Option]:
    """All ways, in the order of the documentation. Raises ValueError for a budget that none has."""
    q = question
    size, b = q.clients // q.groups, q.groups
    # As it is printed, so that z is not for a smaller one.
    shown = downward(1 / b, 4)
    rate = float(shown)
    adaptive = AdaptiveThreshold()
    ways: list[tuple[str, str, str, Callable[[], PrivacyPlan]]] = [
        ("all clients", "participation = full", _SERVER, lambda: _plan(q, FullParticipation())),
        (
            "Poisson cohorts",
            f"participation = poisson, sample-rate = {shown}",
            _SECRET,
            lambda: _plan(q, PoissonParticipation(rate)),
        ),
        (
            "fixed cohorts",
            f"participation = fixed, clients-per-round = {size}",
            _SERVER,
            lambda: _plan(q, FixedParticipation(size)),
        ),
        (
            "rotating, independent noise",
            f"participation = rotating, bands = {b}, banded-noise = false",
            _SERVER,
            lambda: _plan(q, RotatingParticipation(b)),
        ),
        (
            "rotating, banded noise",
            f"participation = rotating, bands = {b}",
            _SERVER,
            lambda: _plan(q, RotatingParticipation(b), bands=b),
        ),
        (
            "the same, adaptive threshold",
            f"participation = rotating, bands = {b}, clip-quantile = 0.5",
            _SERVER,
            lambda: _plan(q, RotatingParticipation(b), bands=b, adaptive=adaptive),
        ),
        (
            "Poisson, adaptive threshold",
            f"participation = poisson, sample-rate = {shown}, clip-quantile = 0.5",
            _SECRET,
            lambda: _plan(q, PoissonParticipation(rate), adaptive=adaptive),
        ),
        (
            "fixed, noise at the clients",
            f"participation = fixed, clients-per-round = {size}, noise-location = client",
            _CLIENTS,
            lambda: _plan(q, FixedParticipation(size), noise_location="client"),
        ),
        (
            "fixed, noise that needs no server",
            f"participation = fixed, clients-per-round = {size}, noise-location = client, "
            "noise-multiplier = this z, and at every client a policy with max-local-epsilon",
            "nobody, where clients have a policy; else the server's code",
            lambda: _for_messages(q, size),
        ),
    ]
    return [_of(q, *way) for way in ways]


def _plan(q: Question, participation: Any, **options: Any) -> PrivacyPlan:
    return calibrated(_uncalibrated(q, participation, **options), q.epsilon)


def _uncalibrated(q: Question, participation: Any, **options: Any) -> PrivacyPlan:
    return PrivacyPlan(
        ClipNorm(q.clip_norm),
        1.0,
        q.clients,
        q.rounds,
        participation,
        delta=q.delta,
        accountant=q.accountant,
        **options,
    )


def _for_messages(q: Question, size: int) -> PrivacyPlan:
    """Clients whose own messages keep the budget against the server, too, by the accountant of
    `PrivacyPlan.local_figure`."""
    plan = _uncalibrated(q, FixedParticipation(size), noise_location="client")
    z = calibrate(
        q.epsilon,
        q.delta,
        lambda z: replace(plan, noise_multiplier=z).local_release(),
        q.rounds,
        accountant="rdp",
    )
    plan = replace(plan, noise_multiplier=z)
    plan.check_figure(central=False)
    return plan


def _of(
    q: Question, name: str, settings: str, trusted: str, make: Callable[[], PrivacyPlan]
) -> Option:
    try:
        plan = make()
        multiplier = plan.update_multiplier
    except ValueError as error:
        return Option(name, settings, math.nan, trusted, refused=str(error))
    once = (
        plan.noise_in_round(q.rounds)
        * multiplier
        * q.clip_norm
        * math.sqrt(q.dimension)
        / plan.cohort_size
    )
    apart = once / float(round_deviations(plan.bands, q.rounds)[-1])
    total = apart * float(summed_deviations(plan.bands, q.rounds)[-1])
    signal = q.rounds * min(q.update_norm, q.clip_norm)
    lost = total**2 / (total**2 + signal**2)
    z = plan.noise_multiplier
    return Option(name, settings, plan.cohort_size, trusted, z, once, total, lost)


def plot_options(question: Question, options: Sequence[Option], path: Path) -> Path:
    """How long the noise of all rounds together is in every way, against what updates could add up
    to. Raises OSError where `path` cannot be written."""
    known = [option for option in options if not option.refused][::-1]
    figure = new_figure(0.9 + 0.34 * len(known))
    axes = new_axes(figure)
    axes.barh([option.name for option in known], [o.total_noise for o in known], color=BLUE)
    signal = question.rounds * min(question.update_norm, question.clip_norm)
    axes.axvline(signal, color=ORANGE, label="updates that all agree, together")
    axes.set_xscale("log")
    axes.set_xlabel("noise of all rounds together (length, in the unit of clip-norm)")
    legend_above(axes)
    return save(figure, path)
