"""`blackthorn runs`: what runs there are, and the removal of old ones."""

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blackthorn.launch.commands.output import AsJson, people_console, print_json, terminal_table
from blackthorn.settings.config import ConfigError
from blackthorn.settings.rounding import upward

if TYPE_CHECKING:
    from blackthorn.recording.run_list import ListedRun

app = typer.Typer(
    help="Show all runs in a folder, or remove old ones.\n\nExample: blackthorn runs --state state",
    invoke_without_command=True,
)
State = Annotated[
    Path | None, typer.Option(help="A server's --state: its runs, and no other of its files.")
]
Output = Annotated[
    Path | None, typer.Option("--output", help="Any folder with runs in it; by default runs.")
]


@app.callback()
def runs(
    context: typer.Context, state: State = None, output: Output = None, as_json: AsJson = False
) -> None:
    """Show all runs in a folder, or remove old ones.

    Example: blackthorn runs --state state
    """
    if context.invoked_subcommand is not None:
        if state is not None or output is not None or as_json:
            named = context.invoked_subcommand
            raise ConfigError(f"options go behind it: blackthorn runs {named} --state state")
        return
    from blackthorn.recording.run_list import list_runs

    found = list_runs(_root(state, output))
    if as_json:
        print_json({"runs": [_as_json(run) for run in found]})
        return
    _show(found)


@app.command()
def prune(
    state: State = None,
    output: Output = None,
    keep: Annotated[
        int | None, typer.Option(min=0, help="So many stay, those that began last.")
    ] = None,
    older: Annotated[
        float | None,
        typer.Option(min=0, metavar="DAYS", help="Only those that began more than so long ago."),
    ] = None,
    interrupted: Annotated[
        bool, typer.Option("--interrupted", help="Also those that could still go on.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove runs: never one that goes on, and never what counts what was told under a claim
    (ledger, rounds, summary).

    Example: blackthorn runs prune --state state --keep 20 --older 90
    """
    from blackthorn.recording.run_list import list_runs, to_prune
    from blackthorn.recording.run_list import prune as remove

    if keep is None and older is None:
        raise ConfigError("give --keep N, --older DAYS, or both: which runs go")
    if as_json and not yes:
        raise ConfigError("--json asks nobody: add --yes")
    limit = None if older is None else timedelta(days=older)
    going = to_prune(list_runs(_root(state, output)), keep, limit, interrupted=interrupted)
    if not as_json:
        _show(going)
    if going and not yes:
        typer.confirm(f"remove these {len(going)} runs?", abort=True)
    removed = {run.name: remove(run) for run in going}
    if as_json:
        print_json({"removed": removed})
        return
    typer.echo(f"{len(removed)} runs removed, {_bytes(sum(removed.values()))}")


def _root(state: Path | None, output: Path | None) -> Path:
    if state is not None and output is not None:
        raise ConfigError("give either --state DIR or --output DIR")
    option, root = ("--state", state) if state is not None else ("--output", output or Path("runs"))
    if not root.is_dir():
        raise ConfigError(f"{option} {root} is not a folder")
    if state is None:
        return root
    if not (state / "lock").exists():
        raise ConfigError(f"--state {state} is no state folder of blackthorn server")
    return state


def _show(runs: "list[ListedRun]") -> None:
    from blackthorn.reporting.comparison import RUNS_COMPOSE
    from blackthorn.reporting.report_facts import Table

    rows = [
        (
            run.name,
            run.status + (", record only" if run.stripped else ""),
            f"{run.figures.rounds or 0}/{run.figures.planned or '?'}",
            _spent(run),
            f"{run.began:%Y-%m-%d %H:%M}",
            _bytes(run.size),
        )
        for run in runs
    ]
    console = people_console(quiet=False, as_json=False)
    if not rows:
        console.print("no runs")
        return
    heads = ("run", "status", "rounds", "epsilon", "began (UTC)", "size")
    console.print(terminal_table(Table("", heads, rows)))
    if any(run.figures.epsilons for run in runs):
        console.print(RUNS_COMPOSE, markup=False, highlight=False, soft_wrap=True)


def _spent(run: "ListedRun") -> str:
    told = [] if run.epsilon is None else [upward(run.epsilon)]
    if run.sample_epsilon is not None:
        told.append(f"{upward(run.sample_epsilon)} of an example")
    return ", ".join(told)


def _as_json(run: "ListedRun") -> dict[str, Any]:
    return {
        "name": run.name,
        "folder": str(run.folder),
        "status": run.status,
        "rounds": run.figures.rounds,
        "planned": run.figures.planned,
        "epsilon": run.epsilon,
        "sample_epsilon": run.sample_epsilon,
        "began": run.began.isoformat(),
        "bytes": run.size,
    }


def _bytes(number: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} TB"
