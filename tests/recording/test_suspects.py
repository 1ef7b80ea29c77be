"""What a run leaves of its suspects, who is told, and who is left out of cohorts."""

import json
from pathlib import Path
from typing import Any

import pytest
from digits_runs import run
from typer.testing import CliRunner

from blackthorn.launch.cli import app
from blackthorn.settings.config import ConfigError, make_config
from blackthorn.strategies.reports import RoundReport

LIARS = [13, 14, 15]
GROSS: dict[str, Any] = {
    **{"num_clients": 16, "num_corrupt": 3, "aggregator": "median", "num_byzantine": 3},
    **{"attack": "reverse-scaled-average", "num_server_rounds": 7, "local_steps": 2},
}


def told(folder: Path) -> dict[str, Any]:
    (found,) = folder.rglob("summary.json")
    summary: dict[str, Any] = json.loads(found.read_text())
    return summary


def test_summary_command_and_report_name_those_that_stand_out(tmp_path: Path) -> None:
    run(tmp_path, **{**GROSS, "report": True})
    entry = told(tmp_path)["suspects"]
    assert sorted(suspect["client"] for suspect in entry["clients"]) == LIARS
    assert all(suspect["p"] <= 0.01 for suspect in entry["clients"]) and entry["said"] == ""
    folder = next(tmp_path.rglob("summary.json")).parent
    result = CliRunner().invoke(app, ["suspects", str(folder), "--json"])
    assert json.loads(result.stdout)["clients"] == entry["clients"]
    assert "stand out beyond chance" in (folder / "report.html").read_text()


def test_from_a_round_on_suspects_are_left_out(tmp_path: Path) -> None:
    reports: list[RoundReport] = []
    run(tmp_path, [reports.append], **{**GROSS, "quarantine_after": 5})
    invited = [report.invited for report in reports if report.server_round]
    assert invited == [list(range(16))] * 5 + [list(range(13))] * 2
    assert told(tmp_path)["suspects"]["quarantined"] == LIARS


def test_without_a_robust_rule_nobody_is_scored(tmp_path: Path) -> None:
    run(tmp_path, num_clients=4, num_server_rounds=2)
    assert "suspects" not in told(tmp_path)
    folder = next(tmp_path.rglob("summary.json")).parent
    result = CliRunner().invoke(app, ["suspects", str(folder)])
    assert isinstance(result.exception, ConfigError)
    assert "has no scores of clients" in str(result.exception)


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ({"quarantine-after": 3}, "quarantine-after = 3 is not allowed: 0, or at least 5"),
        (
            {
                **{"quarantine-after": 6, "algorithm": "dp-fedavg", "clip-norm": 1.0},
                **{"noise-multiplier": 1.0, "participation": "poisson", "aggregator": "auto"},
                **{"num-corrupt": -1, "delta": 1e-3, "num-byzantine": 0, "attack": "none"},
            },
            "quarantine-after = 6 is not allowed with noise for privacy",
        ),
        (
            {"quarantine-after": 6, "aggregator": "rage", "num-clients": 11},
            "quarantine-after = 6 is not allowed with num-corrupt = 3",
        ),
    ],
)
def test_a_quarantine_that_cannot_be_kept_is_refused(more: dict[str, Any], line: str) -> None:
    values = {key.replace("_", "-"): value for key, value in GROSS.items()}
    with pytest.raises(ConfigError, match=line):
        make_config({**values, **more})
