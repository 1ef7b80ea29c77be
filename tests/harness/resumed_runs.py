"""Runs that go on after their server's death.

The run folder is copied while an uninterrupted run is under way: the copy is what is left when
the server is killed at that instant.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from digits_runs import configuration, summary_of
from rich.console import Console
from safetensors.numpy import load_file

from blackthorn.launch.commands.simulate import simulate
from blackthorn.recording import run_states
from blackthorn.recording.state_files import Saved
from blackthorn.server_app.run import prepare
from blackthorn.settings.config import ConfigError, RunConfig
from blackthorn.strategies.reports import RoundReport

ROUNDS, KILLED = 6, 3

Moment = str
MOMENTS = ("before the state", "after the state", "after the round")

SMALL = {
    "num_server_rounds": ROUNDS,
    "batch_size": 8,
    "local_lr": 0.05,
    "checkpoint_every": 2,
    "state_every": 1,
}
NOISED = {"noise_multiplier": 0.7, "clip_norm": 2.0, "instruments": False}
CLAIM = {**NOISED, "participation": "poisson", "sample_rate": 0.5}


def settings(folder: Path, **options: Any) -> RunConfig:
    """The configuration of a small run with a state after every round."""
    return configuration(folder, **{**SMALL, **options})


def run(config: RunConfig, observers: Sequence[Callable[[RoundReport], None]] = ()) -> None:
    """A run in this process that says nothing."""
    simulate(config, Console(quiet=True), observers=observers)


def killed_copy(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    moment: Moment = "after the round",
    after: int = KILLED,
    **options: Any,
) -> tuple[Path, Path]:
    """An uninterrupted run's folder, and what it was at the `moment` of round `after`."""
    whole, dead = tmp_path / "whole", tmp_path / "dead"

    def copy() -> None:
        shutil.copytree(whole, dead)

    real = run_states.write_saved

    def write(path: Path, saved: Saved) -> None:
        it_is_time = saved.state.server_round == after
        if it_is_time and moment == "before the state":
            copy()
        real(path, saved)
        if it_is_time and moment == "after the state":
            copy()

    def see(report: RoundReport) -> None:
        if report.server_round == after and moment == "after the round":
            copy()

    with monkeypatch.context() as patch:
        patch.setattr(run_states, "write_saved", write)
        run(settings(whole, **options), [see])
    assert dead.exists()
    if (dead / "ledger.json").exists():
        # The copy of a ledger is not continued beside its original.
        whole = whole.rename(tmp_path / "ended")
    return whole, dead


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    """The lines of a file, apart from times."""
    path = folder / name
    if not path.exists():
        return []
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in found]


def same_end(one: Path, other: Path) -> None:
    """Bit for bit the same models and samples, and the same lines."""
    for pattern in ("checkpoints/*", "posterior/slot-*"):
        names = sorted(path.relative_to(one) for path in one.glob(pattern))
        assert names == sorted(path.relative_to(other) for path in other.glob(pattern))
        for path in names:
            states = load_file(one / path), load_file(other / path)
            for key, value in states[0].items():
                np.testing.assert_array_equal(value, states[1][key], strict=True)
    for name in ("metrics.jsonl", "operator.jsonl", "clients.jsonl"):
        assert lines(one, name) == lines(other, name)
    apart = {"wall_seconds", "resumed_after"}
    ends = [{k: v for k, v in summary_of(f).items() if k not in apart} for f in (one, other)]
    for end in ends:
        # One of the two is a copy, of what has been moved away.
        end["warnings"] = [line for line in end["warnings"] if "was elsewhere before" not in line]
    assert ends[0] == ends[1]


def interrupt(report: RoundReport) -> None:
    """Observer that stops the run after round KILLED."""
    if report.server_round == KILLED:
        raise KeyboardInterrupt


def refused(folder: Path, words: str, **options: Any) -> str:
    """Resuming is refused with `words` in one line, and changes nothing."""
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=words) as caught:
        prepare(settings(folder, **{"resume": str(folder), **options}))
    said = str(caught.value)
    assert "\n" not in said
    assert said.startswith(("resume = ", "output-dir = "))
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return said
