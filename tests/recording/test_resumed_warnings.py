"""What a start has told stays told: a run that is killed and goes on repeats it in its summary.

The first start already changes what it told of, so that no later one can find it: it charges the
ledger at its new place, begins one, writes states where the run is now.
"""

import html
import shutil
from pathlib import Path
from typing import Any

import pytest
from digits_runs import SAMPLE, configuration, summary_of
from killed_runs import NOISED, ROUNDS, kill, other_run, resume

from blackthorn.recording.run_folder import RunFolder, write_failure
from blackthorn.reporting.run_report import write_report
from blackthorn.strategies import spent
from blackthorn.strategies.accounting import Release
from blackthorn.strategies.reports import RoundReport

SAMPLED: dict[str, Any] = {**SAMPLE, "num_server_rounds": ROUNDS, "state_every": 1}


def moved_ledger(tmp_path: Path) -> dict[str, Any]:
    other_run(tmp_path / "first.json", 2)
    (tmp_path / "first.json").rename(tmp_path / "moved.json")
    kill(tmp_path / "run", {**NOISED, "ledger": str(tmp_path / "moved.json")}, at=1)
    return {**NOISED, "ledger": str(tmp_path / "moved.json")}


def begun_ledger(tmp_path: Path) -> dict[str, Any]:
    options = {**NOISED, "ledger": str(tmp_path / "new.json")}
    kill(tmp_path / "run", options, at=1)
    return options


def copied_folder(tmp_path: Path) -> dict[str, Any]:
    kill(tmp_path / "original", SAMPLED, at=2)
    shutil.copytree(tmp_path / "original", tmp_path / "run")
    shutil.rmtree(tmp_path / "original")
    kill(tmp_path / "run", SAMPLED, at=2, again=True)
    return SAMPLED


TOLD = {
    "ledger moved.json was elsewhere before": moved_ledger,
    "the run was elsewhere before": copied_folder,
    "ledger new.json": begun_ledger,
}
ALL = pytest.mark.parametrize(("words", "killed"), TOLD.items(), ids=TOLD.keys())


def those_with(words: str, warnings: list[str]) -> int:
    return len([line for line in warnings if words in line])


@ALL
def test_what_was_told_before_a_kill_is_in_the_summary_once(
    words: str, killed: Any, tmp_path: Path
) -> None:
    options = killed(tmp_path)
    kill(tmp_path / "run", options, at=3, again=True)
    kill(tmp_path / "run", options, at=4, again=True)
    assert those_with(words, resume(tmp_path / "run", options)["warnings"]) == 1


@ALL
def test_it_is_in_the_report_and_the_summary_that_others_write_of_a_dead_run(
    words: str, killed: Any, tmp_path: Path
) -> None:
    options, folder = killed(tmp_path), tmp_path / "run"
    assert words in html.unescape(write_report(folder).read_text())
    # As `blackthorn cluster` does, whose start told nothing new.
    write_failure(folder, configuration(folder, **options), "killed")
    assert those_with(words, summary_of(folder)["warnings"]) == 1


def test_what_a_round_told_stays_told_though_the_run_goes_on_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, see = "the metric f1 is nan in round 1", RunFolder.__call__

    def warn(folder: RunFolder, report: RoundReport) -> None:
        report.warnings += [told] if report.server_round == 1 else []
        see(folder, report)

    monkeypatch.setattr(RunFolder, "__call__", warn)
    kill(tmp_path, NOISED, at=3)
    assert those_with(told, resume(tmp_path, NOISED)["warnings"]) == 1


def test_where_the_run_ends_is_said_as_its_last_start_foresaw_it(tmp_path: Path) -> None:
    """The first one did not know that a round would be lost."""
    budget = 1.0001 * spent([(Release(2.0, 0.5), ROUNDS - 1)], 1e-5).epsilon
    options = {**NOISED, "max_epsilon": budget}
    kill(tmp_path, options, at=2)
    summary = resume(tmp_path, options)
    (line,) = [line for line in summary["warnings"] if "ends the run" in line]
    assert summary["rounds_completed"] == ROUNDS - 2
    assert f"ends the run after {ROUNDS - 2} of {ROUNDS} rounds" in line
