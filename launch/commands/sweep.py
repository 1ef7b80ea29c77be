"""`blackthorn sweep`: a recipe with every combination of some keys' values, over several seeds.

The runs' folders are what is remembered: one whose summary says completed is not run again, one
that was cut off goes on from its last state.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from rich.console import Console

from blackthorn.experiments.runner import executor
from blackthorn.launch.commands.progress import reached, time_left
from blackthorn.launch.commands.simulate import simulate
from blackthorn.launch.commands.sweep_plan import SweepRun, plan
from blackthorn.launch.commands.sweep_results import Sweep, write_results
from blackthorn.recording.failure_reason import RunFailed, reason_of
from blackthorn.recording.folder_place import set_aside
from blackthorn.recording.line_log import LineLog
from blackthorn.recording.state_files import read_saved
from blackthorn.settings.config import ConfigError
from blackthorn.settings.privacy_checks import claims_privacy
from blackthorn.strategies import NotEnoughClients
from blackthorn.strategies.run_state import NotEnoughReplies

LOCK = "sweep.lock"


def sweep(
    recipe: Path,
    choices: Mapping[str, Sequence[Any]],
    seeds: int,
    processes: int,
    folder: Path | None,
    console: Console,
) -> Sweep:
    """Run the recipe with every combination of the keys' values and `seeds` seeds, the recipe's and
    those after it, in so many `processes`; see the module. `folder` None: runs/sweep-RECIPE.

    Raises ConfigError, one line, before anything has begun.
    """
    if processes < 1:
        raise ConfigError(f"--processes {processes} is not allowed: at least 1")
    folder = folder or Path("runs") / f"sweep-{recipe.stem}"
    runs = plan(recipe, choices, seeds, folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = LineLog(folder / LOCK, alone=True)
    except OSError as error:
        raise ConfigError(f"output-dir = {folder} cannot be written: {error.strerror}") from None
    with contextlib.closing(lock):
        failed = _run_all(runs, processes, folder, console)
    done = Sweep(folder, runs, failed)
    write_results(done, recipe.stem)
    return done


def _run_all(
    runs: Sequence[SweepRun], processes: int, folder: Path, console: Console
) -> dict[str, str]:
    """Run those that have not completed; why others failed, by their folders' names."""
    waiting = [run for run in runs if run.summary is None]
    # As of a run alone: how long rounds took is the operator's to know.
    timed = not any(claims_privacy(run.config) for run in runs)
    before, began, failed = len(runs) - len(waiting), time.monotonic(), {}
    console.print(_begins(len(runs), before, folder), markup=False, highlight=False, soft_wrap=True)
    try:
        for count, (run, reason) in enumerate(_results(waiting, processes), 1):
            if reason:
                failed[run.folder.name] = reason
            ended = f"failed: {reason}" if reason else f"completed{_reached(run)}"
            line = f"{before + count}/{len(runs)}  {run.said}: {ended}"
            if timed:
                left = (time.monotonic() - began) / count * (len(waiting) - count)
                line += f"  left {time_left(left)}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    except BrokenProcessPool as error:
        raise RunFailed(
            f"a process of the sweep was killed; what has completed is in {folder}, and the same "
            "command goes on (with fewer --processes, where memory was short)"
        ) from error
    except (KeyboardInterrupt, SystemExit):
        told = f"Stopped. What has completed is in {folder}: the same command goes on."
        console.print(told, markup=False, highlight=False, soft_wrap=True)
        raise
    return failed


def _begins(total: int, before: int, folder: Path) -> str:
    kept = f", {before} of them completed before" if before else ""
    return f"{total} runs{kept}, in {folder}"


def _reached(run: SweepRun) -> str:
    summary = run.summary
    return "" if summary is None else reached(summary["final"])


def _results(waiting: Sequence[SweepRun], processes: int) -> Iterator[tuple[SweepRun, str]]:
    """Every run as it ends, and why it failed (empty: it did not)."""
    if not waiting:
        return
    left = list(waiting)
    running: dict[Future[str], SweepRun] = {}
    with executor(min(processes, len(left))) as pool:
        while left or running:
            while left and len(running) < processes:
                run = left.pop(0)
                running[pool.submit(_run_one, run)] = run
            ended, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in ended:
                yield running.pop(future), future.result()


def _run_one(run: SweepRun) -> str:
    """In a process of the pool: the run from where it stands; why it failed, if it did."""
    goes_on = _stands(run.folder)
    if not goes_on:
        set_aside(run.folder)
    place = {"resume": str(run.folder)} if goes_on else {"output_dir": str(run.folder)}
    try:
        simulate(run.config.model_copy(update=place), Console(quiet=True))
    except (RunFailed, NotEnoughClients, NotEnoughReplies, ConfigError, OSError) as error:
        return " ".join(reason_of(error, run.config).split()) or type(error).__name__
    return ""


def _stands(folder: Path) -> bool:
    """Whether a run in the folder was cut off and can go on."""
    try:
        saved = read_saved(folder) if folder.exists() else None
    except (OSError, ValueError):
        return False
    return saved is not None and 0 < saved.state.server_round < saved.config["num-server-rounds"]
