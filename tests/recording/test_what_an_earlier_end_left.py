"""A run that goes on spends more than its earlier end says: nothing of that stays in its folder.

Nor does a report that was asked for while the run was on its way, once the run has ended.
"""

from pathlib import Path
from typing import Any

import pytest
from digits_runs import EVERYTHING, configuration, summary_of
from rich.console import Console

from blackthorn.flower_port.transports import Transport
from blackthorn.launch.commands.simulate import simulate
from blackthorn.recording.run_folder import write_failure
from blackthorn.reporting.run_report import write_report
from blackthorn.strategies import rounds
from blackthorn.strategies.messages import Asked
from blackthorn.strategies.reports import RoundReport

ROUNDS, STOPPED = 4, 2
OPTIONS: dict[str, Any] = {**EVERYTHING, "num_server_rounds": ROUNDS}
OF_AN_END = (
    "report.html",
    "plots",
    "summary.json",
    "checkpoints/final.safetensors",
    "posterior/diagnostics.json",
)


def there(folder: Path) -> set[str]:
    return {name for name in OF_AN_END if (folder / name).exists()}


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    """A run that was stopped after two rounds, with all that an end may leave."""

    def stop(report: RoundReport) -> None:
        if report.server_round == STOPPED:
            raise SystemExit(143)

    folder = tmp_path / "run"
    with pytest.raises(SystemExit):
        simulate(configuration(folder, **OPTIONS), Console(quiet=True), observers=[stop])
    assert there(folder) == {"report.html", "plots", "summary.json"}
    (folder / "posterior").mkdir()
    for name in OF_AN_END[-2:]:
        (folder / name).write_bytes(b"of this end")
    return folder


def test_it_is_gone_before_the_first_message(
    stopped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[set[str]] = []
    collect = rounds.collect

    def look(transport: Transport, asked: Asked, *arguments: Any) -> Any:
        seen.append(there(stopped))
        return collect(transport, asked, *arguments)

    monkeypatch.setattr(rounds, "collect", look)
    config = configuration(stopped, **OPTIONS, resume=str(stopped))
    simulate(config, Console(quiet=True))
    assert seen == [set()] * (ROUNDS - STOPPED)
    assert there(stopped) == set(OF_AN_END) - {"posterior/diagnostics.json"}


def test_a_run_that_goes_on_without_a_report_has_none_and_names_none(
    stopped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configuration(stopped, **{**OPTIONS, "report": False, "resume": str(stopped)})
    simulate(config, Console(width=500))
    assert summary_of(stopped)["rounds_completed"] == ROUNDS
    assert there(stopped) == {"summary.json", "checkpoints/final.safetensors"}
    assert "report.html" not in capsys.readouterr().out


def test_a_report_of_a_run_on_its_way_does_not_outlive_that(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def ask(report: RoundReport) -> None:
        if report.server_round == STOPPED:
            write_report(tmp_path)
            assert there(tmp_path) == {"report.html", "plots"}

    config = configuration(tmp_path, **{**OPTIONS, "report": False})
    simulate(config, Console(width=500), observers=[ask])
    assert there(tmp_path) == {"summary.json", "checkpoints/final.safetensors"}
    assert "report.html" not in capsys.readouterr().out
    # Nor where another process writes the summary of a server that died.
    (tmp_path / "summary.json").unlink()
    write_report(tmp_path)
    write_failure(tmp_path, config, "killed")
    assert there(tmp_path) == {"summary.json", "checkpoints/final.safetensors"}
