"""The supervisor with real programs: restarts, back-off, problems, and what they write."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from blackthorn.launch.processes.process_groups import ProcessKeeper
from blackthorn.launch.processes.supervisor import NotYet, Program, Supervisor


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[ProcessKeeper]:
    one = ProcessKeeper(tmp_path)
    yield one
    one.close()


def python(name: str, code: str, **options: Any) -> Program:
    return Program(name, [sys.executable, "-I", "-S", "-c", code], {}, **options)


def test_a_program_that_ends_is_started_again_later_and_later(
    keeper: ProcessKeeper, tmp_path: Path
) -> None:
    said: list[str] = []
    ends: list[float] = []

    def ended(status: int | None, tail: str) -> str:
        ends.append(time.monotonic())
        return f"{status} {tail.splitlines()[-1]}"

    supervisor = Supervisor(keeper, tmp_path / "logs", tmp_path, said.append)
    supervisor.add(python("mortal", "import sys; print('bye'); sys.exit(3)", on_end=ended))
    assert supervisor.run(lambda: len(ends) == 3, 60)
    # Pauses of one and of two seconds, and whatever the starts took.
    assert ends[1] - ends[0] >= 1.0
    assert ends[2] - ends[1] >= 2.0
    assert [line.split(";")[0] for line in said] == ["3 bye"] * 3
    assert ["in 1 s" in said[0], "in 2 s" in said[1], "in 4 s" in said[2]] == [True] * 3


def test_every_line_arrives_once_and_in_order(keeper: ProcessKeeper, tmp_path: Path) -> None:
    lines: list[str] = []
    code = "import time\nfor i in range(20): print(i, flush=True); time.sleep(0.02)\ntime.sleep(60)"
    supervisor = Supervisor(keeper, tmp_path / "logs", tmp_path, print)
    supervisor.add(python("talker", code, on_line=lines.append))
    assert supervisor.run(lambda: len(lines) >= 20, 60)
    assert lines == [str(i) for i in range(20)]
    assert supervisor.running("talker")
    supervisor.stop("talker", 5.0, lambda: False)
    assert (tmp_path / "logs" / "talker.log").read_text().split() == lines


def test_a_log_that_is_moved_is_read_on(keeper: ProcessKeeper, tmp_path: Path) -> None:
    """As logrotate does, and operators who tidy up."""
    lines: list[str] = []
    ends: list[str] = []
    moved, go_on = tmp_path / "moved.log", tmp_path / "go-on"
    code = (
        "import pathlib, time; print('before', flush=True)\n"
        f"while not pathlib.Path({str(go_on)!r}).exists(): time.sleep(0.01)\n"
        "print('after', flush=True)"
    )

    def ended(_: int | None, tail: str) -> str:
        ends.append(tail)
        return ""

    supervisor = Supervisor(keeper, tmp_path / "logs", tmp_path, print)
    supervisor.add(python("talker", code, on_line=lines.append, on_end=ended))
    assert supervisor.run(lambda: lines == ["before"], 60)
    (tmp_path / "logs" / "talker.log").rename(moved)
    go_on.touch()
    assert supervisor.run(lambda: bool(ends), 60)
    assert lines[:2] == ["before", "after"]
    assert "cannot be read: No such file or directory" in ends[0]


def test_an_excuse_is_said_once_and_the_program_waits(
    keeper: ProcessKeeper, tmp_path: Path
) -> None:
    said: list[str] = []
    tries: list[int] = []

    def before() -> None:
        tries.append(1)
        if len(tries) < 3:
            raise NotYet("the network is down")

    supervisor = Supervisor(keeper, tmp_path / "logs", tmp_path, said.append)
    supervisor.add(python("patient", "import time; time.sleep(60)", before=before))
    assert not supervisor.running("patient")
    assert supervisor.run(lambda: supervisor.running("patient"), 60)
    assert said == ["the network is down; trying again"]
    assert len(tries) == 3


def test_a_killed_program_is_told_by_its_signal(keeper: ProcessKeeper, tmp_path: Path) -> None:
    said: list[str] = []
    supervisor = Supervisor(keeper, tmp_path / "logs", tmp_path, said.append)
    supervisor.add(python("victim", "import os; os.kill(os.getpid(), 9)"))
    assert supervisor.run(lambda: bool(said), 60)
    assert said[0].startswith("victim was killed by signal 9; starting it again in 1 s")
