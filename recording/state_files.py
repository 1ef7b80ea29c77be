"""States of a run on disk, from which another process can go on with it.

    state/round-00012-00014-DIGEST.safetensors    arrays, and the rest as JSON in the metadata

Each is written as a whole or not at all, its name carries the digest of its content, and the one
before it stays: whatever ends the machine, there is one that is whole. The second number says how
many rounds had been begun, those that were done again counted: it tells which state of one round
is the newest, and is known even of a state that is damaged.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from blackthorn.strategies.durable_file import PRIVATE, private_folder, replace_file
from blackthorn.strategies.run_state import RunState

FOLDER = "state"
_FORMAT = 1
_METADATA = "blackthorn"
# (Earlier versions did not name the rounds begun.)
_NAME = re.compile(r"round-(\d+)-(?:(\d+)-)?([0-9a-f]{32})\.safetensors")


@dataclass(frozen=True)
class Saved:
    """A run after a round: the strategy's state (round 0: nothing yet), what the run folder
    remembers beside it (arrays, and JSON values), and the configuration it ran with.

    `damaged`: names of the newer files, which could not be used. `place`: the run folder, when it
    was written; empty: an earlier version did not say.
    """

    state: RunState
    arrays: Mapping[str, np.ndarray]
    values: Mapping[str, Any]
    config: Mapping[str, Any]
    damaged: tuple[str, ...] = ()
    place: str = ""


def write_saved(run: Path, saved: Saved) -> None:
    """On disk when this returns; the newest one before it is kept, older ones are not."""
    content = _encode(replace(saved, place=str(run.resolve())))
    digest = hashlib.blake2b(content, digest_size=16).hexdigest()
    private_folder(run / FOLDER)
    done, begun = saved.state.server_round, saved.state.begun
    written = run / FOLDER / f"round-{done:05d}-{begun:05d}-{digest}.safetensors"
    replace_file(written, content, private=True)
    others = [path for path, *_ in _files(run) if path != written]
    for old in others[:-1]:
        old.unlink()
    for kept in others[-1:]:
        kept.chmod(PRIVATE)


def read_saved(run: Path) -> Saved | None:
    """The newest whole state in the run folder; None where there is none.

    Raises ValueError, one line, for a state of another version.
    """
    damaged: list[str] = []
    for path, content in _newest_first(run):
        if content is not None:
            return replace(_decode(content, path), damaged=tuple(damaged))
        damaged.append(path.name)
    return None


def rounds_begun_by_state(run: Path) -> Iterator[tuple[int, int]]:
    """Of all states, damaged ones too: after which round, and how many had been begun."""
    for _, number, begun, _ in _files(run):
        yield number, begun


def forget_after(run: Path, server_round: int) -> None:
    """Remove states of later rounds: they are damaged, or of a future that did not happen."""
    for path, number, *_ in _files(run):
        if number > server_round:
            path.unlink()


def forget_all(run: Path) -> None:
    """Remove the states of a run that needs them no more."""
    shutil.rmtree(run / FOLDER, ignore_errors=True)


def _files(run: Path) -> list[tuple[Path, int, int, str]]:
    """States with their round, the rounds begun, and their digest; oldest first."""
    matches = [(path, _NAME.fullmatch(path.name)) for path in (run / FOLDER).glob("round-*")]
    found = [(path, int(m[1]), int(m[2] or m[1]), m[3]) for path, m in matches if m]
    return sorted(found, key=lambda file: file[1:])


def _newest_first(run: Path) -> Iterator[tuple[Path, bytes | None]]:
    """States with their content; None of those that are damaged."""
    for path, *_, digest in reversed(_files(run)):
        content = path.read_bytes()
        whole = hashlib.blake2b(content, digest_size=16).hexdigest() == digest
        yield path, content if whole else None


def _encode(saved: Saved) -> bytes:
    parts = {"run": saved.state.arrays, "folder": saved.arrays}
    arrays = {f"{part}/{name}": a for part, named in parts.items() for name, a in named.items()}
    about = {
        "format": _FORMAT,
        "round": saved.state.server_round,
        "run": saved.state.values,
        "folder": saved.values,
        "config": saved.config,
        "place": saved.place,
    }
    contiguous = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    return bytes(save(contiguous, metadata={_METADATA: json.dumps(about)}))


def _decode(content: bytes, path: Path) -> Saved:
    length = int.from_bytes(content[:8], "little")
    about = json.loads(json.loads(content[8 : 8 + length])["__metadata__"][_METADATA])
    if about["format"] != _FORMAT:
        raise ValueError(f"{path} has format {about['format']}, this version reads {_FORMAT}")
    arrays = load(content)
    run, folder = (
        {name.removeprefix(part): a for name, a in arrays.items() if name.startswith(part)}
        for part in ("run/", "folder/")
    )
    state = RunState(about["round"], run, about["run"])
    place = about.get("place", "")
    return Saved(state, folder, about["folder"], about["config"], place=place)
