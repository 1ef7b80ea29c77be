"""`blackthorn demo`: a federation with attackers, once with plain averaging, once with RAGE."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from blackthorn.launch.commands.recipes import recipe_config
from blackthorn.launch.commands.simulate import simulate
from blackthorn.recording.run_folder import read_metrics
from blackthorn.reporting.plots import plot_accuracies
from blackthorn.reporting.run_report import REPORT
from blackthorn.strategies.durable_file import replace_file

RULES = ("mean", "rage")


def demo(recipe: Path, folder: Path, console: Console) -> dict[str, dict[str, Any]]:
    """Run the recipe under both rules; leaves FOLDER/mean, FOLDER/rage, a plot and a summary.

    Returns both summaries.
    """
    set_aside(folder)
    config = recipe_config(recipe)
    console.print(
        f"{config.num_clients} clients learn {config.task}; {config.num_byzantine} of them lie "
        f"({config.attack}).\n",
        highlight=False,
    )
    summaries = {}
    for rule in RULES:
        run = config.model_copy(update={"aggregator": rule, "output_dir": str(folder / rule)})
        summaries[rule] = simulate(run, console, label=f"[{rule}] ")
    console.print(_table(folder))
    runs = {rule: read_metrics(folder / rule) for rule in RULES}
    plot = plot_accuracies(runs, folder / "accuracy.png")
    summary = (folder / "rage" / "summary.json").read_bytes()
    replace_file(folder / "summary.json", summary)
    console.print(f"Plot: {plot}", markup=False, highlight=False)
    console.print(_next_steps(recipe, folder), markup=False, highlight=False, soft_wrap=True)
    return summaries


def set_aside(folder: Path) -> None:
    """Rename an earlier demo's folder: nothing that was written is lost."""
    if folder.exists():
        stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S-%f")[:-3]
        folder.rename(folder.with_name(f"{folder.name}-until-{stamp}"))


def _table(folder: Path) -> Table:
    table = Table(title="Test accuracy (%)")
    for heading in ("round", *RULES, "clients filtered by rage"):
        table.add_column(heading, justify="right")
    runs = [read_metrics(folder / rule) for rule in RULES]
    for mean, rage in zip(*runs, strict=True):
        filtered = ", ".join(str(client) for client in rage["filtered"]) or "-"
        table.add_row(
            str(mean["round"]),
            f"{100 * mean['accuracy']:.1f}",
            f"{100 * rage['accuracy']:.1f}",
            filtered,
        )
    return table


def _next_steps(recipe: Path, folder: Path) -> str:
    return (
        "\nWhat to try next:\n"
        f"  the whole story     open {folder / 'rage' / REPORT} in a browser\n"
        f"  another attack      blackthorn simulate {recipe} --set attack=gradient-shift\n"
        f"  real processes      blackthorn cluster {recipe} --clients 5 --byzantine 1\n"
        "  all keys            blackthorn keys"
    )
