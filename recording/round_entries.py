"""What is written down of a round: its lines of metrics.jsonl and operator.jsonl, and the numbers
of such a line, which is all that trackers know."""

import math
from collections.abc import Mapping
from dataclasses import asdict
from statistics import median
from typing import Any

from blackthorn.recording.client_history import client_fields
from blackthorn.strategies import RoundReport

# What clients call their metrics must not hide what the server says of the round.
_OWN_KEYS = (
    *("round", "local_lr", "invited", "replied", "rejected", "filtered", "over_bound"),
    *("seconds", "evaluated_by", "skipped", "instruments", "catastrophic_failure"),
    *("sample_epsilon", "epsilon_rdp", "rounds_charged", "rounds_of_earlier_runs", "run"),
    *("surplus", "refused"),
)

_LISTS_OF_CLIENTS = ("rejected", "filtered", "over_bound")
_COUNTS = ("invited", "replied")


def round_entry(report: RoundReport) -> dict[str, Any]:
    """One line of metrics.jsonl: under a privacy claim nothing of single clients or the cohort."""
    entry = {**_public_entry(report), **({} if report.confidential else _cohort_entry(report))}
    if report.evaluated_by:
        entry["evaluated_by"] = report.evaluated_by
    return entry


def operator_entry(report: RoundReport) -> dict[str, Any]:
    """One line of operator.jsonl, which is not part of what is released."""
    return {"round": report.server_round, **_cohort_entry(report), **client_fields(report)}


def _public_entry(report: RoundReport) -> dict[str, Any]:
    own = {key: value for key, value in report.metrics.items() if key not in _OWN_KEYS}
    return {"round": report.server_round, **own, "local_lr": report.local_lr}


def _cohort_entry(report: RoundReport) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "invited": len(report.invited),
        "replied": len(report.accepted),
        "rejected": [{"client": r.client, "reason": r.reason} for r in report.rejected],
        "filtered": report.filtered,
        "over_bound": report.over_bound,
        "seconds": {phase: round(s, 4) for phase, s in report.seconds.items()},
    }
    if report.sample_epsilons:
        entry["sample_epsilon"] = {str(c): e for c, e in report.sample_epsilons.items()}
    if report.surplus:
        entry["surplus"] = report.surplus
    if report.skipped:
        entry["skipped"] = report.skipped
    if report.refusals:
        entry["refused"] = [asdict(refusal) for refusal in report.refusals]
    return entry


def scalars(entry: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a line of metrics.jsonl by name, such as clients/rejected.

    Lists of clients count as their lengths, measures by client as their median.
    """
    found: dict[str, Any] = {}
    for key, value in entry.items():
        if key in _COUNTS:
            found[f"clients/{key}"] = value
        elif key in _LISTS_OF_CLIENTS:
            found[f"clients/{key}"] = len(value)
        elif isinstance(value, Mapping):
            found.update({f"{key}/{name}": _number(item) for name, item in value.items()})
        elif key != "round":
            found[key] = value
    return {name: float(value) for name, value in found.items() if _is_finite(value)}


def _number(value: Any) -> Any:
    """The median of a measure by client; anything else as it is."""
    if not isinstance(value, Mapping):
        return value
    known = [item for item in value.values() if _is_finite(item)]
    return median(known) if known else None


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
