"""`blackthorn demo`: a federation with attackers, under plain averaging and under RAGE, and then as
processes that talk over gRPC."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from blackthorn.launch.commands.cluster import cluster, deployed
from blackthorn.launch.commands.recipes import recipe_config
from blackthorn.launch.commands.simulate import simulate
from blackthorn.recording.failure_reason import RunFailed
from blackthorn.recording.folder_place import REPORT, set_aside
from blackthorn.recording.resume import begins_anew
from blackthorn.recording.run_folder import read_metrics
from blackthorn.reporting.comparison import apart
from blackthorn.reporting.plots import plot_accuracies
from blackthorn.server_app.run import prepare
from blackthorn.settings.config import RunConfig
from blackthorn.settings.privacy_checks import is_noised
from blackthorn.strategies.durable_file import replace_file

RULES = ("mean", "rage")
FEDERATION, SIMULATION = "federation", "simulation"
# As many processes as two cores have room for.
CLIENTS, BYZANTINE = 5, 1
# Beside a model's largest entry. The engine trains all clients in one product, a process its one
# client in another: they add up in float32 in another order.
ROUNDING = 1e-4


def demo(recipe: Path, folder: Path, console: Console) -> dict[str, dict[str, Any]]:
    """Run the recipe under both rules, and under RAGE with few clients as a real federation.

    Leaves FOLDER/mean, FOLDER/rage, FOLDER/federation and FOLDER/simulation, a plot and a summary.
    Returns the summaries of the first three. Raises ConfigError before anything has begun,
    DeploymentError where a process did not do its part, RunFailed where the federation's model is
    not that of the same run in one process.
    """
    rules = {rule: recipe_config(recipe, (), {"aggregator": rule}) for rule in RULES}
    lies = BYZANTINE if rules["rage"].num_byzantine else 0
    few = {"num-clients": CLIENTS, "num-byzantine": lies, "aggregator": "rage"}
    federation = recipe_config(recipe, (), few)
    prepare(deployed(_placed(federation, "")))
    set_aside(folder)
    try:
        summaries = compare_rules(rules, folder, console)
        summaries[FEDERATION] = _federate(federation, folder, console)
    except BaseException as error:
        begins_anew(error)
        raise
    console.print(_next_steps(recipe, folder), markup=False, highlight=False, soft_wrap=True)
    return summaries


def _placed(config: RunConfig, folder: Path | str) -> RunConfig:
    return config.model_copy(update={"output_dir": str(folder)})


def compare_rules(
    rules: Mapping[str, RunConfig], folder: Path, console: Console
) -> dict[str, dict[str, Any]]:
    """A run in this process for every rule, a table and a plot of them; their summaries."""
    config = rules["rage"]
    console.print(
        f"{config.num_clients} clients learn {config.task}; {config.num_byzantine} of them lie "
        f"({config.attack}).\n",
        highlight=False,
    )
    summaries = {
        rule: simulate(_placed(run, folder / rule), console, label=f"[{rule}] ")
        for rule, run in rules.items()
    }
    console.print(_table(folder))
    runs = {rule: read_metrics(folder / rule) for rule in RULES}
    plot = plot_accuracies(runs, folder / "accuracy.png")
    summary = (folder / "rage" / "summary.json").read_bytes()
    replace_file(folder / "summary.json", summary)
    console.print(f"Plot: {plot}", markup=False, highlight=False)
    return summaries


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


def _federate(config: RunConfig, folder: Path, console: Console) -> dict[str, Any]:
    """`config` as processes, and once more in this one; its summary.

    RunFailed where the models are not the same.
    """
    console.print(
        f"\nNow with {CLIENTS} clients, as processes that talk over gRPC: a SuperLink, "
        f"{CLIENTS - config.num_byzantine} honest SuperNodes, and {config.num_byzantine} with a "
        "Byzantine program.\n",
        highlight=False,
        soft_wrap=True,
    )
    began = time.monotonic()
    summary = cluster(_placed(config, folder / FEDERATION), console)
    seconds = time.monotonic() - began
    simulate(_placed(config, folder / SIMULATION), Console(quiet=True))
    lines = [
        f"{summary['rounds_completed']} rounds over gRPC, with the start and the end of all "
        f"processes, in {seconds:.0f} s; the same run in this process:",
        *(f"  {name}  {folder / name / REPORT}" for name in (FEDERATION, SIMULATION)),
        _same_model(config, folder),
    ]
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
    return summary


def _same_model(config: RunConfig, folder: Path) -> str:
    """Whether both runs end with the same model; RunFailed where they should and do not."""
    if is_noised(config):
        return "Noise for privacy is drawn anew in every run: their final models differ by it."
    distance = apart(folder / FEDERATION, folder / SIMULATION)
    if distance == 0:
        return "Their final models are the same, bit for bit."
    said = f"the largest difference between their entries is {distance:.1e} of the largest entry"
    if distance > ROUNDING:
        raise RunFailed(f"the final models of {FEDERATION} and {SIMULATION} differ: {said}")
    return f"Their final models are the same to float32's rounding: {said}."


def _next_steps(recipe: Path, folder: Path) -> str:
    return (
        "\nWhat to try next:\n"
        f"  the whole story     open {folder / 'rage' / REPORT} in a browser\n"
        f"  another attack      blackthorn simulate {recipe} --set attack=gradient-shift\n"
        f"  more processes      blackthorn cluster {recipe} --clients 8 --byzantine 2\n"
        "  all keys            blackthorn keys"
    )
