"""Programs that run until they are told to stop: restarted with back-off when they end.

The supervisor is one loop in one thread. It starts its programs in order, looks after them a few
times a second, and hands each new line of their output to the program's own listener.
"""

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from .process_groups import ProcessGroup, ProcessKeeper

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
# A program that ran this long is given a fresh start the next time it ends.
_SOUND_SECONDS = 60.0
_LOOK_SECONDS = 0.2

Say = Callable[[str], None]


class NotYet(RuntimeError):
    """A program cannot start at the moment; the message says why. It is tried again later."""


@dataclass(frozen=True)
class Program:
    """A program to keep alive.

    `before` is called ahead of every start and may raise NotYet. `on_line` gets every line of its
    output, `on_end` the running number of the end and the last lines; it returns what to say (an
    empty text: nothing).
    """

    name: str
    command: Sequence[str]
    env: Mapping[str, str]
    before: Callable[[], None] = lambda: None
    on_line: Callable[[str], None] = lambda _line: None
    on_end: Callable[[int | None, str], str] | None = None


class _Kept:
    """A program with its process, its log's reading position and its back-off."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.group: ProcessGroup | None = None
        self.pause = FIRST_PAUSE
        self.due = 0.0
        self.began = 0.0
        self.read_to = 0
        # Its log, also where somebody has moved it.
        self.output: BinaryIO | None = None
        self.last_problem = ""

    def hang_up(self) -> None:
        if self.output is not None:
            self.output.close()
        self.output = None


class Supervisor:
    """Keeps programs alive. `say` gets one line for whatever a person should know."""

    def __init__(self, keeper: ProcessKeeper, logs: Path, cwd: Path, say: Say) -> None:
        self._keeper = keeper
        self._logs = logs
        self._cwd = cwd
        self._say = say
        self._kept: dict[str, _Kept] = {}
        logs.mkdir(parents=True, exist_ok=True)

    def add(self, program: Program) -> None:
        """Start `program` at the next look, and again whenever it ends."""
        self._kept[program.name] = _Kept(program)

    def running(self, name: str) -> bool:
        """Whether the program runs now."""
        group = self._kept[name].group
        return group is not None and group.alive

    def run(self, until: Callable[[], bool], seconds: float | None = None) -> bool:
        """Look after the programs until a condition holds (True), or `seconds` are over (False)."""
        end = None if seconds is None else time.monotonic() + seconds
        while True:
            self.look()
            if until():
                return True
            if end is not None and time.monotonic() > end:
                return False
            time.sleep(_LOOK_SECONDS)

    def look(self) -> None:
        """Read what the programs wrote, and start those that do not run and are due."""
        for kept in self._kept.values():
            self._read(kept)
            if kept.group is not None and not kept.group.alive:
                self._ended(kept)
            if kept.group is None and time.monotonic() >= kept.due:
                self._start(kept)

    def stop(self, name: str, grace: float, at_once: Callable[[], bool]) -> None:
        """End a program for good."""
        kept = self._kept.pop(name, None)
        if kept is not None and kept.group is not None:
            self._keeper.stop([kept.group], grace, at_once)
            kept.hang_up()

    def _start(self, kept: _Kept) -> None:
        program = kept.program
        try:
            program.before()
        except NotYet as problem:
            # The same problem again is no news.
            if str(problem) != kept.last_problem:
                self._say(f"{problem}; trying again")
            kept.last_problem = str(problem)
            self._postpone(kept)
            return
        kept.last_problem = ""
        log = self._logs / f"{program.name}.log"
        kept.read_to = log.stat().st_size if log.exists() else 0
        kept.group = self._keeper.start(
            program.name, program.command, env=program.env, cwd=self._cwd, log=log
        )
        with contextlib.suppress(FileNotFoundError):
            kept.output = log.open("rb")
        kept.began = time.monotonic()

    def _ended(self, kept: _Kept) -> None:
        group = kept.group
        assert group is not None
        self._read(kept)
        kept.hang_up()
        kept.group = None
        self._keeper.forget_ended()
        if time.monotonic() - kept.began >= _SOUND_SECONDS:
            kept.pause = FIRST_PAUSE
        if kept.program.on_end is not None:
            said = kept.program.on_end(group.returncode, group.tail())
        else:
            said = describe_exit(group.name, group.returncode, group.tail())
        if said:
            self._say(f"{said}; starting it again in {kept.pause:g} s (log: {group.log})")
        self._postpone(kept)

    def _postpone(self, kept: _Kept) -> None:
        kept.due = time.monotonic() + kept.pause
        kept.pause = min(2 * kept.pause, LONGEST_PAUSE)

    def _read(self, kept: _Kept) -> None:
        if kept.output is None:
            return
        # A program may begin its log anew when it has grown too large.
        size = kept.output.seek(0, os.SEEK_END)
        kept.read_to = kept.read_to if kept.read_to <= size else 0
        kept.output.seek(kept.read_to)
        complete, newline, _ = kept.output.read().rpartition(b"\n")
        kept.read_to += len(complete) + len(newline)
        for line in complete.decode(errors="replace").splitlines():
            kept.program.on_line(line)


def describe_exit(name: str, status: int | None, tail: str) -> str:
    """One line for a program that ended: its status and the last thing it said."""
    last = next((line.strip() for line in reversed(tail.splitlines()) if line.strip()), "")
    how = f"was killed by signal {-status}" if status and status < 0 else f"ended ({status})"
    return f"{name} {how}" + (f": {last[:200]}" if last else "")
