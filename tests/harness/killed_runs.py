"""Private runs of this process that die, go on in their folder, and share ledgers."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from digits_runs import PRIVATE, configuration
from rich.console import Console

from blackthorn.launch.commands.simulate import simulate
from blackthorn.randomness import Stream
from blackthorn.recording import run_states
from blackthorn.recording.state_files import Saved
from blackthorn.strategies import ClipNorm, Ledger, PoissonParticipation, PrivacyPlan
from blackthorn.strategies.noise import SeededRandomness
from blackthorn.strategies.options import Observer
from blackthorn.strategies.private_averaging import PrivateAveraging
from blackthorn.strategies.reports import RoundReport

ROUNDS = 5
NOISED: dict[str, Any] = {**PRIVATE, "num_server_rounds": ROUNDS, "state_every": 1}
BUDGET = {**NOISED, "noise_multiplier": 0.0, "epsilon": 3.0}


class Killed(BaseException):
    """The server dies: nothing catches it, as nothing outlives SIGKILL."""


def start(folder: Path, options: dict[str, Any], console: Console | None = None) -> dict[str, Any]:
    """The summary of a run of these options."""
    return simulate(configuration(folder, **options), console or Console(quiet=True))


def resume(folder: Path, options: dict[str, Any], console: Console | None = None) -> dict[str, Any]:
    """The summary of the run in `folder`, which goes on to its end."""
    return start(folder, {**options, "resume": str(folder)}, console)


def kill(folder: Path, options: dict[str, Any], at: int, again: bool = False) -> None:
    """A run, or a resumed one, that dies when round `at` is released and before its state is on
    disk: the round is charged, and will be done again."""
    real = run_states.write_saved

    def write(path: Path, saved: Saved) -> None:
        if saved.state.server_round == at:
            raise Killed
        real(path, saved)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_states, "write_saved", write)
        with pytest.raises(Killed):
            (resume if again else start)(folder, options)
    # SIGKILL leaves no time to write one.
    (folder / "summary.json").unlink()


def die_after(
    last: int,
    folder: Path,
    options: dict[str, Any],
    again: bool = False,
    observers: Sequence[Observer] = (),
) -> None:
    """A run, or a resumed one, that is killed when round `last` is on record: as SIGKILL leaves it,
    without a summary, and without its having been there."""

    def die(report: RoundReport) -> None:
        if report.server_round == last:
            raise Killed

    options = {**options, "resume": str(folder)} if again else options
    with pytest.raises(Killed):
        simulate(configuration(folder, **options), Console(quiet=True), observers=[*observers, die])
    before = folder.stat()
    (folder / "summary.json").unlink()
    os.utime(folder, ns=(before.st_atime_ns, before.st_mtime_ns))


def put_back(ledger: Path, rounds: int) -> None:
    """An older copy of the ledger, which held only `rounds`."""
    content = json.loads(ledger.read_text())
    content["rounds"] = content["charges"][0]["rounds"] = rounds
    ledger.write_text(json.dumps(content))


def other_run(path: Path, rounds: int, z: float = 2.0) -> None:
    """Another run that charges the ledger."""
    plan = PrivacyPlan(ClipNorm(1.0), z, 4, rounds, PoissonParticipation(0.5))
    ledger = Ledger(plan, path)
    for _ in range(rounds):
        ledger.charge(plan.release())
    ledger.close()


def seed_entropy(patch: pytest.MonkeyPatch) -> None:
    """Noise by a seed in the place of the operating system's, so that two runs can be compared."""

    def randomness(strategy: object, server_round: int, stream: Stream) -> SeededRandomness:
        del strategy
        return SeededRandomness(stream, 11, server_round)

    patch.setattr(PrivateAveraging, "_randomness", randomness)
