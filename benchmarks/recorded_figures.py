"""What docs/performance.md says was measured: its tables are the one record of it.

A figure's key is what was measured and in which measure, say ("cnn", "times Ray"). Of a cell that
says "not measured" the value is None; an empty cell is no figure.
"""

import re
from collections.abc import Iterator
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "docs" / "performance.md"

Key = tuple[str, str]
Recorded = dict[Key, float | None]
Rows = dict[str, dict[str, str]]

UNITS, TIMES_BYZFL, TIMES_FLOWER = "units", "times byzfl", "times Flower"
TIMES_RAY, TIMES_PFL, TIMES_FEDAVG = "times Ray", "times pfl", "times FedAvg"
TIMES_IMPORT, MILLIONS = "times import torch", "million instructions"
# All others are ratios to a peer's time, which get smaller when we get slower.
SMALLER_IS_BETTER = {UNITS, TIMES_IMPORT, MILLIONS}

# The sizes of the aggregation rules that the short form measures, as the page writes them.
SIZES = {"K = 200, d = 2e4": (200, 20_000), "K = 50, d = 1e6": (50, 1_000_000)}
GRPC_DIMENSION = "2e4"
NOT_MEASURED = "not measured"

_ENGINE = (
    *("workload", "s a round", "engine", "Flower's Ray simulation", "pfl, 2 processes"),
    *("times Ray", "times pfl"),
)
_RULES = ("rule", "ours", "units", "MiB", "byzfl", "Flower")
_GRPC = (
    *("d", "persistent", "Flower's programs", "ratio", "FedAvg, quick grid", "ours adds"),
    "FedAvg, Flower's grid",
)
_STARTS = ("command", "times import torch")
_COUNTS = ("rule", "million instructions")


class RecordChanged(ValueError):
    """The page has no longer the table, the column or the number that is looked for."""


def engine_figures(page: str) -> Recorded:
    """How many of the peers' client updates the engine makes, by workload."""
    found = _table(page, "Measured", _ENGINE)
    return {
        (workload, measure): _number(cells[measure])
        for workload, cells in found.items()
        for measure in (TIMES_RAY, TIMES_PFL)
    }


def rule_figures(page: str) -> Recorded:
    """Every aggregation rule in units, and the peers' times by ours."""
    found: Recorded = {}
    for size in SIZES:
        for rule, cells in _table(page, "Aggregation", _RULES, after=f"{size}:").items():
            what = f"{rule}, {size}"
            found[what, UNITS] = _number(cells["units"])
            for peer, measure in (("byzfl", TIMES_BYZFL), ("Flower", TIMES_FLOWER)):
                if cells[peer]:
                    found[what, measure] = _in_brackets(cells[peer])
    return found


def round_figures(page: str) -> Recorded:
    """A round over gRPC: FedAvg's seconds by ours, on the same clients and the quick grid."""
    found = _table(page, "A round over gRPC", _GRPC)
    if GRPC_DIMENSION not in found:
        raise RecordChanged(f"docs/performance.md has no round with d = {GRPC_DIMENSION}")
    cells = found[GRPC_DIMENSION]
    ours, fedavg = _number(cells["persistent"]), _number(cells["FedAvg, quick grid"])
    times = None if ours is None or fedavg is None else fedavg / ours
    return {(f"gRPC round, d = {GRPC_DIMENSION}", TIMES_FEDAVG): times}


def start_figures(page: str) -> Recorded:
    """How long commands take to start, by the time that `import torch` takes."""
    found = _table(page, "How long a start takes", _STARTS)
    return {
        (command, TIMES_IMPORT): _number(cells[TIMES_IMPORT]) for command, cells in found.items()
    }


def count_figures(page: str) -> Recorded:
    """Instructions of one call of an aggregation rule."""
    found = _table(page, "Instructions of the aggregation rules", _COUNTS)
    return {(rule, MILLIONS): _number(cells[MILLIONS]) for rule, cells in found.items()}


def _table(page: str, section: str, columns: tuple[str, ...], after: str = "") -> Rows:
    """The cells of a section's first table, or the first after a line that begins with `after`.

    By the first cell of the row and the column's heading. RecordChanged if the section, the line
    or exactly these columns are not there.
    """
    parts = re.split(r"(?m)^## (.+)\n", page)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    where = f'docs/performance.md, "{section}"'
    if section not in sections:
        raise RecordChanged(f"{where}: there is no such section")
    lines = iter(sections[section].splitlines())
    if after and not any(line.startswith(after) for line in lines):
        raise RecordChanged(f"{where}: no line begins with {after!r}")
    rows = list(_first_table(lines))
    if not rows or tuple(rows[0]) != columns:
        raise RecordChanged(f"{where}: the columns are not {', '.join(columns)}")
    return {row[0]: dict(zip(columns, row, strict=True)) for row in rows[2:]}


def _first_table(lines: Iterator[str]) -> Iterator[list[str]]:
    begun = False
    for line in lines:
        if line.startswith("|"):
            begun = True
            yield [cell.strip() for cell in line.removeprefix("|").removesuffix("|").split("|")]
        elif begun:
            return


def _number(cell: str) -> float | None:
    if cell == NOT_MEASURED:
        return None
    try:
        return float(cell)
    except ValueError:
        raise RecordChanged(f"docs/performance.md: {cell!r} is no number") from None


def _in_brackets(cell: str) -> float | None:
    told = re.fullmatch(r"[\d.]+ ms \(([\d.]+)\)", cell)
    if told is None:
        raise RecordChanged(f"docs/performance.md: {cell!r} is not as in 3.4 ms (1.2)")
    return float(told[1])
