"""How many rounds a run has had and its ledger must hold, by everything else that it left.

A ledger that was lost, or put back from a backup, would understate what was released. Where it was
lost together with the rest of the folder nobody can know.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from blackthorn.recording.run_folder import CHECKPOINTS, METRICS, OPERATOR, read_summary
from blackthorn.recording.state_files import Saved, read_saved, rounds_begun_by_state
from blackthorn.strategies.ledger import mark_of

_CHECKPOINT = re.compile(r"round-(\d+)\.safetensors")


def mark_on_record(folder: Path) -> dict[str, Any] | None:
    """Which ledger the run charges, and as which run: by its newest state or, of a run that writes
    none, by its lines, which name the run alone; None where nothing says so."""
    saved = read_saved(folder)
    if saved is not None:
        return mark_of(saved.state.values.get("own", {}))
    runs = [line["run"] for line in lines_on_record(folder) if "run" in line]
    return {"run": runs[-1], "charges": []} if runs else None


def rounds_of_run_on_record(folder: Path, mark: Mapping[str, Any] | None) -> int:
    """The most rounds that anything in the run folder shows to have been charged to the run itself,
    those that it did twice twice: its lines, checkpoints and summary."""
    # Lines of an earlier version say how many rounds the whole ledger held.
    before = (mark or {}).get("rounds_before", 0)
    told = [*lines_on_record(folder), (read_summary(folder) or {}).get("privacy") or {}]
    counts = [
        one["rounds_charged"] - one.get("rounds_of_earlier_runs", before)
        for one in told
        if one.get("rounds_charged") is not None
    ]
    return max([last_round_on_record(folder), *counts])


def last_round_on_record(folder: Path) -> int:
    """The last round of which there is a line or a model; 0 where there is none."""
    lines = [line["round"] for line in lines_on_record(folder) if "round" in line]
    names = [_CHECKPOINT.fullmatch(path.name) for path in (folder / CHECKPOINTS).glob("round-*")]
    return max([0, *lines, *(int(name[1]) for name in names if name)])


def rounds_begun(folder: Path, saved: Saved | None) -> int:
    """How often at most the run in `folder` has asked clients to train: one round may have been
    under way when it died, of which nothing is on record.

    `saved` is its newest whole state, if there is one. Every state is asked, those too that are
    damaged or another version's: all of them are of this run's past, and their names say it.
    """
    last = last_round_on_record(folder)
    states = [(0, 0), *rounds_begun_by_state(folder)]
    if saved is not None:
        states.append((saved.state.server_round, saved.state.begun))
    return max(begun + max(0, last - done) for done, begun in states) + 1


def lines_on_record(folder: Path) -> Iterator[dict[str, Any]]:
    """The lines of metrics.jsonl and operator.jsonl; what is torn or damaged is left out."""
    for name in (METRICS, OPERATOR):
        path = folder / name
        for line in path.read_bytes().splitlines() if path.exists() else ():
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if isinstance(entry, dict):
                yield entry
