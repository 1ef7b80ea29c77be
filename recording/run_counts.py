"""What a run counts over its rounds, for summary.json."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from blackthorn.recording.folder_place import OPERATOR
from blackthorn.recording.state_files import Saved
from blackthorn.strategies import RoundReport

# Reasons hold what clients sent, and a client that lies can make up many.
_REASONS = 20
_OTHER = "other reasons"

Failures = dict[str, dict[str, int]]


def _no_failures() -> Failures:
    return {"replies": {}, "rounds": {}}


@dataclass
class Counts:
    """Sums over the rounds, and the last evaluation's metrics (`final`).

    `failures`: of replies that did not count, and of rounds that left the model as it was, how
    many for which reason.
    """

    rounds: int = 0
    rounds_skipped: int = 0
    last_skip: str = ""
    final: dict[str, float] = field(default_factory=dict)
    clients: dict[str, int] = field(
        default_factory=lambda: {"invited": 0, "replied": 0, "rejected": 0}
    )
    failures: Failures = field(default_factory=_no_failures)
    resumed_after: list[int] = field(default_factory=list)

    def add(self, report: RoundReport) -> None:
        """Count a round."""
        self.rounds = report.server_round
        self.clients["invited"] += len(report.invited)
        self.clients["replied"] += len(report.accepted)
        self.clients["rejected"] += len(report.rejected)
        if report.surplus:
            surplus = self.clients.get("surplus", 0)
            self.clients["surplus"] = surplus + len(report.surplus)
        self.final.update(report.metrics)
        for rejection in report.rejected:
            _count(self.failures["replies"], rejection.reason)
        if report.skipped:
            self.rounds_skipped += 1
            self.last_skip = _why(report, report.skipped)
            _count(self.failures["rounds"], report.skipped)

    def values(self) -> dict[str, Any]:
        """All of it in JSON's types."""
        return asdict(self)

    def restore(self, values: Mapping[str, Any]) -> None:
        """Go on from another run's `values`."""
        for name, value in values.items():
            setattr(self, name, value)


def _why(report: RoundReport, skipped: str) -> str:
    """Why the round was skipped, with one of the rejections that led to it. In a private run
    nobody is told: how many replies there were is in it."""
    if report.confidential:
        return f"why is in the run folder's {OPERATOR} alone"
    if not report.rejected:
        return skipped
    first = report.rejected[0]
    return f"{skipped}; client {first.client} was rejected: {first.reason}"


def failures_in(entries: Sequence[Mapping[str, Any]]) -> Failures:
    """The same failures, from the lines of metrics.jsonl."""
    failures = _no_failures()
    for entry in entries:
        for rejection in entry["rejected"]:
            _count(failures["replies"], rejection["reason"])
        if "skipped" in entry:
            _count(failures["rounds"], entry["skipped"])
    return failures


def _count(by_reason: dict[str, int], reason: str) -> None:
    if reason not in by_reason and len(by_reason) >= _REASONS:
        reason = _OTHER
    by_reason[reason] = by_reason.get(reason, 0) + 1


def cohort_of(report: RoundReport) -> dict[str, Any]:
    """What `last_report` needs of a round beside the model, in JSON's types."""
    return {
        "invited": report.invited,
        "accepted": report.accepted,
        "local_lr": report.local_lr,
        "skipped": report.skipped,
        "confidential": report.confidential,
    }


def last_report(saved: Saved) -> RoundReport:
    """The saved round as far as those need it who write files of the model."""
    model = torch.from_numpy(saved.state.arrays["model"].copy())
    return RoundReport(saved.state.server_round, rejected=[], model=model, **saved.values["report"])
