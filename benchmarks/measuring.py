"""Time and peak memory of a function, each in a process of its own, so that none leaves a trace."""

import gc
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

# Longer than any of the functions measured takes.
_LIMIT_SECONDS = 900.0


@dataclass(frozen=True)
class Measurement:
    """Median seconds of a call, and the MiB that the process grew by while it ran."""

    seconds: float
    extra_mib: float


def measure(make: Callable[[], Callable[[], object]], repeats: int) -> Measurement:
    """Measure the function that `make` returns, in a forked process that may see our memory.

    One call more than `repeats` is made, and the first does not count. What `make` builds for a
    call, before each of them, counts for neither time nor memory. RuntimeError if the process
    dies.
    """
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_run, args=(sender, make, repeats))
    process.start()
    sender.close()
    try:
        if not receiver.poll(_LIMIT_SECONDS):
            raise RuntimeError(f"no result within {_LIMIT_SECONDS:.0f} seconds")
        seconds, extra_mib = receiver.recv()
    except EOFError:
        raise RuntimeError("the measured process has died") from None
    finally:
        process.kill()
        process.join()
    return Measurement(seconds, extra_mib)


def _run(sender: Connection, make: Callable[[], Callable[[], object]], repeats: int) -> None:
    # A peer may collect garbage for every array: not that of the modules imported here.
    gc.freeze()
    sender.send((statistics.median(_timed(make, repeats)), _growth(make)))


def _timed(make: Callable[[], Callable[[], object]], repeats: int) -> Iterator[float]:
    for repeat in range(repeats + 1):
        call = make()
        began = time.perf_counter()
        call()
        if repeat > 0:
            yield time.perf_counter() - began


def _growth(make: Callable[[], Callable[[], object]]) -> float:
    """MiB by which the largest resident set during a call exceeds the one before it (Linux)."""
    call = make()
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the largest resident set so far
    result = call()
    growth = _status("VmHWM") - before
    del result
    return max(0.0, growth / 1024)


def _status(key: str) -> int:
    """A number of KiB from /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1])
    raise KeyError(key)
