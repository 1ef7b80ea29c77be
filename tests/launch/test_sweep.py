"""`blackthorn sweep`, `compare` and `recipes`: what they run, keep, show and refuse."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from process_watch import running, until
from rich.console import Console
from safetensors.numpy import load_file

import blackthorn
from blackthorn.launch.cli import main
from blackthorn.launch.commands.progress import RoundPrinter
from blackthorn.launch.commands.sweep import sweep as run_sweep
from blackthorn.launch.commands.sweep_plan import SweepRun, parse_choices, plan
from blackthorn.launch.commands.sweep_results import Row, table_of
from blackthorn.recording import run_states
from blackthorn.recording.run_folder import read_metrics
from blackthorn.settings.config import ConfigError, RunConfig
from blackthorn.strategies import NotEnoughClients

FEW: dict[str, list[Any]] = {
    "num-clients": [5],
    "num-byzantine": [1],
    "num-server-rounds": [3],
    "report": [False],
    "tensorboard": [False],
}
SHORT = [word for key, [v] in FEW.items() for word in ("--set", f"{key}={str(v).lower()}")]


def called(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: object
) -> tuple[int, str, str]:
    """Exit code and output of `blackthorn WORDS`."""
    monkeypatch.setattr(sys, "argv", ["blackthorn", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    return int(ended.value.code or 0), said.out, said.err


def summaries(folder: Path) -> dict[Path, dict[str, Any]]:
    return {p: json.loads(p.read_text()) for p in sorted(folder.glob("*/summary.json"))}


def ages(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in summaries(folder)}


def final(folder: Path) -> dict[str, bytes]:
    state = load_file(folder / "checkpoints" / "final.safetensors")
    return {name: array.tobytes() for name, array in state.items()}


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("attack=a,b", ["a", "b"]),
        ("local-lr=0.1, 0.3", [0.1, 0.3]),
        ("collusion=true,false", [True, False]),
        ("input-shape=64", ["64"]),
        ('algorithm-options="low = 0.1, high = 1"', ["low = 0.1, high = 1"]),
        ("local-steps=[1, 5]", [1, 5]),
    ],
)
def test_values_are_split_at_commas_unless_they_are_quoted(text: str, values: list[Any]) -> None:
    assert parse_choices([text]) == {text.partition("=")[0]: values}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--set", "atack=nan"], "unknown key atack; did you mean attack?"),
        (["--set", "local-lr=0.1,-1"], "local-lr = -1 is not allowed"),
        (["--set", "attack=nan,bribery"], "attack = 'bribery' is not allowed"),
        (["--set", "attack="], "--set attack= is not allowed: it has an empty value"),
        (["--set", "attack=[]"], "--set attack= has no value"),
        (["--set", "attack=nan,,raise"], "--set attack=nan,,raise is not allowed"),
        (["--set", "attack"], "--set attack is not allowed: write --set key=value,value"),
        (["--set", "attack=nan,nan"], "--set attack=nan,nan has a value twice"),
        (["--set", "local-lr=1", "--set", "local-lr=2"], "--set local-lr is given twice"),
        (["--set", "seed=1,2"], "seed has several values: a sweep takes them from --seeds"),
        (["--set", "output-dir=x"], "output-dir = x is not allowed in a sweep"),
        (["--set", "corrupt-fraction=0.1,0.4"], "corrupt-fraction = 0.4"),
        (["--set", "task=digits,mnist", "--set", "data-dir=/nonexistent"], "'/nonexistent'"),
        (["--seeds", "0"], "--seeds 0 is not allowed: at least 1"),
        (["--processes", "0"], "--processes 0 is not allowed: at least 1"),
    ],
)
def test_what_is_wrong_is_one_line_and_runs_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    expected: str,
) -> None:
    folder = tmp_path / "sweep"
    given = ("sweep", "demo", *words, "--output-dir", folder)
    code, out, errors = called(monkeypatch, capsys, *given)
    (line,) = errors.strip().splitlines()
    assert (code, out) == (2, "")
    assert line.startswith("error: ") and expected in line
    assert not folder.exists()


def test_a_row_is_mean_and_deviation_over_the_seeds_and_nothing_is_run_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "sweep"
    words = ("sweep", "demo", *SHORT, "--set", "attack=all-ones,gradient-shift", "--seeds", "2")
    words = (*words, "--processes", "1", "--output-dir", str(folder))
    code, out, errors = called(monkeypatch, capsys, *words)
    assert (code, errors) == (0, "")
    assert "4 runs, in " in out and "4/4  attack=gradient-shift, seed=1: completed" in out
    with (folder / "sweep.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [row["attack"] for row in rows] == ["all-ones", "gradient-shift"]
    for row in rows:
        finals = [
            s["final"] for p, s in summaries(folder).items() if row["attack"] in p.parent.name
        ]
        assert (row["runs"], row["completed"], len(finals)) == ("2", "2", 2)
        for name in ("accuracy", "loss"):
            values = [one[name] for one in finals]
            assert float(row[f"{name}_mean"]) == pytest.approx(np.mean(values), rel=1e-12)
            assert float(row[f"{name}_sd"]) == pytest.approx(np.std(values, ddof=1), rel=1e-9)
        accuracies = [100 * one["accuracy"] for one in finals]
        shown = f"{np.mean(accuracies):.1f} ± {np.std(accuracies, ddof=1):.2g} %"
        assert shown in out
        assert shown in (folder / "sweep.html").read_text()
    page = (folder / "sweep.html").read_text()
    assert page.count("data:image/png") == 2
    assert not re.search(r"""(src|href)=["'](?!data:)""", page)
    before = ages(folder)
    shaded: list[tuple[np.ndarray, ...]] = []
    monkeypatch.setattr(
        Axes,
        "fill_between",
        lambda _axes, *drawn, **_look: shaded.append(tuple(map(np.array, drawn))),
    )
    code, out, _ = called(monkeypatch, capsys, *words)
    assert code == 0
    assert "4 runs, 4 of them completed before" in out
    assert ages(folder) == before
    # Around the mean curve of a combination: one standard deviation over its seeds.
    runs = [read_metrics(path.parent) for path in before if "all-ones" in path.parent.name]
    percent = np.array([[100 * entry["accuracy"] for entry in run] for run in runs])
    mean, deviation = percent.mean(axis=0), percent.std(axis=0, ddof=1)
    rounds, low, high = shaded[0]
    assert len(shaded) == 4
    assert rounds.tolist() == [0, 1, 2, 3]
    np.testing.assert_allclose((low, high), (mean - deviation, mean + deviation), rtol=1e-9)


def test_a_sweep_that_was_stopped_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the second of its runs, after round 2: the first is kept, the second goes on."""
    quiet = Console(quiet=True)
    choices = {**FEW, "num-server-rounds": [5], "local-lr": [0.1, 0.3]}
    round_shown = RoundPrinter.round
    seen: list[int] = []

    def stop(self: RoundPrinter, entry: dict[str, Any]) -> None:
        round_shown(self, entry)
        seen.append(entry["round"])
        if seen.count(0) == 2 and entry["round"] == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RoundPrinter, "round", stop)
        # A state after every round, however fast they are.
        patch.setattr(run_states, "STATE_SECONDS", 0.0)
        patch.setattr(run_states, "STATE_SHARE", 1e9)
        run_sweep(Path("demo"), choices, 1, 1, tmp_path / "sweep", quiet)
    first, second = summaries(tmp_path / "sweep")
    assert json.loads(first.read_text())["resumed_after"] == []
    before = first.stat().st_mtime_ns
    done = run_sweep(Path("demo"), choices, 1, 1, tmp_path / "sweep", quiet)
    assert [row.completed for row in done.rows] == [1, 1]
    assert first.stat().st_mtime_ns == before
    [after] = json.loads(second.read_text())["resumed_after"]
    assert after in (1, 2)
    assert [e["round"] for e in read_metrics(second.parent)] == list(range(6))
    whole = run_sweep(Path("demo"), choices, 1, 1, tmp_path / "whole", quiet)
    for one, other in zip(done.runs, whole.runs, strict=True):
        assert one.folder.name == other.folder.name
        assert final(one.folder) == final(other.folder)


def test_a_run_that_fails_is_named_and_costs_the_others_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "sweep"
    few = ("--set", "num-clients=4", "--set", "num-byzantine=4", "--set", "num-server-rounds=1")
    words = (*few, "--set", "attack=raise,all-ones", "--set", "tensorboard=false")
    given = ("sweep", "demo", *words, "--processes", "1", "--output-dir", folder)
    code, out, _ = called(monkeypatch, capsys, *given)
    assert code == 1
    assert "attack=raise, seed=0: failed: no round changed the model" in out
    assert "attack=all-ones, seed=0: completed" in out
    with (folder / "sweep.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [(r["completed"], r["accuracy_sd"]) for r in rows] == [("0", ""), ("1", "")]


def test_under_a_claim_the_page_says_that_runs_compose_and_no_ledger_is_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "sweep"
    first = ("sweep", "dp-digits", "--set", "num-server-rounds=1", "--set", "local-lr=0.1,0.2")
    words = (*first, "--set", "report=false", "--processes", "1", "--output-dir", str(folder))
    code, out, _ = called(monkeypatch, capsys, *words)
    assert code == 0
    told = "Each figure of privacy is of that run alone, by its own ledger."
    assert told in out and told in (folder / "sweep.html").read_text().replace("\n", " ")
    assert len(list(folder.glob("*/ledger.json"))) == 2
    assert "epsilon of a run" in (folder / "sweep.html").read_text()
    given = (*words, "--set", f"ledger={tmp_path / 'l.json'}")
    code, _, errors = called(monkeypatch, capsys, *given)
    assert code == 2
    assert "is not allowed in a sweep: its runs would take the budget from each other" in errors


def test_under_a_claim_a_sweep_tells_neither_times_nor_who_was_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a run alone; the page names why a run has failed."""

    def fails(config: RunConfig, console: Console) -> None:
        del config, console
        raise NotEnoughClients("client 3 is missing")

    module = "blackthorn.launch.commands.sweep"
    monkeypatch.setattr(f"{module}.simulate", fails)
    monkeypatch.setattr(f"{module}.executor", lambda _: ThreadPoolExecutor(1))
    for recipe, told in (("dp-digits", False), ("demo", True)):
        folder, console = tmp_path / recipe, Console(record=True, width=1000)
        run_sweep(Path(recipe), {}, 1, 1, folder, console)
        assert ("  left " in console.export_text(clear=False)) == told
        assert ("client 3" in console.export_text()) == told
        assert ("client 3" in (folder / "sweep.html").read_text()) == told


def test_a_sweep_s_table_shows_no_less_than_what_a_run_has_spent() -> None:
    row = Row({"clip-norm": 1.0}, 2, 2, {}, epsilon=7.99949)
    assert table_of([row]).rows == [("1.0", "2", "8.000")]


def test_own_code_that_was_changed_is_another_run(tmp_path: Path) -> None:
    rule = tmp_path / "rule.py"
    rule.write_text(
        "from blackthorn.strategies import mean\n"
        "def best(updates, num_corrupt):\n    return mean(updates, 0)\n"
    )
    choices = {**FEW, "aggregator": [f"{rule}:best"]}
    [one] = plan(Path("demo"), choices, 1, tmp_path)
    assert plan(Path("demo"), choices, 1, tmp_path)[0].folder == one.folder
    rule.write_text(rule.read_text() + "# otherwise\n")
    [other] = plan(Path("demo"), choices, 1, tmp_path)
    assert other.folder != one.folder


@pytest.mark.slow
def test_a_killed_sweep_leaves_no_worker(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "blackthorn", "sweep", "demo", *SHORT]
    command[command.index("num-server-rounds=3")] = "num-server-rounds=3000"
    command += ["--seeds", "2", "--processes", "2"]
    sweep = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL)
    folder = tmp_path / "runs" / "sweep-demo"

    def both_run() -> bool:
        return (
            len([p for p in folder.glob("*/metrics.jsonl") if len(read_metrics(p.parent)) > 2]) > 1
        )

    until(lambda: both_run() or sweep.poll() is not None, 300.0)
    workers = [
        int(word)
        for task in Path(f"/proc/{sweep.pid}/task").iterdir()
        for word in (task / "children").read_text().split()
    ]
    assert len(workers) >= 2
    os.kill(sweep.pid, signal.SIGKILL)
    sweep.wait()
    until(lambda: not any(map(running, workers)), 60.0)
    assert not list(folder.glob("*/summary.json"))


def test_compare_tells_what_differs_first_and_draws_the_curves_in_one_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few: dict[str, Any] = {key.replace("-", "_"): value for key, [value] in FEW.items()}
    for name, rate in (("a", 0.1), ("b", 0.3), ("twin", 0.3)):
        folder = str(tmp_path / name)
        blackthorn.simulate("demo", **few, local_lr=rate, output_dir=folder)
    out = tmp_path / "both.html"
    runs = [tmp_path / name for name in ("b", "a", "twin")]
    monkeypatch.setenv("COLUMNS", "140")
    code, said, _ = called(monkeypatch, capsys, "compare", *runs, "--out", out)
    assert code == 0
    assert said.index("Keys that differ") < said.index("Final models")
    [row] = [line for line in said.splitlines() if "local-lr" in line]
    assert re.findall(r"[\d.]+", row) == ["0.3", "0.1", "0.3"]
    twin = next(line for line in said.splitlines() if re.search(r"twin .*completed", line))
    assert "the same" in twin
    page = out.read_text()
    assert page.index("What differs") < page.index("<h2>Curves") < page.index("How they ended")
    assert page.count("data:image/png") == 2
    assert not re.search(r"""(src|href)=["'](?!data:)""", page)
    assert blackthorn.compare(*runs, out=tmp_path / "again.html").exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["nowhere"], "compare needs two runs or more"),
        (["nowhere", "elsewhere"], "nowhere is not a run folder"),
        (["nowhere", "nowhere"], "nowhere is named twice"),
        (["a", "b", "--out", "page.txt"], "--out page.txt is not allowed"),
    ],
)
def test_what_cannot_be_compared_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    expected: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, errors = called(monkeypatch, capsys, "compare", *words)
    (line,) = errors.strip().splitlines()
    assert (code, out) == (2, "")
    assert line.startswith(f"error: {expected}")
    assert list(tmp_path.iterdir()) == []


def test_recipes_are_listed_and_copied_with_their_code(
    repository: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    own = repository / "recipes"
    names = {p.relative_to(own).with_suffix("").as_posix() for p in own.rglob("*.toml")}
    code, out, _ = called(monkeypatch, capsys, "recipes")
    listed = [line.split(maxsplit=1) for line in out.strip().splitlines()]
    assert code == 0
    assert {name for name, _ in listed} == names
    assert all(len(about) > 10 for _, about in listed)
    words = ("recipes", "demo", "own-project/regression", "--output-dir", tmp_path / "mine")
    code, out, _ = called(monkeypatch, capsys, *words)
    assert code == 0
    assert {path.name for path in (tmp_path / "mine").iterdir()} == {
        *("demo.toml", "regression.toml", "regression.py")
    }
    copied = (tmp_path / "mine" / "demo.toml").read_text()
    assert tomllib.loads(copied) == tomllib.loads((own / "demo.toml").read_text())
    code, _, errors = called(monkeypatch, capsys, *words)
    assert (code, errors.count("\n")) == (2, 1)
    assert "demo.toml is there already" in errors
    code, _, errors = called(monkeypatch, capsys, "recipes", "dmeo")
    assert (code, errors.count("\n")) == (2, 1)
    assert "recipe dmeo does not exist" in errors


def test_a_sweep_from_python_gives_its_rows(tmp_path: Path) -> None:
    few: dict[str, Any] = {key.replace("-", "_"): value for key, [value] in FEW.items()}
    done = blackthorn.sweep("demo", {"local_lr": [0.1, 0.3]}, output_dir=tmp_path, **few)
    assert [(row.choice, row.completed) for row in done.rows] == [
        *(({"local-lr": 0.1}, 1), ({"local-lr": 0.3}, 1))
    ]
    assert all(isinstance(run, SweepRun) and run.summary for run in done.runs)
    with pytest.raises(ConfigError, match="unknown key local-rate"):
        blackthorn.sweep("demo", {"local_rate": [1.0]}, output_dir=tmp_path / "other")
    assert not (tmp_path / "other").exists()
