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

from benchmarks.measuring import Measurement, measure
from blackthorn.strategies import aggregation

SIZES = "200x2e4,50x1e6,50x1e7"
# A peer copies the updates up to six times; whoever shares the machine shall not suffer for it.
_COPIES_OF_A_PEER = 6

Call = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """One rule: ours, and how byzfl and Flower compute it (None: they do not have it)."""

    rule: str
    ours: Callable[[], Call]
    byzfl: Callable[[], Call] | None = None
    byzfl_numpy: Callable[[], Call] | None = None
    flower: Callable[[], Call] | None = None


def draw_updates(num_rows: int, dimension: int, num_corrupt: int) -> np.ndarray:
    """Gaussian rows about a common vector, the first of them shifted by 50 N(0, I)."""
    generator = np.random.default_rng(0)
    updates = generator.standard_normal((num_rows, dimension), dtype=np.float32)
    updates += 0.5 * generator.standard_normal(dimension, dtype=np.float32)
    updates[:num_corrupt] += 50 * generator.standard_normal(dimension, dtype=np.float32)
    return updates


def rows(updates: np.ndarray, num_corrupt: int) -> list[Row]:
    """All rules, on `updates` [K, d]."""
    tensor, b, count = torch.from_numpy(updates), num_corrupt, len(updates)
    honest = tensor[b:]

    def rule(function: Callable[..., object], *arguments: int) -> Callable[[], Call]:
        return lambda: lambda: function(tensor, *arguments)

    def peer(aggregator: Callable[[object], object]) -> Callable[[], Call]:
        return lambda: lambda: aggregator(tensor)

    def peer_numpy(aggregator: Callable[[object], object]) -> Callable[[], Call]:
        return lambda: lambda: aggregator(updates)

    def flower(strategy: Strategy) -> Callable[[], Call]:
        def make() -> Call:
            messages = replies(updates)
            return lambda: strategy.aggregate_train(1, messages)

        return make

    selected = count - b - 2
    median, trimmed = byzfl.Median(), byzfl.TrMean(b)
    return [
        Row("mean", rule(aggregation.mean), peer(byzfl.Average()), None, flower(FedAvg())),
        Row("RAGE", rule(aggregation.rage, b)),
        Row(
            "RAGE, nobody corrupt",
            lambda: lambda: aggregation.rage(honest, min(b, (len(honest) - 1) // 3)),
        ),
        Row(
            "Krum",
            rule(aggregation.krum, b),
            peer(byzfl.Krum(b)),
            None,
            flower(Krum(num_malicious_nodes=b)),
        ),
        Row(
            "Multi-Krum",
            rule(aggregation.multi_krum, b),
            peer(byzfl.MultiKrum(b)),
            None,
            flower(MultiKrum(num_malicious_nodes=b, num_nodes_to_select=selected)),
        ),
        Row(
            "Bulyan",
            rule(aggregation.bulyan, b),
            None,
            None,
            flower(Bulyan(num_malicious_nodes=b)),
        ),
        Row(
            "median",
            rule(aggregation.coordinate_median),
            peer(median),
            peer_numpy(median),
            flower(FedMedian()),
        ),
        Row(
            "trimmed mean",
            rule(aggregation.trimmed_mean, b),
            peer(trimmed),
            peer_numpy(trimmed),
            flower(FedTrimmedAvg(beta=b / count)),
        ),
    ]


def replies(updates: np.ndarray) -> list[Message]:
    """One training reply a row, as Flower's strategies take them."""
    messages = []
    for row in updates:
        question = Message(RecordDict(), 1, "train")
        record = ArrayRecord({"w": Array(row)})
        content = RecordDict({"arrays": record, "metrics": MetricRecord({"num-examples": 1.0})})
        messages.append(Message(content, reply_to=question))
    return messages


def compare(num_rows: int, dimension: int, console: Console) -> None:
    """Measure every rule at one size and print the table."""
    num_corrupt = num_rows // 8
    updates = draw_updates(num_rows, dimension, num_corrupt)
    tensor = torch.from_numpy(updates)
    repeats = 9 if updates.size < 10**8 else 3
    product = measure(lambda: lambda: tensor @ tensor.T, repeats)
    one_pass = measure(lambda: lambda: tensor.mean(0), repeats)
    unit = product.seconds + one_pass.seconds
    table = Table(
        title=f"K = {num_rows}, d = {dimension:.0e}, {num_corrupt} corrupt: one Gram product "
        f"{_ms(product.seconds)}, one pass {_ms(one_pass.seconds)}",
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
    for row in rows(updates, num_corrupt):
        ours = measure(row.ours, repeats)
        peers = [
            _peer(make, updates, min(3, repeats))
            for make in (row.byzfl, row.byzfl_numpy, row.flower)
        ]
        cells = [_against(peer, ours) for peer in peers]
        table.add_row(
            row.rule,
            _ms(ours.seconds),
            f"{ours.seconds / unit:.2f}",
            f"{ours.extra_mib:.0f}",
            *cells[0],
            cells[1][0],
            *cells[2],
        )
    console.print(table)


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
    logging.getLogger("flwr").setLevel(logging.ERROR)
    console = Console(width=140)
    console.print(f"{os.cpu_count()} cores, torch {torch.__version__}, byzfl, Flower")
    for size in sizes.split(","):
        num_rows, dimension = size.split("x")
        compare(int(num_rows), int(float(dimension)), console)


if __name__ == "__main__":
    main()
