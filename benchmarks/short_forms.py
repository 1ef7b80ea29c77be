"""Every figure of docs/performance.md in a form that takes a minute or two, in turns with its peer.

Each function gives its figures under the keys of `recorded_figures.py`; what this machine has not
got has the reason, a text, in place of the number; what has failed is left out.
"""

import tempfile
from pathlib import Path
from statistics import median

from benchmarks import aggregators_against_peers, engine_against_peers, grpc_rounds, start_times
from benchmarks.instruction_counts import counts
from benchmarks.recorded_figures import (
    GRPC_DIMENSION,
    MILLIONS,
    SIZES,
    TIMES_BYZFL,
    TIMES_FEDAVG,
    TIMES_FLOWER,
    TIMES_IMPORT,
    TIMES_PFL,
    TIMES_RAY,
    UNITS,
    Key,
)
from benchmarks.workloads import DATASET, WORKLOADS
from blackthorn.tasks.datasets import load_dataset

Measured = dict[Key, float | str]

ENGINE_WORKLOADS = ("logistic", "cnn")
_MEASURES = {"ray": TIMES_RAY, "pfl": TIMES_PFL}
_ENGINE_ROUNDS, _PEER_ROUNDS, _GRPC_ROUNDS, _GRPC_TURNS, _START_TURNS = 8, 3, 5, 2, 3


def engine() -> Measured:
    """The in-process engine's client updates by those of Flower's Ray simulation and of pfl.

    DataUnavailable without the data set.
    """
    load_dataset(DATASET)
    found: Measured = {}
    absent = engine_against_peers.absent_peers()
    for name in ENGINE_WORKLOADS:
        times = engine_against_peers.compare(WORKLOADS[name], _ENGINE_ROUNDS, _PEER_ROUNDS, 1).times
        for peer, measure in _MEASURES.items():
            value = f"{peer} is not installed" if peer in absent else times[peer]
            if value is not None:
                found[name, measure] = value
    return found


def rules() -> Measured:
    """Our aggregation rules in units, and the peers' times by ours."""
    found: Measured = {}
    for size, (num_rows, dimension) in SIZES.items():
        compared = aggregators_against_peers.compare(num_rows, dimension)
        for rule in compared.rules:
            what = f"{rule.rule}, {size}"
            found[what, UNITS] = rule.ours.seconds / compared.unit
            for measure, peer in ((TIMES_BYZFL, rule.byzfl), (TIMES_FLOWER, rule.flower)):
                if peer is not None:
                    found[what, measure] = peer.seconds / rule.ours.seconds
    return found


def rounds() -> Measured:
    """A round over gRPC of Flower's FedAvg by one of ours, on the same persistent clients."""
    parameters = float(GRPC_DIMENSION)
    ours: list[float] = []
    fedavg: list[float] = []
    with tempfile.TemporaryDirectory(prefix="blackthorn-rounds-") as folder:
        for turn in range(_GRPC_TURNS):
            apps = ["fedavg_quick", "ours"] if turn % 2 else ["ours", "fedavg_quick"]
            place = Path(folder) / str(turn)
            seconds = grpc_rounds.persistent(parameters, _GRPC_ROUNDS, place, apps)
            ours += seconds["ours"]
            fedavg += seconds["fedavg_quick"]
    return {(f"gRPC round, d = {GRPC_DIMENSION}", TIMES_FEDAVG): median(fedavg) / median(ours)}


def starts() -> Measured:
    """How long commands take to start, by the time that `import torch` takes."""
    found = start_times.times_import(_START_TURNS)
    return {(name, TIMES_IMPORT): times for name, times in found.items()}


def instructions() -> Measured:
    """Instructions of one call of an aggregation rule, which no other work on a machine changes.

    NotCounted without Valgrind.
    """
    return {(rule, MILLIONS): count / 1e6 for rule, count in counts().items()}
