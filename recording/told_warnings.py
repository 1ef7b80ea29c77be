"""The warnings of a run that its summary repeats: they outlive whoever was told.

A start tells what no later one can find: that the ledger was elsewhere, for example, which is
charged at its new place from then on. So a run's states remember what was told.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from blackthorn.recording.state_files import Saved, read_saved

TOLD = "told"


def each_once(lines: Iterable[str]) -> list[str]:
    """Without repetitions, in the order of the first times."""
    return list(dict.fromkeys(lines))


def told_before(saved: Saved) -> list[str]:
    """What was told of the run up to this state (by an earlier version's, nothing)."""
    return list(saved.values.get(TOLD, ()))


def told_on_record(folder: Path, entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """What was told of a run that left no summary, by its newest state and its rounds' lines."""
    try:
        saved = read_saved(folder)
    except ValueError:
        saved = None
    of_rounds = [told for entry in entries for told in entry.get("warnings", ())]
    return each_once([*(told_before(saved) if saved else ()), *of_rounds])
