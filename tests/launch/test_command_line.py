"""The `blackthorn` command: exit codes, one line for a mistake, and what a run leaves."""

import json
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from process_watch import until
from typer.testing import CliRunner

from blackthorn.launch.cli import app, main
from blackthorn.recording.run_folder import read_metrics


@pytest.mark.parametrize("command", ["simulate", "cluster"])
@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("local-lrr=1", "unknown key local-lrr; did you mean local-lr?"),
        ("local-lr=-1", "local-lr = -1 is not allowed"),
        ("local-lr=1e308", "local-lr = 1e+308 is not allowed"),
        ("min-replies=21", "min-replies = 21 is not allowed: at most 20"),
        ("aggregator=best", "aggregator = 'best' is not allowed"),
        ("corrupt-fraction=0.34", "fewer than a third"),
        ("aggregator=bulyan", "fewer than a quarter"),
        ("attack=bribery", "attack = 'bribery' is not allowed"),
        ("data-dir=/nonexistent", "'/nonexistent'"),
    ],
)
def test_a_mistake_is_one_line_and_starts_nothing(
    repository: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    setting: str,
    expected: str,
) -> None:
    folder = tmp_path / "run"
    recipe = str(repository / "recipes" / "demo.toml")
    task = "mnist" if setting.startswith("data-dir") else "digits"
    settings = ["--set", f"task={task}", "--set", setting]
    arguments = ["blackthorn", command, recipe, *settings, "--output-dir", str(folder)]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    errors = capsys.readouterr().err
    assert expected in errors
    assert len(errors.strip().splitlines()) == 1
    assert not folder.exists()


def test_a_run_in_which_nothing_can_be_aggregated_has_failed(
    repository: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "run"
    settings = ["num-clients=4", "num-byzantine=4", "attack=raise", "num-server-rounds=2"]
    words = [word for setting in settings for word in ("--set", setting)]
    recipe = str(repository / "recipes" / "demo.toml")
    arguments = ["blackthorn", "simulate", recipe, *words, "--output-dir", str(folder)]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 1
    assert capsys.readouterr().err.startswith("failed: no round changed the model")
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert summary["rounds_skipped"] == 2


@pytest.mark.parametrize(
    "arguments",
    [
        *((), ("simulate",), ("cluster",), ("demo",), ("pilot",), ("calibrate", "fat-clipping")),
        *(("certs",), ("server",), ("client",), ("run",), ("status",), ("register",)),
    ],
)
def test_every_help_page_opens(arguments: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, [*arguments, "--help"])
    assert result.exit_code == 0
    assert "Usage" in result.output


@pytest.mark.parametrize("command", ["simulate", "cluster"])
def test_a_folder_that_cannot_be_made_is_one_line(
    repository: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
) -> None:
    recipe = str(repository / "recipes" / "demo.toml")
    # Root may write everywhere, and still nobody makes a folder there, or one of such a name.
    for folder in ("/proc/a-run", "x" * 300):
        monkeypatch.setattr(sys, "argv", ["blackthorn", command, recipe, "--output-dir", folder])
        with pytest.raises(SystemExit) as caught:
            main()
        assert caught.value.code == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert line.startswith(f"error: output-dir = {folder} cannot be written")


def test_a_client_s_bad_data_is_found_before_anything_starts(
    repository: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    good, bad = tmp_path / "good.npz", tmp_path / "bad.npz"
    np.savez(good, x=np.zeros((20, 64), np.float32), y=np.arange(20) % 10)
    np.savez(bad, x=np.zeros((20, 64), np.float32), y=1 + np.arange(20) % 10)
    recipe = str(repository / "recipes" / "own-data.toml")
    settings = ["--set", "input-shape=64", "--set", "num-classes=10"]
    given = ["--data", str(good), "--data", str(bad), "--output-dir", str(tmp_path / "run")]
    monkeypatch.setattr(sys, "argv", ["blackthorn", "cluster", recipe, *settings, *given])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "bad.npz" in line and "y holds 10, allowed are 0 to 9" in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")],
)
def test_a_run_that_is_stopped_says_so_and_leaves_a_summary(
    repository: Path, tmp_path: Path, number: signal.Signals, code: int, said: str
) -> None:
    folder = tmp_path / "run"
    recipe = ["recipes/demo.toml", "--quiet", "--set", "num-server-rounds=1000000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "blackthorn", "simulate", *recipe, "--output-dir", str(folder)],
        cwd=repository,
        stderr=subprocess.PIPE,
        text=True,
    )
    until(lambda: len(read_metrics(folder)) > 1 or process.poll() is not None, 120)
    process.send_signal(number)
    go_on, last = process.communicate(timeout=180)[1].strip().splitlines()
    assert last == said
    assert process.returncode == code
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["reason"]) == ("failed", said)
    command = go_on.removeprefix("to go on with it: ")
    assert command.startswith("blackthorn simulate ") and "resume=" in command
    if number == signal.SIGTERM:
        goes_on_after(command, folder, repository)


def goes_on_after(command: str, folder: Path, repository: Path) -> None:
    """The command that was printed goes on with the run, and is stopped again."""
    before = read_metrics(folder)[-1]["round"]
    program, *arguments = shlex.split(command)
    assert program == "blackthorn"
    again = subprocess.Popen([sys.executable, "-m", program, *arguments], cwd=repository)
    until(lambda: last_round(folder) > before + 1 or again.poll() is not None, 120)
    again.terminate()
    assert again.wait(180) == 143
    [after] = json.loads((folder / "summary.json").read_text())["resumed_after"]
    assert after <= before
    assert [e["round"] for e in read_metrics(folder)] == list(range(last_round(folder) + 1))


def last_round(folder: Path) -> int:
    return max((entry["round"] for entry in read_metrics(folder)), default=-1)
