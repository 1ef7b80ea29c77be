"""Cells, their store, resumption, and the report of `blackthorn reproduce`."""

import base64
import html.parser
import io
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from blackthorn.experiments import catastrophes, runner
from blackthorn.experiments.finding import Claim, Finding
from blackthorn.experiments.page import Part, write_report
from blackthorn.experiments.runner import Plan, Progress, measure, plan
from blackthorn.experiments.store import Store, StoreInUse
from blackthorn.experiments.study import (
    Cell,
    Context,
    Experiment,
    Numbers,
    Paper,
    Plot,
    Scale,
    Section,
    Table,
    Value,
    series,
    spread,
)
from blackthorn.launch.cli import app
from blackthorn.launch.commands import reproduce as command
from blackthorn.reporting.figures import new_figure
from blackthorn.settings.config import ConfigError

HOLDS, FAILS = Finding("x", "1", "0 to 2", True), Finding("y", "3", "0 to 2", False)


def logged(settings: Mapping[str, Any], context: Context) -> Value:
    """Twice the number, plus what came before; notes the call, and may be told to stop."""
    log = Path(settings["log"])
    if settings["number"] == settings.get("stops at") and not (log.parent / "go").exists():
        raise KeyboardInterrupt
    with log.open("a") as file:
        file.write(f"{settings['number']}\n")
    before = context.before["twice"] if context.before is not None else 0
    return {"twice": 2 * settings["number"] + before}


def doubling(log: Path, name: str = "doubling", stops_at: int = -1, numbers: int = 4) -> Experiment:
    def cells(scale: Scale) -> list[Cell]:
        del scale
        return [
            Cell(("n", i), logged, {"number": i, "log": str(log), "stops at": stops_at})
            for i in range(numbers)
        ]

    def section(found: Numbers, scale: Scale) -> Section:
        del scale
        total = sum(value["twice"] for value in series(found, "n"))
        return Section([Claim("They add up.", [Finding("sum", str(total), "12", total == 12)])])

    return Experiment(name, "Doubling", "twice each number", cells, section)


def filled(experiments: list[Experiment], path: Path, told: list[str] | None = None) -> list[Plan]:
    with Store(path) as store:
        plans = [plan(experiment, Scale(), store) for experiment in experiments]

        def watch(progress: Progress) -> None:
            if told is not None:
                told.append(f"{progress.done}/{progress.cells}")

        measure(plans, store, "", 1, watch)
    return plans


def test_a_stopped_run_goes_on_and_measures_nothing_twice(tmp_path: Path) -> None:
    log, path = tmp_path / "log", tmp_path / "cells.jsonl"
    stopping = doubling(log, stops_at=2)
    with pytest.raises(KeyboardInterrupt):
        filled([stopping], path)
    assert log.read_text().split() == ["0", "1"]
    (tmp_path / "go").touch()
    told: list[str] = []
    (done,) = filled([stopping], path, told)
    assert log.read_text().split() == ["0", "1", "2", "3"]
    assert done.complete
    assert done.numbers["n", 3] == {"twice": 6}
    assert told == ["2/4", "3/4", "4/4"]
    filled([stopping], path)
    assert log.read_text().split() == ["0", "1", "2", "3"]


def test_cells_that_experiments_share_are_measured_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    plans = filled([doubling(log, "one"), doubling(log, "two", numbers=5)], tmp_path / "c.jsonl")
    assert sorted(log.read_text().split()) == ["0", "1", "2", "3", "4"]
    assert all(own.complete for own in plans)


def test_a_cell_gets_the_value_of_the_one_it_comes_after(tmp_path: Path) -> None:
    settings = {"log": str(tmp_path / "log")}

    def cells(scale: Scale) -> list[Cell]:
        del scale
        return [
            Cell(("first",), logged, {**settings, "number": 10}, cost=1),
            Cell(("second",), logged, {**settings, "number": 1}, after=("first",), cost=100),
        ]

    chained = Experiment("chained", "", "", cells, lambda _numbers, _scale: Section([]))
    (own,) = filled([chained], tmp_path / "cells.jsonl")
    assert own.numbers["second",] == {"twice": 22}


def test_the_key_holds_all_that_decides_a_value() -> None:
    cell = Cell(("a", 0), logged, {"number": 1})
    others = [
        Cell(("a", 0), logged, {"number": 2}),
        Cell(("a", 1), logged, {"number": 1}),
        Cell(("a", 0), catastrophes.trial, {"number": 1}),
    ]
    assert cell.key() == Cell(("a", 0), logged, {"number": 1}, cost=9).key()
    assert len({cell.key(), cell.key("before"), *(other.key() for other in others)}) == 5


def test_the_store_passes_over_a_line_that_was_not_finished(tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    with Store(path) as store:
        store.put("k1", {"x": 1.5}, 2.5, "e", ("a", 0))
    whole = path.read_text()
    for cut in range(1, len(whole) - 1):
        path.write_text(whole + whole.replace("k1", "k2")[:cut])
        with Store(path) as store:
            assert store.get("k1") == {"x": 1.5}
            assert store.seconds("k1") == 2.5
            assert store.get("k2") is None
            store.put("k3", {"x": 2}, 1.0, "e", ("a", 1))
        with Store(path) as store:
            assert store.get("k3") == {"x": 2}
    assert json.loads(whole)["label"] == ["a", 0]


def test_a_store_has_one_writer(tmp_path: Path) -> None:
    with (
        Store(tmp_path / "cells.jsonl"),
        pytest.raises(StoreInUse, match="is in use"),
        Store(tmp_path / "cells.jsonl"),
    ):
        pass


@pytest.mark.parametrize(
    ("findings", "verdict"),
    [
        ([HOLDS], "reproduced"),
        ([HOLDS, FAILS], "partly"),
        ([FAILS, FAILS], "not"),
        ([], "not checked"),
    ],
)
def test_a_claim_s_verdict_follows_from_its_findings(findings: list[Finding], verdict: str) -> None:
    assert Claim("c", findings).verdict == verdict
    assert Claim("c", findings, foreseen=None).agrees
    assert Claim("c", findings).agrees == (verdict in ("reproduced", "not checked"))
    assert Claim("c", findings, foreseen="not").agrees == (verdict in ("not", "not checked"))
    unchecked = Claim("c", findings, not_checked="no MNIST")
    assert unchecked.verdict == "not checked"
    assert unchecked.sentence == "not checked: no MNIST"
    assert spread([1.0, 2.0]) == "1.5 ± 0.5 (1.0 to 2.0)"


class Reader(html.parser.HTMLParser):
    """What a page refers to, its text, and whether its tags are closed."""

    VOID = ("meta", "img", "br")

    def __init__(self) -> None:
        super().__init__()
        self.references: list[str] = []
        self.ids: list[str] = []
        self.open: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "action", "data"):
                self.references.append(value or "")
            if name == "id":
                self.ids.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_report_is_one_file_that_escapes_what_it_shows(tmp_path: Path) -> None:
    evil = '<script>alert("x")</script> & | more'
    figure = new_figure()
    figure.add_subplot().plot([1, 2])
    section = Section(
        [Claim(evil, [Finding(evil, evil, evil, True)], note=evil, ours=True)],
        [Table(evil, ["a", evil], [["1", evil]])],
        [Plot("figure-9", evil, figure)],
        [evil],
        {evil: evil},
    )
    shown = Experiment("shown", evil, evil, lambda _s: [], lambda _n, _s: section)
    open_one = Experiment("open", "Open", "not yet", lambda _s: [], lambda _n, _s: section)
    paper = Paper("p", evil, evil, [shown, open_one], [evil])
    parts = [Part(shown, section), Part(open_one, None, "1 of 4 cells are there")]
    page = write_report(tmp_path, paper, parts, {"command": evil}, [evil]).read_text()
    reader = Reader()
    reader.feed(page)
    assert reader.open == []
    assert "script" not in reader.tags
    local = [r for r in reader.references if r.startswith("#")]
    assert {r[1:] for r in local} == {"shown", "open"} == set(reader.ids)
    images = [r for r in reader.references if not r.startswith("#")]
    assert len(images) == 1
    png = base64.b64decode(images[0].removeprefix("data:image/png;base64,"))
    assert png == (tmp_path / "plots" / "figure-9.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    assert not re.search(r"@import|url\(|https?://", page)
    assert "1 of 4 cells are there" in page
    lines = (tmp_path / "results.md").read_text().splitlines()
    rows = [line for line in lines if line.startswith("| 1 |")]
    assert rows == ['| 1 | <script>alert("x")</script> & \\| more |']


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


def text_of(console: Console) -> str:
    """What a quiet console was told."""
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_paper_runs_on_the_digits_where_mnist_is_not_at_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BLACKTHORN_DATA_DIR", raising=False)
    options = command.Options(Scale(quick=True, seeds=1), "failure", tmp_path, processes=1)
    people, result = quiet(), quiet()
    assert command.reproduce("fat-clipping", options, result, people)
    said = text_of(people)
    assert "0 of 1 cells" in said
    assert "1 of 1 cells" in said
    assert "0:00:00 left" in said
    assert "no MNIST" in text_of(result)
    page = (tmp_path / "report.html").read_text()
    assert "not checked: no MNIST" in page
    assert "blackthorn reproduce fat-clipping --quick --seeds 1" in page
    assert "MNIST is not at hand" in page
    assert page.count("Not measured yet") == 5
    people = quiet()
    assert command.reproduce("fat-clipping", options, quiet(), people)
    assert "1 of 1 cells (1 kept from before)" in text_of(people)


def test_a_full_run_without_its_data_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BLACKTHORN_DATA_DIR", raising=False)
    options = command.Options(Scale(data_dir=str(tmp_path)), "mnist", tmp_path / "out")
    with pytest.raises(ConfigError, match="mnist") as caught:
        command.reproduce("understanding-clipping", options, quiet(), quiet())
    assert "\n" not in str(caught.value)


def test_what_needs_no_data_is_reported_without_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BLACKTHORN_DATA_DIR", raising=False)

    def pictures(scale: Scale) -> list[Cell]:
        return [Cell((scale.data_set("mnist"),), logged, {"number": 0, "log": ""})]

    wanted = doubling(tmp_path / "log")
    paper = Paper(
        "a-paper", "A paper", "Nobody", [wanted, replace(wanted, name="p", cells=pictures)]
    )
    monkeypatch.setitem(command.PAPERS, "a-paper", paper)
    monkeypatch.setattr(runner, "executor", runner.in_this_process)
    options = command.Options(Scale(data_dir=str(tmp_path)), wanted.name, tmp_path / "out")
    command.reproduce("a-paper", options, quiet(), quiet())
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("Not measured yet") == 1
    assert "mnist" in page
    # Whoever asks for it is told before anything is measured.
    options = command.Options(Scale(data_dir=str(tmp_path)), "p", tmp_path / "other")
    with pytest.raises(ConfigError, match="mnist"):
        command.reproduce("a-paper", options, quiet(), quiet())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["none"], "paper = 'none' is not known: fat-clipping"),
        (["fat-clipping", "--only", "gauss"], "--only gauss is not known for fat-clipping"),
    ],
)
def test_an_unknown_paper_or_experiment_is_one_line(
    tmp_path: Path, arguments: list[str], expected: str
) -> None:
    options = command.Options(only=arguments[2] if len(arguments) > 1 else None)
    with pytest.raises(ConfigError, match=re.escape(expected)):
        command.reproduce(arguments[0], options, quiet(), quiet())
    assert list(tmp_path.iterdir()) == []


def test_the_command_ends_with_1_where_a_verdict_is_not_the_expected_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for numbers, code in ((4, 0), (3, 1)):
        experiment = doubling(tmp_path / "log", numbers=numbers)
        paper = Paper("a-paper", "A paper", "Nobody", [experiment])
        monkeypatch.setitem(command.PAPERS, "a-paper", paper)
        # A stand-in for a paper is not known in new processes.
        monkeypatch.setattr(runner, "executor", runner.in_this_process)
        folder = str(tmp_path / str(numbers))
        done = CliRunner().invoke(app, ["reproduce", "a-paper", "--output-dir", folder])
        assert done.exit_code == code, done.output
        assert ("as expected" in done.output) == (code == 0)


def test_all_papers_are_held_by_the_worst_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "executor", runner.in_this_process)
    for numbers, code in ((4, 0), (3, 1)):
        papers = {
            name: Paper(name, name, "Nobody", [doubling(tmp_path / "log", numbers=own)])
            for name, own in (("one", numbers), ("two", 4))
        }
        monkeypatch.setattr(command, "PAPERS", papers)
        folder = tmp_path / str(numbers)
        done = CliRunner().invoke(app, ["reproduce", "all", "--output-dir", str(folder)])
        assert done.exit_code == code, done.output
        assert {path.parent.name for path in folder.glob("*/report.html")} == {"one", "two"}
    with pytest.raises(ConfigError, match="--only x is not allowed with all papers"):
        command.reproduce("all", command.Options(only="x"), Console(), Console())


@pytest.mark.parametrize("paper", sorted(command.PAPERS))
@pytest.mark.parametrize("quick_run", [True, False])
def test_every_cell_of_every_paper_is_told_apart(
    paper: str, quick_run: bool, data_dir: str
) -> None:
    scale = Scale(quick_run, data_dir=data_dir)
    for experiment in command.PAPERS[paper].experiments:
        cells = experiment.cells(scale)
        labels = [cell.label for cell in cells]
        assert len(set(labels)) == len(labels) > 0
        assert all(cell.after is None or cell.after in labels for cell in cells)
        # Nothing of this machine decides a value.
        assert data_dir not in json.dumps([[cell.label, cell.settings] for cell in cells])


@pytest.mark.slow
def test_the_command_measures_in_new_processes(tmp_path: Path) -> None:
    arguments = ["reproduce", "fa-ld", "--only", "distance", "--quick", "--output-dir"]
    done = CliRunner().invoke(app, [*arguments, str(tmp_path)])
    assert done.exit_code == 0, done.output
    again = CliRunner().invoke(app, [*arguments, str(tmp_path)])
    assert "6 of 6 cells (6 kept from before)" in again.output
