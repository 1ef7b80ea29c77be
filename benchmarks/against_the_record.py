"""Are we slower than docs/performance.md says? Every figure in its short form, beside the page's.

    python -m benchmarks.against_the_record [--only engine,rules,rounds,starts,instructions]

Times are compared as ratios to a peer, or to a unit of work, in the same run: the machine's own
speed changes. A figure is marked that is worse than the page's by more than `FACTOR`, and one of
the page's that could not be measured though nothing is missing. Exit code 1 if any is.
"""

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from multiprocessing import get_context
from typing import TypeVar

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import recorded_figures, short_forms
from benchmarks.instruction_counts import NotCounted
from benchmarks.recorded_figures import MILLIONS, PAGE, SMALLER_IS_BETTER, Key, Recorded
from benchmarks.short_forms import Measured
from blackthorn.tasks.datasets import DataUnavailable

# A machine changes its speed by half within minutes, for one program more than for another.
FACTOR = 1.5
# Instructions are the same in every run to a hundredth; other versions of PyTorch take others.
FACTOR_OF_INSTRUCTIONS = 1.1

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Piece:
    """Figures that are measured together: what the page says of them, and their short form."""

    recorded: Callable[[str], Recorded]
    measure: Callable[[], Measured]


def apart(measure: Callable[[], _Result]) -> _Result:
    """Measure in a new process, which raises here what it raised there.

    The rules are timed in forked processes, in which PyTorch hangs where the one that forks has
    computed with threads: nothing that another piece did may be in it.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(measure).result()


PIECES = {
    "engine": Piece(recorded_figures.engine_figures, partial(apart, short_forms.engine)),
    "rules": Piece(recorded_figures.rule_figures, partial(apart, short_forms.rules)),
    "rounds": Piece(recorded_figures.round_figures, partial(apart, short_forms.rounds)),
    "starts": Piece(recorded_figures.start_figures, partial(apart, short_forms.starts)),
    "instructions": Piece(recorded_figures.count_figures, partial(apart, short_forms.instructions)),
}


@dataclass(frozen=True)
class Line:
    """One figure: now (a text says why there is none; None: it failed), and on the page."""

    key: Key
    now: float | str | None
    recorded: float | None

    @property
    def times_worse(self) -> float | None:
        """How many times worse than the page's; None if there is nothing to compare."""
        if not isinstance(self.now, float) or self.recorded is None:
            return None
        better, worse = self.recorded, self.now
        return worse / better if self.key[1] in SMALLER_IS_BETTER else better / worse

    @property
    def mark(self) -> str:
        """What is wrong with it, or nothing."""
        allowed = FACTOR_OF_INSTRUCTIONS if self.key[1] == MILLIONS else FACTOR
        if self.now is None:
            return "failed"
        return "slower" if (self.times_worse or 0.0) > allowed else ""

    def cells(self) -> list[str]:
        """A row of the table."""
        now = f"{self.now:.2f}" if isinstance(self.now, float) else self.now or "-"
        recorded = "not measured" if self.recorded is None else f"{self.recorded:.2f}"
        worse = "" if self.times_worse is None else f"{self.times_worse:.2f}"
        return [*self.key, now, recorded, worse, self.mark]


def lines(recorded: Recorded, measured: Measured) -> list[Line]:
    """Every figure of the page, and those measured beside."""
    keys = dict.fromkeys([*recorded, *measured])
    return [Line(key, measured.get(key), recorded.get(key)) for key in keys]


def compared(piece: Piece, page: str) -> list[Line]:
    """Measure a piece. What goes wrong in it is printed, and does not keep others from a row.

    RecordChanged if the page has not got its tables.
    """
    recorded = piece.recorded(page)
    try:
        return lines(recorded, piece.measure())
    except (NotCounted, DataUnavailable) as error:
        return lines(recorded, dict.fromkeys(recorded, f"not measured: {error}"))
    except Exception:
        traceback.print_exc()
        return lines(recorded, {})


def table_of(found: list[Line]) -> Table:
    """All figures, those that are marked in red."""
    table = Table(
        caption=f"worse: times; allowed {FACTOR}, of instructions {FACTOR_OF_INSTRUCTIONS}"
    )
    for heading in ("figure", "measure", "now", "docs/performance.md", "worse", ""):
        left = heading in ("figure", "measure", "")
        table.add_column(heading, justify="left" if left else "right")
    for line in found:
        table.add_row(*line.cells(), style="red" if line.mark else "")
    return table


def main() -> None:
    """Print the table; exit code 1 if a figure is marked."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--only", default=",".join(PIECES), help="pieces, separated by commas")
    names = parser.parse_args().only.split(",")
    if unknown := set(names) - set(PIECES):
        parser.error(f"there is no {', '.join(sorted(unknown))}: {', '.join(PIECES)}")
    page, console, found = PAGE.read_text(encoding="utf-8"), Console(width=140), []
    console.print(
        f"{datetime.now(UTC):%Y-%m-%d}, {os.cpu_count()} cores, torch {torch.__version__}, "
        f"load {os.getloadavg()[0]:.1f} before the start"
    )
    for name in names:
        began = time.perf_counter()
        found += compared(PIECES[name], page)
        console.print(f"{name}: {time.perf_counter() - began:.0f} s")
    console.print(table_of(found))
    if marked := [line for line in found if line.mark]:
        console.print(f"{len(marked)} of {len(found)} figures are marked")
        sys.exit(1)


if __name__ == "__main__":
    main()
