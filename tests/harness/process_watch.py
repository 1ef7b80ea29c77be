"""Waiting on conditions with a bound, which processes run, and which use a file or a folder."""

import time
from collections.abc import Callable
from pathlib import Path


def until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    """Return when `condition()` holds; AssertionError after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        time.sleep(0.01)


def running(pid: int) -> bool:
    """Whether the process exists and has not ended (a zombie has)."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def having_open(path: Path) -> list[int]:
    """The processes that have the file open: a run's metrics its ServerApp, which writes them."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            files = {str(link.readlink()) for link in (process / "fd").iterdir()}
        except OSError:  # it has ended meanwhile
            continue
        if str(path) in files:
            found.append(int(process.name))
    return found


def working_in(folder: Path) -> list[int]:
    """The processes whose working directory this is: a cluster's its run folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            there = (process / "cwd").readlink()
        except OSError:  # it has ended meanwhile, or is somebody else's
            continue
        if there == folder and running(int(process.name)):
            found.append(int(process.name))
    return found
