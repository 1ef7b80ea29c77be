"""Every experiment of every paper from its cells to its report, as small as it can be made."""

import io
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from blackthorn.experiments.page import Part, write_report
from blackthorn.experiments.runner import measure, plan
from blackthorn.experiments.store import Store
from blackthorn.experiments.study import Cell, Experiment, Scale
from blackthorn.launch.commands import reproduce as command

# What makes a cell long, and how much of it is left: of fewer rounds some means are of nothing.
SHORT = {
    "num-server-rounds": 5,
    "local-steps": 2,
    "samples": 5000,
    "rounds": 30,
    "burn-in": 1,
    "max-samples": 3,
    "evaluate-every": 1,
}


def shortened(settings: Mapping[str, Any]) -> dict[str, Any]:
    short = {k: min(SHORT[k], v) if k in SHORT and v else v for k, v in settings.items()}
    # This attacker runs the rule some hundred times a round.
    return short | ({"num-server-rounds": 1} if settings.get("attack") == "adaptive" else {})


def small(experiment: Experiment) -> Experiment:
    def cells(scale: Scale) -> list[Cell]:
        return [replace(c, settings=shortened(c.settings)) for c in experiment.cells(scale)]

    return replace(experiment, cells=cells)


@pytest.mark.parametrize("name", sorted(command.PAPERS))
def test_every_paper_goes_from_cells_to_a_report_with_claims(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BLACKTHORN_DATA_DIR", raising=False)
    paper, scale = command.PAPERS[name], Scale(quick=True, seeds=1)
    with Store(tmp_path / "cells.jsonl") as store:
        plans = [plan(small(experiment), scale, store) for experiment in paper.experiments]
        measure(plans, store, "", 1, lambda _progress: None)
    parts = [Part(own.experiment, own.experiment.section(own.numbers, scale)) for own in plans]
    page = write_report(tmp_path, paper, parts, {"command": "none"}).read_text()
    console = Console(file=io.StringIO(), width=200)
    for part in parts:
        assert part.section is not None
        assert part.section.claims
        assert part.section.tables
        assert part.section.setting
        widths = {len(table.heads) for table in part.section.tables for _ in table.rows}
        assert widths == {len(row) for table in part.section.tables for row in table.rows}
        console.print(command.claims_table(part.experiment, part.section))
        for plot in part.section.plots:
            # Every axis says what it shows, in which unit.
            for axes in plot.figure.axes:
                shared = axes.get_shared_x_axes().get_siblings(axes)
                assert any(own.get_xlabel() for own in shared) or axes.get_xticklabels()
                assert axes.get_ylabel() or len(axes.get_shared_y_axes().get_siblings(axes)) > 1
            assert (tmp_path / "plots" / f"{plot.name}.png").is_file()
    assert page.count("<img") == sum(len(p.section.plots) for p in parts if p.section is not None)


@pytest.mark.parametrize("name", sorted(command.PAPERS))
def test_a_full_run_has_at_least_what_a_quick_one_has(name: str, data_dir: str) -> None:
    for experiment in command.PAPERS[name].experiments:
        full, quick = (experiment.cells(Scale(q, data_dir=data_dir)) for q in (False, True))
        assert sum(cell.cost for cell in full) >= sum(cell.cost for cell in quick)
