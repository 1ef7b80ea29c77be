"""All runs in a folder, and what may be removed of them: never a ledger, never a run that goes on.

Only what a run is known to leave is removed; whatever else lies in its folder stays, another run's
ledger among it.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from blackthorn.recording.client_history import CLIENTS
from blackthorn.recording.folder_place import (
    CONFIG,
    METRICS,
    OPERATOR,
    OWN_CODE,
    RELEASED,
    SUMMARY,
    WITHHELD,
    began,
)
from blackthorn.recording.line_log import in_use
from blackthorn.recording.posterior_store import FOLDER as POSTERIOR
from blackthorn.recording.run_figures import RunFigures, run_figures
from blackthorn.recording.run_ledger import LEDGER
from blackthorn.recording.state_files import FOLDER as STATE

_LEFT = (*RELEASED, *WITHHELD, CLIENTS, POSTERIOR)
# What counts what a run under a claim has told: who removes it says that it told nothing.
_COUNTS = (CONFIG, OWN_CODE, METRICS, OPERATOR, SUMMARY, LEDGER)
# Of a run that could go on from its last state.
INTERRUPTED = "interrupted"
GOES_ON = "running"


@dataclass(frozen=True)
class ListedRun:
    """A run folder: its `name` within what was looked through, `completed`, `failed`, `running` or
    `interrupted`, its figures, when it began, and the bytes of all that is in it.

    `stripped`: a run under a claim of which only the record and the ledger are left.
    """

    folder: Path
    name: str
    status: str
    figures: RunFigures
    began: datetime
    size: int
    stripped: bool

    @property
    def epsilon(self) -> float | None:
        """The summary's, of clients."""
        return self.figures.epsilons.get("client")

    @property
    def sample_epsilon(self) -> float | None:
        """The summary's, of one example, whose figure is no client's."""
        return self.figures.epsilons.get("example")


def list_runs(root: Path) -> list[ListedRun]:
    """Every run under `root`, by when it began. Links are not followed."""
    found = [_listed(folder, root) for folder in run_folders(root)]
    return sorted(found, key=lambda run: (run.began, run.name))


def run_folders(root: Path) -> Iterator[Path]:
    """Every folder under `root`, itself too, that a run has written its rounds to."""
    for folder, below, names in os.walk(root):
        if METRICS in names:
            below.clear()
            yield Path(folder)


def _listed(folder: Path, root: Path) -> ListedRun:
    name = folder.relative_to(root).as_posix()
    parts = [path for path in folder.rglob("*") if not path.is_symlink()]
    size = sum(_size(path) for path in parts)
    figures = run_figures(folder, over=True)
    when = datetime.fromtimestamp(began(folder) / 1e9, UTC)
    kept = {path.name for path in folder.iterdir()}
    stripped = _must_count(folder, figures) and not kept - set(_COUNTS)
    return ListedRun(folder, name, _status(folder), figures, when, size, stripped)


def _size(path: Path) -> int:
    # A run that goes on replaces its files.
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_size if path.is_file() else 0
    return 0


def _status(folder: Path) -> str:
    if in_use(folder / METRICS):
        return GOES_ON
    status = "incomplete"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        status = str(json.loads((folder / SUMMARY).read_text(encoding="utf-8"))["status"])
    resumable = status != "completed" and any((folder / STATE).glob("round-*"))
    return INTERRUPTED if resumable else "failed" if status == "incomplete" else status


def to_prune(
    runs: Sequence[ListedRun], keep: int | None, older: timedelta | None, *, interrupted: bool
) -> list[ListedRun]:
    """Those that go: all but the newest `keep`, and of these those that began more than `older`
    ago (either None: no such limit); of runs that could go on only with `interrupted`."""
    now = datetime.now(UTC)
    spared = () if keep is None else [run.folder for run in runs[max(0, len(runs) - keep) :]]
    return [
        run
        for run in runs
        if run.status != GOES_ON
        and (interrupted or run.status != INTERRUPTED)
        and not run.stripped
        and run.folder not in spared
        and (older is None or now - run.began > older)
    ]


def prune(run: ListedRun) -> int:
    """Remove what a run has left, and its folder where that is empty then; the bytes removed.

    Of one with a ledger, or under a claim, what counts what it has told stays. Nothing of one that
    goes on by now.
    """
    folder = run.folder
    if in_use(folder / METRICS):
        return 0
    stays = _COUNTS if _must_count(folder, run.figures) else ()
    removed = 0
    for pattern in _LEFT:
        for path in folder.glob(pattern):
            if path.name not in stays and path.name != LEDGER:
                removed += _remove(path)
    with contextlib.suppress(OSError):
        folder.rmdir()
    return removed


def _must_count(folder: Path, figures: RunFigures) -> bool:
    return figures.claimed or bool(figures.epsilons) or (folder / LEDGER).exists()


def _remove(path: Path) -> int:
    if path.is_symlink() or path.is_file():
        size = path.lstat().st_size
        path.unlink()
        return size
    size = sum(_size(part) for part in path.rglob("*") if not part.is_symlink())
    shutil.rmtree(path)
    return size
