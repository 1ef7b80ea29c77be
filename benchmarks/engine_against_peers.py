"""The in-process engine beside Flower's Ray simulation and pfl-research with two processes.

    python -m benchmarks.engine_against_peers [--rounds 7] [--peer-rounds 4] [--turns 3]

The unit is a client update: a client's local steps, and its share of all that makes a round. Every
system runs in processes of its own; its first round, in which workers load data, does not count.
They run in turns, and ratios are those of a turn: a machine's own speed changes. Nobody evaluates.
pfl is not among our dependencies: `pip install pfl`.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.workloads import WORKLOADS, Workload

POPULATIONS = (300, 3000, 30000)
# Of whom as many join a round, so that nothing grows but the population.
COHORT = 300
# By package: our module that runs the workload in it, and in how many processes.
PEERS = {"ray": ("peer_flower", 1), "pfl": ("peer_pfl", 2)}
_LIMIT_SECONDS = 600.0


def seconds_a_round(module: str, *arguments: str, processes: int = 1) -> float | None:
    """Median seconds of a round of a benchmark module, without the first; None if it failed."""
    launcher = [sys.executable, "-m"]
    environment = dict(os.environ)
    if processes > 1:
        launcher += ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        launcher += ["-m"]
        environment["OMP_NUM_THREADS"] = "1"
    try:
        done = subprocess.run(
            [*launcher, f"benchmarks.{module}", *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=_LIMIT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        print(error, file=sys.stderr)
        return None
    lists = [line for line in done.stdout.splitlines() if line.startswith("[")]
    if done.returncode or not lists:
        print(done.stderr[-2000:], file=sys.stderr)
        return None
    return statistics.median(json.loads(lists[-1])[1:])


@dataclass(frozen=True)
class Comparison:
    """Median seconds of a round, and the medians of the turns' ratios, peer / engine.

    None where something failed; a peer that is not installed is not among the keys.
    """

    workload: Workload
    seconds: float | None
    peers: dict[str, float | None]
    times: dict[str, float | None]

    def cells(self) -> list[str]:
        """A row of the table."""
        seconds = (self.seconds, *(self.peers.get(name) for name in PEERS))
        rates = [_rate(self.workload.per_round, each) for each in seconds]
        times = [_ratio(self.times.get(name)) for name in PEERS]
        return [self.workload.name, _seconds(self.seconds), *rates, *times]


def absent_peers() -> list[str]:
    """Those that are not installed."""
    return [name for name in PEERS if importlib.util.find_spec(name) is None]


def compare(workload: Workload, rounds: int, peer_rounds: int, turns: int) -> Comparison:
    """The engine and every peer that is installed, `turns` times one after the other."""
    there = {name: peer for name, peer in PEERS.items() if name not in absent_peers()}
    ours: list[float] = []
    peers: dict[str, list[float]] = {name: [] for name in there}
    ratios: dict[str, list[float]] = {name: [] for name in there}
    for _ in range(turns):
        own = seconds_a_round("engine_rounds", workload.name, str(rounds))
        ours += [] if own is None else [own]
        for name, (module, processes) in there.items():
            other = seconds_a_round(module, workload.name, str(peer_rounds), processes=processes)
            if other is not None:
                peers[name].append(other)
                ratios[name] += [] if own is None else [other / own]
    return Comparison(
        workload,
        _median(ours),
        {name: _median(each) for name, each in peers.items()},
        {name: _median(each) for name, each in ratios.items()},
    )


def growth(rounds: int, console: Console) -> None:
    """Updates a second while the population grows."""
    table = Table(title=f"logistic, {COHORT} clients a round")
    for heading in ("clients", "s a round", "updates a second"):
        table.add_column(heading, justify="right")
    for clients in POPULATIONS:
        seconds = seconds_a_round("engine_rounds", "growth", str(rounds), str(clients))
        table.add_row(str(clients), _seconds(seconds), _rate(COHORT, seconds))
    console.print(table)


def _median(times: list[float]) -> float | None:
    return statistics.median(times) if times else None


def _rate(updates: int, seconds: float | None) -> str:
    return "-" if seconds is None else f"{updates / seconds:.0f}"


def _ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.1f}"


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.3f}"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="of the engine")
    parser.add_argument("--peer-rounds", type=int, default=4, help="of the others")
    parser.add_argument("--turns", type=int, default=3, help="how often each of them starts")
    options = parser.parse_args()
    console = Console(width=120)
    load = os.getloadavg()[0]
    console.print(
        f"{datetime.now(UTC):%Y-%m-%d}, {os.cpu_count()} cores, torch {torch.__version__}, "
        f"load {load:.1f} before the start"
    )
    if absent := absent_peers():
        console.print(f"not installed, so not compared: {', '.join(absent)}")
    table = Table(title="client updates a second, and how many times the peer's the engine makes")
    for heading in ("workload", "s a round", "engine", "Ray", "pfl", "times Ray", "times pfl"):
        table.add_column(heading, justify="left" if heading == "workload" else "right")
    for name in ("logistic", "cnn"):
        found = compare(WORKLOADS[name], options.rounds, options.peer_rounds, options.turns)
        table.add_row(*found.cells())
    console.print(table)
    growth(options.rounds, console)


if __name__ == "__main__":
    main()
