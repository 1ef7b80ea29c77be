"""How many instructions one call of each aggregation rule is, counted by Valgrind.

    python -m benchmarks.instruction_counts

A count depends neither on the machine's speed nor on what else runs there, and hardly on the
processor: Valgrind shows programs one that has AVX2 and nothing newer, whatever is beneath. With
perf a count is that of the processor's own kernels, and many virtual machines have no counters.

The matrix products are those of processors without fused multiplication and addition, which
Valgrind imitates a number at a time: seconds become minutes.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.aggregation_workload import draw_updates

NUM_ROWS, DIMENSION = 200, 20_000
_ENVIRONMENT = {
    # Neither threads nor the order of a set may change the count.
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    # PyTorch's and SciPy's products without fused multiplication and addition.
    "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
    "OPENBLAS_CORETYPE": "Sandybridge",
}
# Under Valgrind importing PyTorch takes half a minute, and what Numba has to compile minutes.
_LIMIT_SECONDS = 900.0
_REQUEST = "Client Request: "


class NotCounted(Exception):
    """Nothing here counts instructions; the message says why in one line."""


def counts(num_rows: int = NUM_ROWS, dimension: int = DIMENSION) -> dict[str, int]:
    """Instructions of one call by rule, in one thread, of updates [num_rows, dimension].

    NotCounted without Valgrind, or on a processor other than x86-64; RuntimeError if it fails.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        raise NotCounted("only on x86-64, in whose instructions Valgrind is asked to count")
    if shutil.which("valgrind") is None:
        raise NotCounted("valgrind is not installed")
    with tempfile.TemporaryDirectory(prefix="blackthorn-counts-") as folder:
        updates, told = Path(folder) / "updates.npy", Path(folder) / "callgrind.out"
        np.save(updates, draw_updates(num_rows, dimension, num_rows // 8))
        command = ["valgrind", "--tool=callgrind", "--instr-atstart=no"]
        command += [f"--callgrind-out-file={told}", sys.executable]
        done = subprocess.run(
            [*command, "-m", "benchmarks.counted_rules", str(updates)],
            env={**os.environ, **_ENVIRONMENT},
            capture_output=True,
            text=True,
            timeout=_LIMIT_SECONDS,
            check=False,
        )
        dumps = sorted(Path(folder).glob("callgrind.out.*"), key=lambda path: int(path.suffix[1:]))
        found = read_counts(path.read_text() for path in dumps)
    if done.returncode or not found:
        raise RuntimeError(f"valgrind ended with {done.returncode}: {done.stderr[-500:]}")
    return found


def read_counts(dumps: Iterable[str]) -> dict[str, int]:
    """The counts that Callgrind's files tell, by the name with which each was asked for."""
    found = {}
    for dump in dumps:
        name = re.search(rf"(?m)^desc: Trigger: {_REQUEST}(.+)$", dump)
        total = re.search(r"(?m)^summary: (\d+)", dump)
        if name and total:
            found[name[1]] = int(total[1])
    return found


def main() -> None:
    """Print the table, or why there is none: exit code 1."""
    console = Console(width=120)
    try:
        found = counts()
    except NotCounted as error:
        console.print(f"not counted: {error}")
        sys.exit(1)
    size = f"K = {NUM_ROWS}, d = {DIMENSION:.0e}"
    title = f"{datetime.now(UTC):%Y-%m-%d}, {size}, torch {torch.__version__}"
    table = Table("rule", "million instructions", title=title)
    for rule, count in found.items():
        table.add_row(rule, f"{count / 1e6:.1f}")
    console.print(table)


if __name__ == "__main__":
    main()
