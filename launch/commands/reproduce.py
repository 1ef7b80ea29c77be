"""`blackthorn reproduce`: a paper's tables and figures measured anew, and its report."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from blackthorn.experiments import (
    dp_normfedavg,
    fa_ld,
    fat_clipping,
    rage,
    robustness,
    understanding_clipping,
)
from blackthorn.experiments.page import Part, write_report
from blackthorn.experiments.runner import Plan, Watch, measure, plan
from blackthorn.experiments.runner import Progress as Measured
from blackthorn.experiments.store import Store
from blackthorn.experiments.study import Experiment, Paper, Scale, Section
from blackthorn.launch.commands.progress import time_left
from blackthorn.settings.config import ConfigError
from blackthorn.tasks.datasets import DataUnavailable

PAPERS: dict[str, Paper] = {
    paper.name: paper
    for paper in (
        fat_clipping.PAPER,
        dp_normfedavg.PAPER,
        understanding_clipping.PAPER,
        fa_ld.PAPER,
        rage.PAPER,
        robustness.PAPER,
    )
}
ALL = "all"
# Between plain lines, where the output is no terminal.
_SECONDS_BETWEEN_LINES = 10.0


@dataclass(frozen=True)
class Options:
    """What the command line chooses; `output_dir` None is a folder under runs/reproduce."""

    scale: Scale = field(default_factory=Scale)
    only: str | None = None
    output_dir: Path | None = None
    processes: int = 2


def reproduce(paper_name: str, options: Options, console: Console, people: Console) -> bool:
    """Measure a paper's experiments, or one of them, and write its report; whether every verdict
    is the one a right implementation comes to. `people` are told how far it is, `console` the
    result.

    What an earlier call has measured at the same scale is not measured again.
    "all" is every paper, one after the other, each in a folder of its own.
    Raises ConfigError for a name that is not known, and for data that are not there.
    """
    if paper_name == ALL:
        return _reproduce_all(options, console, people)
    paper = _paper(paper_name)
    chosen = _chosen(paper, options.only)
    name = f"{paper.name}-quick" if options.scale.quick else paper.name
    folder = options.output_dir or Path("runs") / "reproduce" / name
    try:
        with Store(folder / "cells.jsonl") as store:
            plans = [plan(experiment, options.scale, store) for experiment in chosen]
            with _shown(people) as watch:
                measure(plans, store, options.scale.data_dir, options.processes, watch)
            done = {own.experiment.name: own for own in plans}
            others = [e for e in paper.experiments if e.name not in done]
            more, absent = _plans_where_data_are(others, options.scale, store)
            done |= more
            keys = {own.keys[label] for own in done.values() for label in own.numbers}
            seconds = sum(store.seconds(key) for key in keys)
    except KeyboardInterrupt:
        console.print(f"Stopped. What was measured is in {folder}: the same command goes on.")
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from error
    parts = [
        Part(e, None, absent[e.name]) if e.name in absent else _part(done[e.name], options.scale)
        for e in paper.experiments
    ]
    report = write_report(
        folder, paper, parts, _facts(paper, options, seconds), _notes(options.scale)
    )
    holds = True
    for part in parts:
        if part.section is not None and part.experiment in chosen:
            console.print(claims_table(part.experiment, part.section))
            holds = holds and all(claim.agrees for claim in part.section.claims)
    console.print(f"Report: {report}")
    return holds


def _reproduce_all(options: Options, console: Console, people: Console) -> bool:
    if options.only is not None:
        raise ConfigError(f"--only {options.only} is not allowed with all papers: name one")
    held = []
    for name in PAPERS:
        folder = None if options.output_dir is None else options.output_dir / name
        held.append(reproduce(name, replace(options, output_dir=folder), console, people))
    return all(held)


def _paper(name: str) -> Paper:
    if name not in PAPERS:
        raise ConfigError(f"paper = {name!r} is not known: {', '.join(PAPERS)}, {ALL}")
    return PAPERS[name]


def _chosen(paper: Paper, only: str | None) -> Sequence[Experiment]:
    if only is None:
        return paper.experiments
    chosen = [experiment for experiment in paper.experiments if experiment.name == only]
    if not chosen:
        known = ", ".join(experiment.name for experiment in paper.experiments)
        raise ConfigError(f"--only {only} is not known for {paper.name}: {known}")
    return chosen


def _plans_where_data_are(
    experiments: Sequence[Experiment], scale: Scale, store: Store
) -> tuple[dict[str, Plan], dict[str, str]]:
    """By name: the plans of experiments nobody asked for, and why others cannot have one."""
    plans, absent = {}, {}
    for experiment in experiments:
        try:
            plans[experiment.name] = plan(experiment, scale, store)
        except DataUnavailable as error:
            absent[experiment.name] = str(error)
    return plans, absent


def _part(own: Plan, scale: Scale) -> Part:
    if not own.complete:
        return Part(own.experiment, None, f"{len(own.numbers)} of {len(own.cells)} cells are there")
    return Part(own.experiment, own.experiment.section(own.numbers, scale))


def _facts(paper: Paper, options: Options, seconds: float) -> dict[str, str]:
    scale = options.scale
    command = f"blackthorn reproduce {paper.name}"
    command += " --quick" if scale.quick else ""
    command += f" --seeds {scale.seeds}" if scale.seeds else ""
    command += f" --draws {scale.draws}" if scale.draws else ""
    return {
        "command": command,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "cores": str(len(os.sched_getaffinity(0))),
        "seeds": str(scale.seeds) if scale.seeds else "as each experiment says",
        "time measuring": f"{time_left(seconds)} in all, on one core each",
    }


def _notes(scale: Scale) -> list[str]:
    if not scale.quick:
        return []
    return [
        "A quick run: fewer seeds, rounds or clients than in full, and the expected ranges are "
        "wider where that needs it. Each experiment says which."
    ]


@contextmanager
def _shown(console: Console) -> Iterator[Watch]:
    """Shows how far a measurement is: a bar, or plain lines where there is no terminal."""
    started = time.monotonic()

    def left(progress: Measured) -> str:
        elapsed = time.monotonic() - started
        if progress.done_cost <= 0:
            return "time left unknown"
        rest = progress.cost - progress.done_cost
        return f"about {time_left(elapsed * rest / progress.done_cost)} left"

    if not console.is_terminal:
        said = -_SECONDS_BETWEEN_LINES

        def line(progress: Measured) -> None:
            nonlocal said
            elapsed = time.monotonic() - started
            if elapsed - said < _SECONDS_BETWEEN_LINES and progress.done < progress.cells:
                return
            said = elapsed
            kept = f" ({progress.stored} kept from before)" if progress.stored else ""
            console.print(
                f"{progress.done} of {progress.cells} cells{kept}, {time_left(elapsed)} elapsed, "
                f"{left(progress)}: {progress.latest or 'starting'}",
                soft_wrap=True,
                highlight=False,
            )

        yield line
        return
    columns = (
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f} cells"),
        TextColumn("{task.fields[left]}"),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None, left="")

        def update(progress: Measured) -> None:
            bar.update(
                task,
                completed=progress.done,
                total=progress.cells,
                description=progress.latest or "starting",
                left=left(progress),
            )

        yield update


def claims_table(experiment: Experiment, section: Section) -> Table:
    """The claims of an experiment, what was measured of them, and the verdicts."""
    table = Table(title=f"{experiment.name}: {experiment.about}", title_justify="left")
    table.add_column("claim")
    table.add_column("measured")
    table.add_column("verdict")
    for claim in section.claims:
        verdict = claim.verdict_said
        if claim.verdict != "not checked":
            verdict += ", as expected" if claim.agrees else f", expected: {claim.foreseen}"
        colour = "green" if claim.agrees else "red"
        table.add_row(escape(claim.text), escape(claim.sentence), f"[{colour}]{verdict}[/]")
    return table
