"""Where the runs of `blackthorn server` are: a note for each number by which Flower knows one."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

# The folder of the notes; there where `blackthorn server` is.
NOTES_VARIABLE = "BLACKTHORN_RUN_NOTES"


def note_folder(run_id: int, folder: Path) -> None:
    """Remember where this run is, should it be interrupted."""
    # Brings torch along, for which whoever reads a note need not wait.
    from blackthorn.strategies.durable_file import replace_file

    notes = os.environ.get(NOTES_VARIABLE)
    if notes:
        content = json.dumps({"folder": str(folder.resolve())})
        replace_file(_note(Path(notes), run_id), content.encode())


def noted_folder(run_id: int) -> Path | None:
    """Where the run is that was interrupted; None: it is a new one."""
    notes = os.environ.get(NOTES_VARIABLE)
    return folder_of_run(Path(notes), run_id) if notes else None


def folder_of_run(notes: Path, run_id: int) -> Path | None:
    """Where the folder `notes` says that a run is; None where it does not."""
    return _read(_note(notes, run_id))


def folders_of_runs(notes: Path) -> Iterator[tuple[int, Path]]:
    """All runs of which there is a note, with their folders."""
    for note in sorted(notes.glob("run-*.json")):
        number, folder = note.stem.removeprefix("run-"), _read(note)
        if number.isdecimal() and folder is not None:
            yield int(number), folder


def _note(notes: Path, run_id: int) -> Path:
    return notes / f"run-{run_id}.json"


def _read(note: Path) -> Path | None:
    return Path(json.loads(note.read_text())["folder"]) if note.exists() else None
