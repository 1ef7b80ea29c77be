"""What a person sees while a run is under way, and what a program reads when it has ended."""

import io
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from blackthorn.launch.cli import main
from blackthorn.launch.commands.progress import RoundPrinter, round_line, step_progress, time_left

ENTRY = {
    "round": 3,
    "accuracy": 0.875,
    "loss": 0.25,
    "epsilon_rdp": 1.234,
    "invited": 5,
    "replied": 4,
    "rejected": [{"client": 2, "reason": "[red]late[/red]"}],
    "filtered": [7],
    "seconds": {"training": 1.0, "evaluation": 0.5},
}


def test_a_round_s_line_has_figures_replies_and_reasons() -> None:
    first, second = round_line(ENTRY, 12).splitlines()
    for part in ("3/12", "87.5 %", "loss 0.2500", "epsilon 1.24", "replies 4/5", "filtered 1"):
        assert part in first
    assert second == "  client 2 rejected: [red]late[/red]"


def test_where_there_is_no_terminal_there_are_lines() -> None:
    stream = io.StringIO()
    with RoundPrinter(Console(file=stream, width=40), 12, "[x] ") as printer:
        printer.round(ENTRY)
    lines = stream.getvalue().splitlines()
    assert lines == [f"[x] {line}" if n == 0 else line for n, line in
                     enumerate(round_line(ENTRY, 12).splitlines())]  # fmt: skip
    assert "\x1b" not in stream.getvalue()


def test_in_a_terminal_there_is_a_bar_and_what_went_wrong() -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=120, force_terminal=True)
    with RoundPrinter(console, 12) as printer:
        printer.round(ENTRY)
        printer.round({"round": 4, "invited": 5, "replied": 5})
    shown = stream.getvalue()
    assert "client 2 rejected: [red]late[/red]" in shown
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown)
    last = plain.splitlines()[-1] or plain.splitlines()[-2]
    assert "4/12" in last
    assert "clients 5/5" in last
    # A round that was not evaluated leaves the last figures on the bar.
    assert "87.5 %" in last
    assert "epsilon 1.24" in last


def test_a_quiet_console_shows_nothing() -> None:
    stream = io.StringIO()
    with RoundPrinter(Console(file=stream, force_terminal=True, quiet=True), 12) as printer:
        printer.round(ENTRY)
    assert stream.getvalue() == ""


@pytest.mark.parametrize("timed", [True, False])
def test_an_estimate_tells_how_long_rounds_took(
    monkeypatch: pytest.MonkeyPatch, timed: bool
) -> None:
    """Under a privacy claim there is none, in lines as on the bar."""
    shown = []
    for terminal in (True, False):
        now = itertools.count(0.0, 100.0)
        monkeypatch.setattr("time.monotonic", lambda now=now: next(now))
        stream = io.StringIO()
        console = Console(file=stream, width=120, force_terminal=terminal, force_interactive=False)
        with RoundPrinter(console, 12, timed=timed) as printer:
            printer.round({"round": 1})
            printer.round({"round": 2})
        shown.append(re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue()))
    assert "2/12" in shown[0]
    assert ["--:--" in shown[0] or "0:" in shown[0], "  left " in shown[1]] == [timed, timed]


def test_time_left_is_in_whole_seconds_or_minutes() -> None:
    assert [time_left(s) for s in (0.4, 59.6, 61, 3725)] == [
        *("0:00:00", "0:01:00", "0:01:01", "1:02:05")
    ]


def test_steps_are_ten_lines_or_a_bar() -> None:
    plain, terminal = io.StringIO(), io.StringIO()
    for console in (Console(file=plain), Console(file=terminal, force_terminal=True, width=80)):
        with step_progress(console, "audit") as advance:
            for done in range(301):
                advance(done, 300)
    lines = plain.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        f"audit {30 * tenth}/300" for tenth in range(1, 11)
    ]
    assert lines[-1].endswith("left 0:00:00")
    assert "300/300" in terminal.getvalue()


SMALL = ("num-server-rounds=2", "num-clients=4", "num-byzantine=1", "local-steps=1", "report=false")


def in_process(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Exit code of the command line, run here."""
    monkeypatch.setattr(sys, "argv", ["blackthorn", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    return int(caught.value.code or 0)


def small(repository: Path, folder: Path, *flags: str) -> list[str]:
    settings = [word for setting in SMALL for word in ("--set", setting)]
    recipe = str(repository / "recipes" / "demo.toml")
    return ["simulate", recipe, *settings, "--output-dir", str(folder), *flags]


def test_json_is_all_there_is_on_stdout(repository: Path, tmp_path: Path) -> None:
    """In a process of its own: nothing that a library prints may be there either."""
    done = subprocess.run(
        [sys.executable, "-m", "blackthorn", *small(repository, tmp_path / "run", "--json")],
        cwd=repository,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1
    assert json.loads(done.stdout) == json.loads((tmp_path / "run" / "summary.json").read_text())
    assert "round 2/2" in done.stderr


def test_quiet_leaves_the_result(
    repository: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert in_process(monkeypatch, *small(repository, tmp_path / "run", "--quiet")) == 0
    told = capsys.readouterr()
    assert told.err == ""
    (line,) = told.out.splitlines()
    assert line.startswith("completed: 2 rounds in ")


def test_a_run_that_fails_says_so_in_json_too(
    repository: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    failing = ("--set", "attack=raise", "--set", "num-byzantine=4", "--json", "--quiet")
    assert in_process(monkeypatch, *small(repository, tmp_path / "run", *failing)) == 1
    told = capsys.readouterr()
    said = json.loads(told.out)
    assert said["status"] == "failed"
    assert said["reason"].startswith("no round changed the model")
    assert told.err.startswith("failed: no round changed the model")


@pytest.mark.parametrize("command", ["simulate", "cluster"])
def test_a_wrong_configuration_is_no_json(
    repository: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
) -> None:
    recipe = str(repository / "recipes" / "demo.toml")
    wrong = (command, recipe, "--set", "local-lr=-1", "--json")
    assert in_process(monkeypatch, *wrong) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert "local-lr = -1 is not allowed" in told.err
