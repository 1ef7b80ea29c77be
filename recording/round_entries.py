"""What is written down of a round: its lines of metrics.jsonl and of operator.jsonl."""

from dataclasses import asdict
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
