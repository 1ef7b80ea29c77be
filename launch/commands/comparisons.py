"""`blackthorn sweep`, `compare` and `recipes`: many runs, and what to begin them with."""

import os
from pathlib import Path
from typing import Annotated

import typer

from blackthorn.launch.commands.output import Quiet, people_console, terminal_table
from blackthorn.launch.commands.recipes import Recipe, copy_recipes, recipe_lines
from blackthorn.settings.config import ConfigError


def sweep(
    recipe: Recipe,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE,VALUE",
            help="Values of a key (repeatable): every combination is run. A value with commas "
            "stands in quotes.",
        ),
    ] = None,
    seeds: Annotated[
        int, typer.Option(help="Runs of each: the recipe's seed and those after it.")
    ] = 1,
    processes: Annotated[
        int | None, typer.Option(help="Runs at a time; by default the number of cores.")
    ] = None,
    output_dir: Annotated[
        Path | None, typer.Option(help="Folder of all runs; by default runs/sweep-RECIPE.")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Simulate a recipe with every combination of some keys' values, over several seeds. The same
    command goes on where an interrupted one stopped. Exits with 1 if a run failed.

    Example: blackthorn sweep demo --set attack=all-ones,sign-flip --seeds 5
    """
    from blackthorn.launch.commands.sweep import sweep as run
    from blackthorn.launch.commands.sweep_plan import parse_choices
    from blackthorn.launch.commands.sweep_results import show

    count = len(os.sched_getaffinity(0)) if processes is None else processes
    choices = parse_choices(settings or ())
    done = run(recipe, choices, seeds, count, output_dir, people_console(quiet, as_json=False))
    show(done, people_console(quiet=False, as_json=False))
    if done.failed:
        raise typer.Exit(1)


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, two or more.")],
    out: Annotated[Path, typer.Option(help="The page; one that is there is replaced.")] = Path(
        "comparison.html"
    ),
) -> None:
    """What runs differ in, how they ended, and a page with their curves over each other.

    Example: blackthorn compare runs/demo/mean runs/demo/rage
    """
    from blackthorn.reporting.comparison import compared, write_comparison

    if out.suffix != ".html":
        raise ConfigError(f"--out {out} is not allowed: a file that ends in .html")
    found = compared(runs)
    write_comparison(found, out)
    console = people_console(quiet=False, as_json=False)
    for told in (found.differing, found.ends):
        console.print(terminal_table(told))
    lines = [*found.notes, str(out)]
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def recipes(
    names: Annotated[
        list[str] | None, typer.Argument(help="Recipes to copy; without, all are listed.")
    ] = None,
    output_dir: Annotated[Path, typer.Option(help="Where the copies go.")] = Path(),
) -> None:
    """List Blackthorn's own recipes, or copy some to begin with.

    Example: blackthorn recipes demo --output-dir mine
    """
    console = people_console(quiet=False, as_json=False)
    lines = [str(path) for path in copy_recipes(names, output_dir)] if names else recipe_lines()
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
