"""What a sweep has left: means and deviations over its seeds, as a table, a CSV and a page."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

from rich.console import Console

from blackthorn.experiments.estimate import Estimate
from blackthorn.launch.commands.output import terminal_table
from blackthorn.launch.commands.sweep_plan import Choice, SweepRun, said, text_of
from blackthorn.recording.folder_place import REPORT
from blackthorn.recording.run_folder import read_metrics
from blackthorn.reporting.comparison import RUNS_COMPOSE, overlaid, write_page
from blackthorn.reporting.report_facts import Table
from blackthorn.reporting.run_report import Picture, Section
from blackthorn.settings.privacy_checks import claims_anything
from blackthorn.settings.rounding import upward
from blackthorn.strategies.durable_file import replace_file

CSV, PAGE = "sweep.csv", "sweep.html"
_MOST_CURVES = 8


@dataclass(frozen=True)
class Row:
    """A combination: how many of its runs completed, and of their final models' metrics the mean
    over these; `epsilon` is the largest of single runs, None without a claim."""

    choice: Choice
    runs: int
    completed: int
    metrics: Mapping[str, Estimate]
    epsilon: float | None


@dataclass(frozen=True)
class Sweep:
    """What a sweep has left in its `folder`: sweep.csv, sweep.html and the runs' folders. `failed`
    has the reasons of runs that did not complete, by their folders' names."""

    folder: Path
    runs: Sequence[SweepRun]
    failed: Mapping[str, str]

    @property
    def rows(self) -> list[Row]:
        """One a combination, in the order in which their values were given."""
        groups: dict[str, list[SweepRun]] = {}
        for run in self.runs:
            groups.setdefault(json.dumps(run.choice, sort_keys=True), []).append(run)
        return [_row(runs) for runs in groups.values()]


def write_results(done: Sweep, name: str) -> None:
    """sweep.csv and sweep.html of the sweep of the recipe `name`."""
    replace_file(done.folder / CSV, csv_of(done.rows).encode())
    _write_page(done, name)


def _row(runs: Sequence[SweepRun]) -> Row:
    summaries = [summary for run in runs if (summary := run.summary) is not None]
    names = dict.fromkeys(name for summary in summaries for name in summary["final"])
    metrics = {}
    for name in names:
        values = [summary["final"].get(name) for summary in summaries]
        # What was not finite is null in the summary.
        metrics[name] = Estimate.of([float("nan") if v is None else v for v in values])
    spent = [s["privacy"]["epsilon"] for s in summaries if s.get("privacy")]
    known = [epsilon for epsilon in spent if epsilon is not None]
    largest = max(known) if known and len(known) == len(spent) else None
    return Row(runs[0].choice, len(runs), len(summaries), metrics, largest)


def csv_of(rows: Sequence[Row]) -> str:
    """A line a combination: its values, how many runs there are and have completed, and the mean
    and standard deviation (of a sample; empty for one run) of every metric."""
    names = list(dict.fromkeys(name for row in rows for name in row.metrics))
    keys = list(rows[0].choice)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    both = [f"{name}_{what}" for name in names for what in ("mean", "sd")]
    writer.writerow([*keys, "runs", "completed", *both, "epsilon_of_a_run"])
    for row in rows:
        cells: list[object] = [text_of(row.choice[key]) for key in keys]
        cells += [row.runs, row.completed]
        for name in names:
            found = row.metrics.get(name)
            cells += ["", ""] if found is None else [found.mean, _sd_cell(found)]
        writer.writerow([*cells, "" if row.epsilon is None else row.epsilon])
    return text.getvalue()


def _sd_cell(found: Estimate) -> object:
    return "" if found.deviation is None else found.deviation


def table_of(rows: Sequence[Row]) -> Table:
    """The same for people."""
    names = list(dict.fromkeys(name for row in rows for name in row.metrics))
    claims = any(row.epsilon is not None for row in rows)
    heads = (*rows[0].choice, "runs", *names, *(["epsilon of a run"] if claims else []))
    cells = []
    for row in rows:
        runs = str(row.runs) if row.runs == row.completed else f"{row.completed} of {row.runs}"
        figures = [_figure(name, row.metrics.get(name)) for name in names]
        epsilon = [] if not claims else ["-" if row.epsilon is None else upward(row.epsilon, 4)]
        cells.append((*map(text_of, row.choice.values()), runs, *figures, *epsilon))
    return Table("Final models: mean ± standard deviation over the seeds", heads, cells)


def _figure(name: str, found: Estimate | None) -> str:
    if found is None:
        return "-"
    if not isfinite(found.mean):
        return "not finite"
    scale, unit = (100, " %") if name == "accuracy" else (1, "")
    mean = f"{scale * found.mean:.1f}" if unit else f"{found.mean:.4g}"
    if found.deviation is None:
        return mean + unit
    return f"{mean} ± {scale * found.deviation:.2g}{unit}"


def show(done: Sweep, console: Console) -> None:
    """The table in a terminal, what to know of it, and where the page is."""
    console.print(terminal_table(table_of(done.rows)))
    lines = [*_notes(done), f"{done.folder / CSV}", f"{done.folder / PAGE}"]
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def _notes(done: Sweep) -> list[str]:
    claims = any(claims_anything(run.config) for run in done.runs)
    failed = [f"{name} failed: {reason}" for name, reason in done.failed.items()]
    return [*([RUNS_COMPOSE] if claims else []), *failed]


def _write_page(done: Sweep, name: str) -> None:
    curves = [
        picture
        for key in dict.fromkeys(name for row in done.rows for name in row.metrics)
        if (picture := _means_drawn(done.runs, key)) is not None
    ]
    runs = []
    for run in done.runs:
        report = f"{run.folder.name}/{REPORT}"
        there = report if (done.folder / report).exists() else "none"
        runs.append((run.said, "completed" if run.summary else "not completed", there))
    left_out = len(done.rows) - _MOST_CURVES
    texts = []
    if any(row.completed > 1 for row in done.rows):
        texts.append("Means over the seeds, and one standard deviation to either side.")
    if left_out > 0:
        texts.append(f"Of the first {_MOST_CURVES} combinations.")
    sections = [
        Section("Result", tables=[table_of(done.rows)]),
        Section("Curves", texts=texts, figures=curves),
        Section("Runs", tables=[Table("One a row", ("run", "status", "report"), runs)]),
    ]
    foot = f"The table's numbers are in {CSV}, beside this page."
    write_page(done.folder / PAGE, f"sweep of {name}", "sweep", _notes(done), sections, foot)


def _means_drawn(runs: Sequence[SweepRun], key: str) -> Picture | None:
    """By combination, the mean over its seeds in every round that all of them evaluated, between
    one standard deviation less and one more."""
    groups: dict[str, list[SweepRun]] = {}
    for run in runs:
        if run.summary is not None:
            groups.setdefault(", ".join(said(run.choice)) or "the recipe", []).append(run)
    means: dict[str, list[tuple[int, float]]] = {}
    deviations: dict[str, list[float | None]] = {}
    for label, own in list(groups.items())[:_MOST_CURVES]:
        found: dict[int, list[float]] = {}
        for run in own:
            for entry in read_metrics(run.folder):
                if isinstance(entry.get(key), int | float):
                    found.setdefault(entry["round"], []).append(entry[key])
        rounds = {t: Estimate.of(v) for t, v in found.items() if len(v) == len(own)}
        means[label] = [(t, estimate.mean) for t, estimate in rounds.items()]
        deviations[label] = [estimate.deviation for estimate in rounds.values()]
    return overlaid(means, key, deviations)
