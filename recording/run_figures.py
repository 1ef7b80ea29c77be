"""A run's figures for whoever watches many: from what its folder holds, without torch.

Only files that may be released are read (`folder_place.RELEASED`). Under a privacy claim they hold
nothing of single clients or of a cohort; and how far such a run is, is told only once it is over:
who is shown every round as it ends is shown how long it took, and so that somebody was missing.
"""

import json
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blackthorn.recording.client_history import read_lines
from blackthorn.recording.folder_place import CONFIG, METRICS, SUMMARY
from blackthorn.settings.config import make_config
from blackthorn.settings.privacy_checks import claims_privacy

# Reasons hold what clients sent: a class is known by how our own words begin, or stand in them.
_CLASSES = {
    "no reply": r"no reply by the deadline|the message could not be sent|its node is no longer |"
    r"the reply was announced, but not uploaded",
    "error": r"error \d+: ",
    "attestation": r"the reply (attests|gives back)",
    "form": r"(\d+ array records in|missing entry|unexpected entry|the reply (is empty|cannot be))|"
    r"[^:]*: (unknown serialisation|the payload is not|\d+ bytes of data|dtype |shape )",
    "values": r"the (model|statistic|update) |num-examples|[^:]*: not finite",
}
OTHER = "other"
REASON_CLASSES = (*_CLASSES, OTHER)


def reason_class(reason: str) -> str:
    """Which of REASON_CLASSES a rejection's reason is of."""
    return next((name for name, begins in _CLASSES.items() if re.match(begins, reason)), OTHER)


@dataclass(frozen=True)
class RunFigures:
    """What is told of a run: `claimed`, whether it is under a privacy claim; the rounds it did,
    skipped and planned; seconds by phase; replies by outcome and class of their reason; and the
    epsilons of its summary, of clients and of examples."""

    claimed: bool
    planned: int = 0
    rounds: int | None = None
    skipped: int | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    replies: Mapping[tuple[str, str], int] = field(default_factory=dict)
    epsilons: Mapping[str, float] = field(default_factory=dict)


def run_figures(folder: Path, over: bool) -> RunFigures:
    """The figures of the run in `folder`; of one under a claim none before it is `over`. One whose
    configuration cannot be read is taken for such a run."""
    try:
        values = tomllib.loads((folder / CONFIG).read_text(encoding="utf-8"))
        config = make_config(values)
    except (OSError, ValueError):
        return RunFigures(claimed=True)
    if not values:
        return RunFigures(claimed=True)
    claimed, planned = claims_privacy(config), config.num_server_rounds
    if claimed and not over:
        return RunFigures(claimed, planned)
    # Rounds that were done twice count once, as they were done last.
    entries = {entry["round"]: entry for entry in read_lines(folder / METRICS)}
    rounds = [entry for number, entry in sorted(entries.items()) if number > 0]
    return RunFigures(
        claimed,
        planned,
        rounds[-1]["round"] if rounds else 0,
        None if claimed else sum("skipped" in entry for entry in rounds),
        _seconds(rounds),
        _replies(rounds),
        _epsilons(folder / SUMMARY),
    )


def _seconds(rounds: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    total: Counter[str] = Counter()
    for entry in rounds:
        total.update(entry.get("seconds", {}))
    return dict(total)


def _replies(rounds: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], int]:
    found: Counter[tuple[str, str]] = Counter()
    for entry in rounds:
        filtered = len(entry.get("filtered", ()))
        found["kept", ""] += entry.get("replied", 0) - filtered
        found["filtered", ""] += filtered
        found["surplus", ""] += len(entry.get("surplus", ()))
        for rejection in entry.get("rejected", ()):
            kind = reason_class(rejection["reason"])
            outcome = kind if kind == "no reply" else "rejected"
            found[outcome, "" if kind == "no reply" else kind] += 1
    return {key: count for key, count in found.items() if count}


def _epsilons(path: Path) -> dict[str, float]:
    """By whose they are; none before there is a summary."""
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    told = {"client": summary.get("privacy"), "example": summary.get("sample_privacy")}
    known = {whose: (entry or {}).get("epsilon") for whose, entry in told.items()}
    return {whose: float(value) for whose, value in known.items() if value is not None}
