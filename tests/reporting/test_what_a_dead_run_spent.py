"""A run that died without a summary: report and `blackthorn status` show what its ledger says."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from charged_ledgers import read_charges
from digits_runs import PRIVATE, SAMPLE, configuration
from killed_runs import die_after

from blackthorn.launch.commands.progress import round_line
from blackthorn.launch.federation.run_log import RunLog
from blackthorn.launch.federation.status import spent_said
from blackthorn.recording.client_history import read_lines
from blackthorn.recording.folder_place import METRICS
from blackthorn.recording.operator_log import RoundTold
from blackthorn.reporting.report_facts import headline
from blackthorn.reporting.run_record import read_record
from blackthorn.reporting.run_report import write_report
from blackthorn.server_app.run import execute, prepare
from blackthorn.settings.rounding import upward
from blackthorn.simulation.engine import EngineGrid
from blackthorn.strategies import spent


def killed(folder: Path, ledger: Path | None = None, **options: Any) -> Path:
    """What is left of a run that is killed in its third round, when that is charged."""

    if ledger is not None:
        options["ledger"] = str(ledger)
    die_after(2, folder, {"num_server_rounds": 5, "state_every": 1, **options})
    (folder / "report.html").unlink(missing_ok=True)
    return folder


def charge_one_more(path: Path) -> None:
    """The round that was under way."""
    content = json.loads(path.read_text())
    content["charges"][-1]["rounds"] += 1
    content["rounds"] += 1
    path.write_text(json.dumps(content))


def spent_tile(folder: Path) -> tuple[str, str]:
    (tile,) = [t for t in headline(read_record(folder)) if t.label == "privacy spent, ε"]
    return tile.value, tile.note


@pytest.mark.parametrize("outside", [False, True], ids=["its own", "a ledger elsewhere"])
def test_the_report_has_the_ledgers_figure_with_the_round_that_was_under_way(
    tmp_path: Path, outside: bool
) -> None:
    ledger = tmp_path / "kept" / "spent.json" if outside else None
    folder = killed(tmp_path / "run", ledger, **PRIVATE)
    path = ledger or folder / "ledger.json"
    charge_one_more(path)
    (charge,) = read_charges(path)
    assert charge[1] == 3
    figure = upward(spent([charge], 1e-5).epsilon)
    assert spent_tile(folder)[0] == figure
    html = write_report(folder).read_text()
    assert "everybody but the server" in html
    assert str(tmp_path) not in html
    log = log_of(folder)
    assert spent_said(log) == f", epsilon {figure}"


def test_a_copy_without_ledger_and_states_has_the_last_lines_figure_and_says_so(
    tmp_path: Path,
) -> None:
    folder = killed(tmp_path / "run", **PRIVATE)
    charges = read_charges(folder / "ledger.json")
    (folder / "ledger.json").unlink()
    shutil.rmtree(folder / "state")
    value, note = spent_tile(folder)
    assert value == upward(spent(charges, 1e-5, "rdp").epsilon)
    assert "by the line of round 2; a round that was under way is not in it" in note
    assert str(tmp_path) not in write_report(folder).read_text()


def test_the_examples_figure_of_a_dead_run_counts_the_round_that_was_under_way(
    tmp_path: Path,
) -> None:
    folder = killed(tmp_path / "run", **SAMPLE)
    told = read_record(folder).figures["sample_privacy"]
    assert told["rounds"] == 3
    assert f"ε = {upward(told['epsilon'], 4)}" in write_report(folder).read_text()
    assert spent_said(log_of(folder)) == f", epsilon of an example {upward(told['epsilon'])}"


def log_of(folder: Path, lines: str = "") -> RunLog:
    log = RunLog(folder=str(folder), rounds=5)
    list(log.read(lines))
    return log


def test_far_from_its_folder_status_shows_what_the_run_told_of_its_ledger(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configuration(tmp_path / "run", **PRIVATE)
    capsys.readouterr()
    prepared = prepare(config)
    execute(prepared, EngineGrid(config, prepared.problem), trackers=[RoundTold(config)])
    told = capsys.readouterr().out
    charges = read_charges(tmp_path / "run" / "ledger.json")
    epsilon = upward(spent(charges, config.delta, "rdp").epsilon)
    far = log_of(tmp_path / "on the server", told)
    # Whoever follows it sees of each round what the terminal of a simulation shows.
    lines = [round_line(entry, 3) for entry in RunLog(rounds=3).read(told)]
    on_record = read_lines(tmp_path / "run" / METRICS)
    assert lines == [round_line(entry, 3) for entry in on_record]
    assert f"epsilon {epsilon}" in lines[-1]
    said = f", epsilon {epsilon}, by RDP, after 3 rounds; one under way is not in it"
    assert spent_said(far) == said
    assert spent_said(log_of(tmp_path / "on the server")) == ""


def test_a_run_that_claims_nothing_says_nothing(tmp_path: Path) -> None:
    folder = killed(tmp_path / "run")
    assert spent_said(log_of(folder)) == ""
    assert not [t for t in headline(read_record(folder)) if "privacy" in t.label]
