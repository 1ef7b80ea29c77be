"""How many rounds a run has had and its ledger must hold, by everything else that it left.

A ledger that was lost, or put back from a backup, would understate what was released. Where it was
lost together with the rest of the folder nobody can know.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from server_app.run_folder import CHECKPOINTS, METRICS, OPERATOR, read_summary
from server_app.state_files import Saved, whole_states

_CHECKPOINT = re.compile(r"round-(\d+)\.safetensors")


def rounds_on_record(folder: Path) -> int:
    """The most rounds, those of earlier runs included, that anything in the run folder shows to
    have been charged: its states, lines, checkpoints and summary."""
    before = rounds_before_on_record(folder) or 0
    found = [before + last_round_on_record(folder)]
    found += [own["rounds_charged"] for own in _owns(folder)]
    found += [line["rounds_charged"] for line in _lines(folder) if "rounds_charged" in line]
    summary = read_summary(folder) or {}
    found.append((summary.get("privacy") or {}).get("rounds_charged", 0))
    return max(found)


def rounds_before_on_record(folder: Path) -> int | None:
    """How many rounds had been charged when the run began; None where no state says so."""
    return next((own["rounds_before"] for own in _owns(folder)), None)


def last_round_on_record(folder: Path) -> int:
    """The last round of which there is a line or a model; 0 where there is none."""
    lines = [line["round"] for line in _lines(folder) if "round" in line]
    names = [_CHECKPOINT.fullmatch(path.name) for path in (folder / CHECKPOINTS).glob("round-*")]
    return max([0, *lines, *(int(name[1]) for name in names if name)])


def rounds_begun(folder: Path, saved: Saved) -> int:
    """How often at most the run in `folder`, whose state is `saved`, has asked clients to train:
    one round may have been under way when it died, of which nothing is on record."""
    since = last_round_on_record(folder) - saved.state.server_round
    begun = saved.state.values.get("rounds_begun", saved.state.server_round)
    return int(begun) + max(0, since) + 1


def _owns(folder: Path) -> list[dict[str, Any]]:
    """What the private strategy remembered, newest first."""
    owns = [saved.state.values.get("own", {}) for saved in whole_states(folder)]
    return [own for own in owns if "rounds_charged" in own]


def _lines(folder: Path) -> Iterator[dict[str, Any]]:
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
