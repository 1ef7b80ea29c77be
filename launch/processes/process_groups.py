"""Programs that a launcher owns: each in a process group of its own, none left behind."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from . import interrupts

_TAIL_BYTES = 4000
# What the kernel may need to carry out a SIGKILL on a busy machine.
_KILL_SECONDS = 10.0


class ProcessGroup:
    """A running program and whatever it starts in its process group, with its output in a file.

    The leader is not reaped until its group has been ended: as long as it is a zombie its id
    cannot be given to another process, so that no signal of ours ever hits a stranger.
    """

    def __init__(
        self, name: str, command: Sequence[str], *, env: Mapping[str, str], cwd: Path, log: Path
    ) -> None:
        self.name = name
        self.log = log
        with log.open("ab") as output:
            self._leader = subprocess.Popen(
                command,
                env=dict(env),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,
            )

    @property
    def pid(self) -> int:
        """Process id of the leader, which is the group's id too."""
        return self._leader.pid

    @property
    def returncode(self) -> int | None:
        """None while the leader runs, then its exit status (negative: died of that signal).

        A leader that has ended takes the rest of its group with it.
        """
        if self._leader.returncode is None and self._leader_has_exited():
            self._signal(signal.SIGKILL)
            self._leader.wait()
        return self._leader.returncode

    @property
    def alive(self) -> bool:
        """Whether the leader runs."""
        return self.returncode is None

    def terminate(self) -> None:
        """SIGTERM to the group; follow with `is_quiet` and `kill`."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to the group."""
        self._signal(signal.SIGKILL)

    def is_quiet(self) -> bool:
        """Whether neither the leader nor anything else in its group runs any more."""
        if self._leader.returncode is not None:
            return True
        return self._leader_has_exited() and not _running_members(self.pid)

    def tail(self) -> str:
        """The last lines of the program's output."""
        try:
            with self.log.open("rb") as output:
                size = output.seek(0, os.SEEK_END)
                output.seek(max(0, size - _TAIL_BYTES))
                return output.read().decode(errors="replace").strip()
        except OSError as error:
            return f"its output cannot be read: {error.strerror}: {self.log}"

    def _leader_has_exited(self) -> bool:
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.pid, options) is not None

    def _signal(self, number: int) -> None:
        if self._leader.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)


def _running_members(group: int) -> list[int]:
    """Processes of a group that are not zombies, as far as /proc tells (elsewhere: none)."""
    members = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The second field is the command in brackets, which may hold spaces and brackets.
            state, _parent, its_group = status.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                members.append(int(status.parent.name))
    return members


class ProcessKeeper:
    """Starts process groups and stops them, also when the launcher itself dies of SIGKILL.

    `scratch` is a folder to remove in that case; in all others it is left to its owner.
    """

    def __init__(self, scratch: Path) -> None:
        self._groups: list[ProcessGroup] = []
        reaper = str(Path(__file__).with_name("orphan_reaper.py"))
        self._reaper = subprocess.Popen(
            [sys.executable, "-I", "-S", reaper, str(scratch)],
            stdin=subprocess.PIPE,
            process_group=0,
            text=True,
        )

    def start(
        self, name: str, command: Sequence[str], *, env: Mapping[str, str], cwd: Path, log: Path
    ) -> ProcessGroup:
        """Start `command` with its output appended to `log`."""
        with interrupts.deferred():
            group = ProcessGroup(name, command, env=env, cwd=cwd, log=log)
            self._groups.append(group)
            self._tell_reaper("+", group)
        return group

    def stop(
        self,
        groups: Iterable[ProcessGroup],
        grace: float,
        at_once: Callable[[], bool] = lambda: False,
    ) -> None:
        """SIGTERM, `grace` seconds at most (none once `at_once()`), then SIGKILL, to all groups."""
        stopping = [group for group in groups if group.alive]
        for group in stopping:
            group.terminate()
        _wait_until(lambda: at_once() or all(group.is_quiet() for group in stopping), grace)
        for group in stopping:
            group.kill()
        _wait_until(lambda: not any(group.alive for group in stopping), _KILL_SECONDS)
        self.forget_ended()

    def forget_ended(self) -> None:
        """Drop the groups that have ended: nobody needs to stop them any more."""
        for group in [group for group in self._groups if not group.alive]:
            self._groups.remove(group)
            self._tell_reaper("-", group)

    def close(self, at_once: Callable[[], bool] = lambda: False) -> None:
        """Stop what still runs, and the reaper."""
        self.stop(list(self._groups), grace=4.0, at_once=at_once)
        with contextlib.suppress(BrokenPipeError):
            if self._reaper.stdin:
                self._reaper.stdin.close()
        self._reaper.wait()

    def _tell_reaper(self, sign: str, group: ProcessGroup) -> None:
        # A reaper that was killed is missed only if the launcher is killed as well.
        with contextlib.suppress(BrokenPipeError):
            if self._reaper.stdin:
                self._reaper.stdin.write(f"{sign}{group.pid}\n")
                self._reaper.stdin.flush()


def _wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
