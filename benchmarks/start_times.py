"""How long commands take to start, beside the import of PyTorch.

    python -m benchmarks.start_times [--turns 3]

`blackthorn --help` must not import it; a simulation does. Its process is timed to the end of the
demo's first round, its only one here, without a report.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from blackthorn.installation import APP_ROOT

_RECIPE = Path("recipes") / "demo.toml"
# As docs/performance.md writes them.
HELP, DEMO = "`blackthorn --help`", f"`blackthorn simulate {_RECIPE}`, its first round"
_LIMIT_SECONDS = 300.0


def commands(folder: Path) -> dict[str, list[str]]:
    """What is timed, by its name in docs/performance.md; a run goes to `folder`."""
    settings = ("num-server-rounds=1", "report=false", "tensorboard=false", f"output-dir={folder}")
    simulate = ["simulate", str(APP_ROOT / _RECIPE)]
    options = [word for setting in settings for word in ("--set", setting)]
    return {
        HELP: ["-m", "blackthorn", "--help"],
        DEMO: ["-m", "blackthorn", *simulate, *options],
    }


def times_import(turns: int) -> dict[str, float]:
    """Seconds of each command by those of `import torch`: the median of as many turns.

    CalledProcessError if a command fails.
    """
    ratios: dict[str, list[float]] = {}
    for _ in range(turns):
        with tempfile.TemporaryDirectory(prefix="blackthorn-starts-") as folder:
            unit = _seconds(["-c", "import torch"])
            for name, words in commands(Path(folder) / "run").items():
                ratios.setdefault(name, []).append(_seconds(words) / unit)
    return {name: statistics.median(values) for name, values in ratios.items()}


def _seconds(words: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, *words], capture_output=True, timeout=_LIMIT_SECONDS, check=True
    )
    return time.perf_counter() - began


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--turns", type=int, default=3)
    found = times_import(parser.parse_args().turns)
    table = Table("command", "times import torch", title=f"{datetime.now(UTC):%Y-%m-%d}")
    for name, times in found.items():
        table.add_row(name, f"{times:.2f}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
