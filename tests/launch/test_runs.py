"""`blackthorn runs`: all runs of a folder, and what prune leaves of them."""

import json
import os
import shutil
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from digits_runs import PRIVATE, run, summary_of
from typer.testing import CliRunner

from blackthorn.launch.cli import app
from blackthorn.launch.commands.runs import _show
from blackthorn.recording.line_log import LineLog
from blackthorn.recording.run_figures import RunFigures
from blackthorn.recording.run_list import ListedRun, list_runs
from blackthorn.settings.config import ConfigError

DAY = 86_400


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An old run, one under a claim, one that failed and could go on, and one that goes on."""
    root = tmp_path_factory.mktemp("runs")
    run(root / "sweep" / "old", num_server_rounds=1)
    run(root / "private", num_server_rounds=1, checkpoint_every=1, **PRIVATE)
    shutil.copytree(root / "sweep" / "old", root / "stopped")
    (root / "stopped" / "state").mkdir()
    (root / "stopped" / "state" / f"round-00001-00001-{'0' * 32}.safetensors").touch()
    shutil.copytree(root / "sweep" / "old", root / "under-way")
    (root / "under-way" / "summary.json").unlink()
    failed = json.loads((root / "stopped" / "summary.json").read_text())
    (root / "stopped" / "summary.json").write_text(json.dumps({**failed, "status": "failed"}))
    return root


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "runs"
    shutil.copytree(made, copy)
    now = time.time()
    for days, name in enumerate(("under-way", "stopped", "private", "sweep/old"), 1):
        os.utime(copy / name / "config.toml", (now - days * DAY, now - days * DAY))
    return copy


def call(*arguments: object, **options: Any) -> Any:
    return CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "160"}, **options)


def prune(root: Path, *arguments: object) -> dict[str, int]:
    done = call("runs", "prune", "--output", root, "--yes", "--json", *arguments)
    assert done.exit_code == 0, done.output
    removed: dict[str, int] = json.loads(done.stdout)["removed"]
    return removed


def test_every_run_is_shown_with_what_its_files_say(root: Path) -> None:
    lock = LineLog(root / "under-way" / "metrics.jsonl", alone=True)
    try:
        told = json.loads(call("runs", "--output", root, "--json").stdout)["runs"]
        shown = call("runs", "--output", root).stdout
    finally:
        lock.close()
    assert [one["name"] for one in told] == ["sweep/old", "private", "stopped", "under-way"]
    assert [one["status"] for one in told] == ["completed", "completed", "interrupted", "running"]
    assert [(one["rounds"], one["planned"]) for one in told] == [(1, 1)] * 4
    epsilon = summary_of(root / "private")["privacy"]["epsilon"]
    assert [one["epsilon"] for one in told] == [None, epsilon, None, None]
    for one in told:
        files = [path for path in Path(one["folder"]).rglob("*") if path.is_file()]
        assert one["bytes"] == sum(path.stat().st_size for path in files) > 0
    for name in ("sweep/old", "private", "stopped", "under-way"):
        assert name in shown
    assert "Each figure of privacy is of that run alone, by its own ledger." in shown


def test_an_epsilon_of_an_example_is_not_shown_as_a_client_s(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = RunFigures(claimed=True, epsilons={"example": 1.0001})
    now = datetime.now(UTC)
    run = ListedRun(tmp_path, "alone", "completed", figures, now, 1, stripped=False)
    assert (run.epsilon, run.sample_epsilon) == (None, 1.0001)
    _show([run])
    assert "1.01 of an example" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "gone"),
    [
        (("--keep", 0), {"sweep/old", "private", "under-way"}),
        (("--keep", 3), {"sweep/old"}),
        (("--older", 2.5), {"sweep/old", "private"}),
        (("--keep", 3, "--older", 2.5), {"sweep/old"}),
        (("--older", 1.5, "--interrupted"), {"sweep/old", "private", "stopped"}),
        (("--older", 9), set()),
    ],
)
def test_prune_takes_those_that_it_is_asked_for(
    root: Path, options: tuple[object, ...], gone: set[str]
) -> None:
    assert prune(root, *options).keys() == gone
    there = {run.name for run in list_runs(root) if not run.stripped}
    assert there == {"sweep/old", "private", "stopped", "under-way"} - gone


def test_a_run_that_goes_on_and_one_that_could_stay(root: Path) -> None:
    before = {path: path.stat().st_size for path in (root / "under-way").rglob("*")}
    lock = LineLog(root / "under-way" / "metrics.jsonl", alone=True)
    try:
        assert "under-way" not in prune(root, "--keep", 0)
    finally:
        lock.close()
    assert {path: path.stat().st_size for path in (root / "under-way").rglob("*")} == before
    assert (root / "stopped" / "state").exists()


def test_what_counts_what_was_told_under_a_claim_stays(root: Path) -> None:
    kept = ("ledger.json", "metrics.jsonl", "operator.jsonl", "summary.json", "config.toml")
    before = {name: (root / "private" / name).read_bytes() for name in kept}
    removed = prune(root, "--older", 2.5)
    assert removed["private"] > 0
    assert {path.name for path in (root / "private").iterdir()} == set(kept)
    assert {name: (root / "private" / name).read_bytes() for name in kept} == before
    # Once is enough: there is no more to remove of it.
    assert prune(root, "--older", 2.5) == {}


def test_whatever_is_no_run_s_stays_in_its_folder(root: Path) -> None:
    foreign = root / "sweep" / "old" / "hospital-ledger.json"
    foreign.write_text("{}")
    (root / "notes").mkdir()
    (root / "notes" / "config.toml").write_text("")
    prune(root, "--keep", 0)
    assert list((root / "sweep" / "old").iterdir()) == [foreign]
    assert (root / "notes" / "config.toml").exists()


def test_it_asks_first(root: Path) -> None:
    done = call("runs", "prune", "--output", root, "--keep", 0, input="n\n")
    assert done.exit_code == 1
    assert "remove these 3 runs?" in done.output
    assert len(list_runs(root)) == 4
    done = call("runs", "prune", "--output", root, "--keep", 0, input="y\n")
    assert done.exit_code == 0
    assert "3 runs removed" in done.output


REFUSED: dict[str, tuple[Callable[[Path], tuple[object, ...]], str]] = {
    "no limit": (lambda root: ("prune", "--output", root), "give --keep N, --older DAYS"),
    "no answer": (
        lambda root: ("prune", "--output", root, "--keep", 1, "--json"),
        "--json asks nobody: add --yes",
    ),
    "both": (lambda root: ("--output", root, "--state", root), "give either --state DIR or"),
    "no state": (lambda root: ("--state", root), "is no state folder of blackthorn server"),
    "no folder": (lambda root: ("--output", root / "none"), "none is not a folder"),
    "order": (lambda root: ("--output", root, "prune", "--keep", 1), "options go behind it"),
}


@pytest.mark.parametrize(("arguments", "said"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_is_one_line(
    root: Path, arguments: Callable[[Path], tuple[object, ...]], said: str
) -> None:
    done = call("runs", *arguments(root))
    assert isinstance(done.exception, ConfigError)
    assert said in str(done.exception)
    assert "\n" not in str(done.exception)
