"""Ends the process groups of a launcher that died without doing so itself (SIGKILL, a crash).

Run as `python -I -S orphan_reaper.py SCRATCH`, with the standard library alone. The launcher writes
`+GROUP` when it starts a process group and `-GROUP` when that has ended; what is left when the
pipe closes gets SIGTERM and, three seconds later, SIGKILL, and the folder SCRATCH is removed.
"""

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable

_GRACE_SECONDS = 3.0


def watch(lines: Iterable[str]) -> set[int]:
    """The groups that were still running when the launcher's lines ended."""
    running: set[int] = set()
    for line in lines:
        group = int(line[1:])
        if line[0] == "+":
            running.add(group)
        else:
            running.discard(group)
    return running


def end(groups: set[int], grace: float = _GRACE_SECONDS) -> None:
    """SIGTERM to every group, then SIGKILL after `grace` seconds."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for group in groups:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, number)
        if number is signal.SIGTERM:
            time.sleep(grace)


if __name__ == "__main__":
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    orphans = watch(sys.stdin)
    if orphans:
        end(orphans)
        shutil.rmtree(sys.argv[1], ignore_errors=True)
