"""Seconds of a round over gRPC: real Flower processes on loopback, four clients with torch.

    python -m benchmarks.grpc_rounds [--rounds 8] [--sizes 2e4,1e6,1.1e7]

Per model size d, on one SuperLink and four SuperNodes:

* our ServerApp with persistent clients, which `blackthorn cluster` uses, and with Flower's own
  programs, which start a Python for every message;
* Flower's FedAvg on the same persistent clients, on a grid that looks for replies as often as ours
  does, and on Flower's own, which looks every three seconds.

Everybody trains one step on eight digits, nobody evaluates, and a run's first round does not count.
Runs take turns, so that other work on the machine meets all of them.
"""

import argparse
import json
import os
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.grpc_apps import SECONDS
from blackthorn.installation import APP_ROOT
from blackthorn.launch.federation.app_bundle import COMPONENTS, Scalar, stage_app
from blackthorn.launch.federation.flower_cluster import DeploymentError, FlowerCluster
from blackthorn.recording.run_folder import read_metrics

CLIENTS = 4
# Digits: 64 inputs and ten classes.
_PARAMETERS_A_UNIT, _PARAMETERS_BESIDE = 64 + 1 + 10, 10
_OWN_COMPONENT = 'serverapp = "server_app.app:app"'
HEADINGS = (
    *("d", "persistent", "Flower's programs", "ratio"),
    *("FedAvg, quick grid", "ours adds %", "FedAvg, Flower's grid"),
)
# Every run of ours and of FedAvg is made so often, before and after that with Flower's programs.
TURNS = 2
_SECONDS_TO_START, _SECONDS_A_ROUND = 120.0, 60.0


def hidden_units(parameters: float) -> int:
    """Width of the perceptron on digits that comes closest to that many parameters."""
    return max(1, round((parameters - _PARAMETERS_BESIDE) / _PARAMETERS_A_UNIT))


def configuration(parameters: float, rounds: int, folder: Path) -> dict[str, Scalar]:
    """A run of the mean of four clients' models after one small step."""
    return {
        "task": "digits",
        "model": f"mlp-{hidden_units(parameters)}",
        "num-clients": CLIENTS,
        "num-server-rounds": rounds,
        "local-steps": 1,
        "batch-size": 8,
        "local-lr": 0.01,
        "weighting": "num-examples",
        "evaluate-every": rounds + 1,
        "output-dir": str(folder),
        "report": False,
        "tensorboard": False,
    }


def stage(app: str, target: Path) -> Path:
    """Our app with the ServerApp `app` of `grpc_apps.py` in place of its own."""
    stage_app(APP_ROOT.parent, [*COMPONENTS, "benchmarks"], target)
    project = target / "pyproject.toml"
    text = project.read_text()
    if _OWN_COMPONENT not in text:
        raise ValueError(f"pyproject.toml has no line {_OWN_COMPONENT}")
    component = f'serverapp = "benchmarks.grpc_apps:{app}"'
    project.write_text(text.replace(_OWN_COMPONENT, component))
    return target


def timed_run(
    cluster: FlowerCluster, app: str, parameters: float, rounds: int, folder: Path
) -> list[float]:
    """Seconds of the rounds after the first. DeploymentError if the run did not complete."""
    folder = folder.resolve()
    bundle = stage(app, folder.with_name(folder.name + "-app"))
    run_id = cluster.submit(bundle, configuration(parameters, rounds, folder))
    status = cluster.wait(run_id, _SECONDS_TO_START + rounds * _SECONDS_A_ROUND)
    if not status.completed:
        raise DeploymentError(f"{app}: {status} {status.details}\n{cluster.log(run_id)[-2000:]}")
    return list(json.loads((folder / SECONDS).read_text())[1:])


def persistent(
    parameters: float, rounds: int, folder: Path, apps: Iterable[str]
) -> dict[str, list[float]]:
    """Seconds of the rounds with persistent clients, by ServerApp, in this order."""
    with FlowerCluster(CLIENTS, folder) as cluster:
        return {app: timed_run(cluster, app, parameters, rounds, folder / app) for app in apps}


def standard(parameters: float, rounds: int, folder: Path) -> list[float]:
    """Seconds of the rounds of our ServerApp where every program is Flower's own."""
    with FlowerCluster(CLIENTS, folder, warm=False, quick_polls=False) as cluster:
        return timed_run(cluster, "ours", parameters, rounds, folder / "ours")


def phases(folders: Iterable[Path]) -> dict[str, float]:
    """Median seconds of every phase of our rounds, without the first, from metrics.jsonl."""
    entries = [
        entry["seconds"]
        for folder in folders
        for entry in read_metrics(folder)
        if entry["round"] > 1
    ]
    names = dict.fromkeys(name for entry in entries for name in entry)
    return {name: statistics.median(e[name] for e in entries if name in e) for name in names}


def cells(parameters: float, seconds: Mapping[str, Sequence[float]]) -> list[str]:
    """A row of the table: medians, the ratio, and what our strategy adds to FedAvg's round."""
    median = {name: statistics.median(values) for name, values in seconds.items() if values}
    ours = median["ours"]
    others = [median.get(name) for name in ("standard", "fedavg_quick", "fedavg")]
    slow, quick, plain = others
    return [
        f"{parameters:.2g}",
        f"{ours:.2f}",
        _shown(slow, ".2f"),
        _shown(slow and slow / ours, ".1f"),
        _shown(quick, ".2f"),
        _shown(quick and 100 * (ours / quick - 1), "+.1f"),
        _shown(plain, ".2f"),
    ]


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def measure(
    parameters: float, rounds: int, standard_rounds: int, folder: Path, turns: int = TURNS
) -> dict[str, list[float]]:
    """Seconds of all rounds with models of one size, by what was timed."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for turn in range(turns):
        apps = ["fedavg_quick", "ours"] if turn % 2 else ["ours", "fedavg_quick", "fedavg"]
        place = folder / f"persistent-{turn}"
        for app, values in persistent(parameters, rounds, place, apps).items():
            seconds[app] += values
        if turn == 0 and standard_rounds:
            seconds["standard"] = standard(parameters, standard_rounds, folder / "standard")
    return seconds


def print_phases(parameters: float, folder: Path, console: Console) -> None:
    """Where the seconds of our rounds went, and how busy the machine was."""
    found = phases(folder.glob("persistent-*/ours"))
    shares = ", ".join(f"{name} {value:.3f}" for name, value in found.items())
    load = os.getloadavg()[0]
    console.print(f"d = {parameters:.2g}: load {load:.1f} now; our phases: {shares}")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--rounds", type=int, default=8, help="of each run, persistent clients")
    parser.add_argument("--standard-rounds", type=int, default=4, help="with Flower's programs")
    parser.add_argument("--sizes", default="2e4,1e6,1.1e7", help="parameters of the models")
    options = parser.parse_args()
    console = Console(width=120)
    console.print(
        f"{datetime.now(UTC):%Y-%m-%d}, {os.cpu_count()} cores, torch {torch.__version__}, "
        f"load {os.getloadavg()[0]:.1f} before the start"
    )
    table = Table(title=f"seconds of a round, {CLIENTS} clients")
    for heading in HEADINGS:
        table.add_column(heading, justify="right")
    with tempfile.TemporaryDirectory(prefix="blackthorn-rounds-") as folder:
        try:
            for parameters in map(float, options.sizes.split(",")):
                place = Path(folder) / f"{parameters:.2g}"
                seconds = measure(parameters, options.rounds, options.standard_rounds, place)
                print_phases(parameters, place, console)
                table.add_row(*cells(parameters, seconds))
        finally:
            # What was measured before a failure, or Ctrl-C.
            console.print(table)


if __name__ == "__main__":
    main()
