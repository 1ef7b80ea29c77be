"""Our aggregation rules beside Flower's and byzfl's, and beside what the hardware allows.

    python -m benchmarks.aggregators_against_peers [--sizes 200x2e4,50x1e6,50x1e7]

The unit is one float32 Gram product of the updates, `U @ U.T`, plus one pass over them,
`U.mean(0)`. An eighth of the rows is corrupt: attack A.3 of ALGORITHMS' list, one large vector
added to each. Flower's strategies get decoded replies' records, which they decode once more:
this is part of their figures.
"""

import argparse
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

import byzfl
import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import Bulyan, FedAvg, FedMedian, FedTrimmedAvg, Krum, MultiKrum
from flwr.serverapp.strategy.strategy import Strategy
from rich.console import Console
from rich.table import Table

from benchmarks.aggregation_workload import Call, draw_updates, our_rules
from benchmarks.measuring import Measurement, measure

SIZES = "200x2e4,50x1e6,50x1e7"
# A peer copies the updates up to six times; whoever shares the machine shall not suffer for it.
_COPIES_OF_A_PEER = 6
# What byzfl computes faster given NumPy arrays is measured so, too.
_ALSO_IN_NUMPY = ("median", "trimmed mean")


@dataclass(frozen=True)
class Row:
    """One rule: ours, and how byzfl and Flower compute it (None: they do not have it)."""

    rule: str
    ours: Callable[[], Call]
    byzfl: Callable[[], Call] | None
    byzfl_numpy: Callable[[], Call] | None
    flower: Callable[[], Call] | None


def rows(updates: np.ndarray, num_corrupt: int) -> list[Row]:
    """All rules, on `updates` [K, d]."""
    tensor, b, count = torch.from_numpy(updates), num_corrupt, len(updates)
    theirs: dict[str, Callable[[object], object]] = {
        "mean": byzfl.Average(),
        "Krum": byzfl.Krum(b),
        "Multi-Krum": byzfl.MultiKrum(b),
        "median": byzfl.Median(),
        "trimmed mean": byzfl.TrMean(b),
    }
    strategies: dict[str, Strategy] = {
        "mean": FedAvg(),
        "Krum": Krum(num_malicious_nodes=b),
        "Multi-Krum": MultiKrum(num_malicious_nodes=b, num_nodes_to_select=count - b - 2),
        "Bulyan": Bulyan(num_malicious_nodes=b),
        "median": FedMedian(),
        "trimmed mean": FedTrimmedAvg(beta=b / count),
    }

    def row(rule: str, ours: Call) -> Row:
        peer, strategy = theirs.get(rule), strategies.get(rule)
        return Row(
            rule,
            lambda: ours,
            (lambda: lambda: peer(tensor)) if peer else None,
            (lambda: lambda: peer(updates)) if peer and rule in _ALSO_IN_NUMPY else None,
            (lambda: _aggregation_of(strategy, replies(updates))) if strategy else None,
        )

    return [row(rule, ours) for rule, ours in our_rules(updates, b).items()]


def _aggregation_of(strategy: Strategy, messages: list[Message]) -> Call:
    return lambda: strategy.aggregate_train(1, messages)


def replies(updates: np.ndarray) -> list[Message]:
    """One training reply a row, as Flower's strategies take them."""
    messages = []
    for row in updates:
        question = Message(RecordDict(), 1, "train")
        record = ArrayRecord({"w": Array(row)})
        content = RecordDict({"arrays": record, "metrics": MetricRecord({"num-examples": 1.0})})
        messages.append(Message(content, reply_to=question))
    return messages


@dataclass(frozen=True)
class Measured:
    """One rule as it was measured; a peer is None that has no such rule, or too little memory."""

    rule: str
    ours: Measurement
    byzfl: Measurement | None
    byzfl_numpy: Measurement | None
    flower: Measurement | None


@dataclass(frozen=True)
class Comparison:
    """Every rule at one size, and what the unit is made of."""

    num_rows: int
    dimension: int
    product: Measurement
    one_pass: Measurement
    rules: list[Measured]

    @property
    def unit(self) -> float:
        """Seconds of the unit."""
        return self.product.seconds + self.one_pass.seconds


def compare(num_rows: int, dimension: int) -> Comparison:
    """Measure every rule at one size, each followed by its peers."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    num_corrupt = num_rows // 8
    updates = draw_updates(num_rows, dimension, num_corrupt)
    tensor = torch.from_numpy(updates)
    repeats = 9 if updates.size < 10**8 else 3
    product = measure(lambda: lambda: tensor @ tensor.T, repeats)
    one_pass = measure(lambda: lambda: tensor.mean(0), repeats)
    found = []
    for row in rows(updates, num_corrupt):
        ours = measure(row.ours, repeats)
        peers = (
            _peer(make, updates, min(3, repeats))
            for make in (row.byzfl, row.byzfl_numpy, row.flower)
        )
        found.append(Measured(row.rule, ours, *peers))
    return Comparison(num_rows, dimension, product, one_pass, found)


def table_of(found: Comparison) -> Table:
    """What was measured at one size."""
    table = Table(
        title=f"K = {found.num_rows}, d = {found.dimension:.0e}, {found.num_rows // 8} corrupt: "
        f"one Gram product {_ms(found.product.seconds)}, one pass {_ms(found.one_pass.seconds)}",
        caption="in ( ): times our time; MiB: memory beside the updates",
    )
    for heading in (
        "rule",
        "ours",
        "x unit",
        "MiB",
        "byzfl",
        "MiB",
        "byzfl, NumPy",
        "Flower",
        "MiB",
    ):
        table.add_column(heading, justify="left" if heading == "rule" else "right")
    for rule in found.rules:
        table.add_row(
            rule.rule,
            _ms(rule.ours.seconds),
            f"{rule.ours.seconds / found.unit:.2f}",
            f"{rule.ours.extra_mib:.0f}",
            *_against(rule.byzfl, rule.ours),
            _against(rule.byzfl_numpy, rule.ours)[0],
            *_against(rule.flower, rule.ours),
        )
    return table


def _peer(make: Callable[[], Call] | None, updates: np.ndarray, repeats: int) -> Measurement | None:
    if make is None:
        return None
    needed = _COPIES_OF_A_PEER * updates.nbytes
    if os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") < needed:
        return None
    return measure(make, 1 if updates.size >= 10**8 else repeats)


def _against(peer: Measurement | None, ours: Measurement) -> tuple[str, str]:
    if peer is None:
        return "-", "-"
    times = peer.seconds / ours.seconds
    return f"{_ms(peer.seconds)} ({times:.1f})", f"{peer.extra_mib:.0f}"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"


def main() -> None:
    """Print one table a size."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--sizes", default=SIZES, help="KxD, separated by commas")
    sizes = parser.parse_args().sizes
    console = Console(width=140)
    console.print(f"{os.cpu_count()} cores, torch {torch.__version__}, byzfl, Flower")
    for size in sizes.split(","):
        num_rows, dimension = size.split("x")
        console.print(table_of(compare(int(num_rows), int(float(dimension)))))


if __name__ == "__main__":
    main()
