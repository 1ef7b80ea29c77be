"""Where a run's folder is, who may read it, and what its files' times tell.

Under a privacy claim the folder is its owner's alone: beside what is released it holds what is not,
and a listing would tell how long every round took. What is handed on from there is a copy.
"""

import os
import shutil
import stat
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from blackthorn.recording.client_history import CLIENTS
from blackthorn.settings.config import ConfigError, RunConfig
from blackthorn.settings.own_code import short_name
from blackthorn.settings.privacy_checks import claims_anything

CONFIG = "config.toml"
METRICS = "metrics.jsonl"
OPERATOR = "operator.jsonl"
CHECKPOINTS = "checkpoints"
OWN_CODE = "own_code"
SUMMARY = "summary.json"
PLOTS = "plots"
REPORT = "report.html"
# TensorBoard's.
EVENTS = "events.out.tfevents.*"
# What `blackthorn predict` draws, of whatever examples it is given.
PREDICTIONS = "predictions"
# What a run leaves, apart from samples of a posterior, of which nothing is claimed: what may be
# handed on under a claim, and what may not and is for its owner's eyes whether there is a claim or
# not.
RELEASED = (CONFIG, OWN_CODE, METRICS, SUMMARY, CHECKPOINTS, PLOTS, REPORT, EVENTS)
WITHHELD = (OPERATOR, "state", "ledger.json", PREDICTIONS, "logs", "logs-*")
_WRITTEN = (CONFIG, CLIENTS, OPERATOR, CHECKPOINTS, PLOTS, REPORT)
# What a run makes of its rounds when it ends, however it does; the summary, which the others are
# to agree with, last.
_OF_ITS_END = (
    REPORT,
    PLOTS,
    f"{CHECKPOINTS}/final.safetensors",
    "posterior/diagnostics.json",
    SUMMARY,
)


def choose_folder(config: RunConfig) -> Path:
    """Where a run goes: resume, output-dir, or a new folder under runs/. Creates nothing.

    Raises ConfigError if output-dir already holds a run or what a run would write over, or cannot
    be written.
    """
    if config.resume:
        return Path(config.resume).expanduser()
    if not config.output_dir:
        stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S-%f")[:-3]
        return Path("runs") / f"{stamp}-{short_name(config.algorithm)}-{short_name(config.task)}"
    folder = Path(config.output_dir).expanduser()
    try:
        if (folder / METRICS).exists() or (folder / SUMMARY).exists():
            raise ConfigError(
                f"output-dir = {config.output_dir} already holds a run: choose another folder"
            )
        # Somebody else's: a run would write over it.
        taken = [name for name in _WRITTEN if (folder / name).exists()]
        if taken:
            raise ConfigError(
                f"output-dir = {config.output_dir} already has {taken[0]}: choose another folder"
            )
        parent = next(p for p in (folder, *folder.absolute().parents) if p.exists())
        others = claims_anything(config) and folder == parent and _is_shared(folder)
    except OSError as error:
        raise _unwritable(config.output_dir, error) from None
    if others:
        raise ConfigError(
            f"output-dir = {config.output_dir} is not allowed under a privacy claim: it holds "
            "other files, and others may read it; choose another folder, or take their right away "
            f"(chmod go= {config.output_dir})"
        )
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise ConfigError(f"output-dir = {config.output_dir} cannot be written")
    return folder


def _is_shared(folder: Path) -> bool:
    """Whether a folder that is there and in use may be entered by anybody but its owner."""
    return bool(stat.S_IMODE(folder.stat().st_mode) & 0o077) and any(folder.iterdir())


def _unwritable(folder: object, error: OSError) -> ConfigError:
    return ConfigError(f"output-dir = {folder} cannot be written: {error.strerror}")


def create_folder(folder: Path, config: RunConfig) -> None:
    """Make the run's folder; ConfigError where that cannot be done (choose_folder cannot know)."""
    # Brings torch along, for which whoever reads a folder need not wait.
    from blackthorn.strategies.durable_file import private_folder

    try:
        if claims_anything(config):
            private_folder(folder)
        else:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from None


def set_aside(folder: Path) -> None:
    """Rename a folder of an earlier call, if there is one: nothing that was written is lost."""
    if folder.exists():
        stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S-%f")[:-3]
        folder.rename(folder.with_name(f"{folder.name}-until-{stamp}"))


def forget_begun(folder: Path) -> None:
    """Remove what a run writes before its first round, so that another may begin there."""
    from blackthorn.recording.state_files import forget_all

    for name in (METRICS, CLIENTS, OPERATOR, CONFIG):
        (folder / name).unlink(missing_ok=True)
    forget_all(folder)


def forget_end(folder: Path, names: Sequence[str] = _OF_ITS_END) -> None:
    """Remove what an end of the run has left, or `names` of that: a run that goes on spends more,
    and learns more, than it says."""
    for path in map(folder.joinpath, names):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def began(folder: Path) -> int:
    """When the folder's run began, in nanoseconds since 1970: one that is resumed did when it first
    did. Now, where none has begun."""
    path = folder / CONFIG
    return path.stat().st_mtime_ns if path.exists() else time.time_ns()


def hide_times(folder: Path, *written: Path) -> None:
    """Let the files `written`, by default all that may be released, and the folders they are in
    say that they are as old as the run: a copy keeps the times of its original."""
    start = began(folder)
    for path in written or _released(folder):
        for one in (path, path.parent, folder):
            os.utime(one, ns=(start, start))


def _released(folder: Path) -> Iterator[Path]:
    for pattern in RELEASED:
        for path in folder.glob(pattern):
            yield path
            yield from path.glob("*")
