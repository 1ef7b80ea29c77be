"""What every option of a private strategy does to its claim: one row each, and none without.

An option that has no row is refused under a claim, so that a new one cannot break it in silence.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .aggregation.mean import weighted_mean
from .bounded_update import BoundedUpdate
from .global_model import ModelLayout
from .privacy_plan import PrivacyPlan

Breaks = Callable[[Any, PrivacyPlan], bool]


@dataclass(frozen=True)
class Row:
    """`verdict` under a claim: "safe" with any value, "adjusted" by the strategy itself, "refused"
    where `breaks` says so of the value and the plan; then `instead` is what to set.
    """

    verdict: Literal["safe", "adjusted", "refused"]
    reason: str
    breaks: Breaks = lambda value, plan: False  # noqa: ARG005
    instead: str = ""


# The options of StrategyOptions.
OPTIONS: dict[str, Row] = {
    "aggregator": Row(
        "refused",
        "the sensitivity of a robust rule is not C/r; over noised messages the local figure holds",
        lambda value, plan: value is not weighted_mean and plan.noise_location == "server",
        "weighted_mean, or noise_location = client",
    ),
    "participation": Row("adjusted", "the plan's: what samples is what is accounted for"),
    "local_rate": Row("safe", "C is taken at the round's rate, on which nothing private acts"),
    "server_step": Row("safe", "it comes after the noise"),
    "weighting": Row(
        "refused",
        "a client's own count would set its influence",
        lambda value, plan: value != "uniform",  # noqa: ARG005
        "uniform",
    ),
    "identity": Row(
        "safe",
        "one id is one client, with a place of its own; of nodes only those there at the start",
    ),
    "num_clients": Row(
        "refused",
        "denominator and local figure count on the plan's; a start with fewer keeps others out",
        lambda value, plan: value != plan.num_clients,
        "the plan's num_clients",
    ),
    "start_timeout": Row(
        "safe",
        "who is missing has an empty place, all of them too; r stays the plan's",
    ),
    "min_replies": Row(
        "refused",
        "a skipped round tells how many took part",
        lambda value, plan: value > 1,  # noqa: ARG005
        "1",
    ),
    "fail_after": Row(
        "refused",
        "a run that fails tells how many took part",
        lambda value, plan: value is not None,  # noqa: ARG005
        "None",
    ),
    "enough_replies": Row(
        "refused",
        "one client's reply would crowd out another's, so that the sum moves by up to 2C",
        lambda value, plan: value is not None,  # noqa: ARG005
        "None",
    ),
    "evaluate_every": Row("safe", "the server evaluates what is released; no client is asked"),
    "output": Row("safe", "a choice among released models"),
    "shared": Row("safe", "what does not travel tells nothing; what does is noised"),
    "statistics": Row("safe", "an average of statistics that a model has is refused at the start"),
    "seed": Row("adjusted", "cohorts and noise come from the operating system whatever it is"),
    "observers": Row("safe", "they are the operator's own: what they see is not released"),
}

# What PrivateAveraging takes beside them, and what `start` does.
PRIVATE_OPTIONS: dict[str, Row] = {
    "privacy": Row("safe", "the claim itself, checked when the plan is made"),
    "ledger": Row("safe", "without a file the figure is that of this run alone"),
    "noises": Row("safe", "without a folder a run whose clients take turns ends where it dies"),
    "denominator": Row(
        "refused",
        "how many answered would scale the model that is released",
        lambda value, plan: value != "fixed",  # noqa: ARG005
        "fixed",
    ),
}
START_ARGUMENTS: dict[str, Row] = {
    "grid": Row("safe", "a transport; whose reply is late or lost is topped up for"),
    "initial_arrays": Row(
        "safe", "taken to be public, as the claim says; statistics stay as they are"
    ),
    "num_rounds": Row("refused", "more rounds than planned are refused, with and without a claim"),
    "timeout": Row("safe", "who answers late is missing, and the noise is what it was"),
    "train_config": Row("safe", "the clients' rule travels apart from it"),
    "evaluate_config": Row("adjusted", "no client is asked to evaluate"),
    "evaluate_fn": Row("safe", "it sees what is released; its examples are taken to be public"),
    "from_state": Row("refused", "where the ledger holds less than it did when the state was left"),
}


def check_options(plan: PrivacyPlan, options: Mapping[str, Any]) -> None:
    """Raises ValueError, one line, where an option given under the plan's claim would break it."""
    if not plan.claim:
        return
    for name, value in options.items():
        row = OPTIONS.get(name) or PRIVATE_OPTIONS.get(name)
        if row is None:
            raise ValueError(f"{name} is not known to be safe under a claim: omit it")
        if row.breaks(value, plan):
            shown = value if isinstance(value, str | int | float) else type(value).__name__
            raise ValueError(
                f"{name} = {shown} breaks the claim: {row.reason}; use {row.instead}, or "
                "claim = False"
            )


def check_mechanism(
    plan: PrivacyPlan, bounded: type[BoundedUpdate], ledger: Path | None, *, is_sum: bool
) -> None:
    """Raises ValueError, one line, where nothing would be charged to a ledger that is named, or C
    cannot follow the updates' lengths."""
    if ledger is not None and not (plan.claim and is_sum):
        raise ValueError(
            f"ledger = {ledger} is not allowed without a central claim: nothing would be "
            "charged to it; omit it"
        )
    if plan.adaptive is None:
        return
    # Where the count costs more than there is.
    _ = plan.update_multiplier
    if not bounded.shortens:
        raise ValueError(
            "adaptive is not allowed with normalised updates, which all have the length C: use "
            "DPFedAvg, or None"
        )
    if not is_sum:
        raise ValueError(
            "adaptive is not allowed with a robust aggregator: use weighted_mean, or None"
        )


def check_what_is_sent(plan: PrivacyPlan, layout: ModelLayout) -> None:
    """Raises ValueError, one line, where clients would send back what is not noised under the
    plan's claim, or their noise in a precision that loses it."""
    if plan.claim and layout.averaged:
        raise ValueError(
            "statistics = 'average' is not allowed under a privacy claim: "
            f"{layout.averaged[0]!r} would leave the clients without noise; use 'server' or "
            "'local'"
        )
    if plan.noise_location == "client" and layout.is_half:
        raise ValueError(
            "a model in half precision is not allowed with noise at the clients: it would be "
            "lost in rounding; send it as float32"
        )
