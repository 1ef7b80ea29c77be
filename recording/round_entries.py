"""What is written down of a round: its lines of metrics.jsonl and operator.jsonl, and the numbers
of such a line, which is all that trackers know."""

import math
from collections.abc import Mapping
from dataclasses import asdict
from statistics import median
from typing import TYPE_CHECKING, Any

from blackthorn.recording.client_history import client_fields
from blackthorn.wire import ROUND_FIELDS

# Who follows a run somewhere else need not wait for torch.
if TYPE_CHECKING:
    from blackthorn.strategies import RoundReport

# What was spent: a figure, or a count of what is charged, that is shown as less is false.
_BOUNDS = ("epsilon_rdp", "sample_epsilon", "rounds_charged", "rounds_of_earlier_runs")
_LISTS_OF_CLIENTS = ("rejected", "filtered", "over_bound")
_COUNTS = ("invited", "replied")


def round_entry(report: "RoundReport") -> dict[str, Any]:
    """One line of metrics.jsonl: under a privacy claim nothing of single clients or the cohort."""
    entry = {**_public_entry(report), **({} if report.confidential else _cohort_entry(report))}
    if report.evaluated_by:
        entry["evaluated_by"] = report.evaluated_by
    if report.unevaluated:
        entry["unevaluated"] = report.unevaluated
    if report.warnings:
        entry["warnings"] = report.warnings
    return entry


def metrics_of(entry: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of a round's evaluation in its line of metrics.jsonl."""
    if not entry.get("evaluated_by"):
        return {}
    return {k: v for k, v in entry.items() if k not in ROUND_FIELDS and _is_number(v)}


def operator_entry(report: "RoundReport") -> dict[str, Any]:
    """One line of operator.jsonl, which is not part of what is released."""
    return {"round": report.server_round, **_cohort_entry(report), **client_fields(report)}


def _public_entry(report: "RoundReport") -> dict[str, Any]:
    # What clients call their metrics must not hide what the server says of the round.
    own = {key: value for key, value in report.metrics.items() if key not in ROUND_FIELDS}
    return {"round": report.server_round, **own, "local_lr": report.local_lr, **report.told}


def _cohort_entry(report: "RoundReport") -> dict[str, Any]:
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


def is_bound(name: str) -> bool:
    """Whether one of the `scalars` says what was spent."""
    return name.partition("/")[0] in _BOUNDS


def _number(value: Any) -> Any:
    """The median of a measure by client; anything else as it is."""
    if not isinstance(value, Mapping):
        return value
    known = [item for item in value.values() if _is_finite(item)]
    return median(known) if known else None


def _is_finite(value: Any) -> bool:
    return _is_number(value) and math.isfinite(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
