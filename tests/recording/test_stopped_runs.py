"""A run that is stopped (Ctrl-C, SIGTERM) leaves a state of its last whole round: what it has done
is neither done nor charged again. Inside a round it leaves none, since half a state would be wrong.
"""

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from charged_ledgers import rounds_in
from digits_runs import configuration, model
from killed_runs import seed_entropy
from rich.console import Console

from blackthorn.flower_port.transports import Transport
from blackthorn.launch.commands.simulate import simulate
from blackthorn.recording import run_states
from blackthorn.recording.run_folder import read_summary
from blackthorn.recording.state_files import read_saved
from blackthorn.strategies import rounds
from blackthorn.strategies.durable_file import LockedFile
from blackthorn.strategies.global_model import GlobalModel
from blackthorn.strategies.ledger import Ledger
from blackthorn.strategies.messages import Asked
from blackthorn.strategies.reports import RoundReport

ROUNDS, STOPPED = 5, 4
CLAIM: dict[str, Any] = {
    "algorithm": "dp-normfedavg",
    "noise_multiplier": 0.7,
    "clip_norm": 2.0,
    "participation": "poisson",
    "sample_rate": 0.5,
    "instruments": False,
    "num_server_rounds": ROUNDS,
}
PLAIN: dict[str, Any] = {"num_server_rounds": ROUNDS, "server_momentum": 0.9}


@pytest.fixture(autouse=True)
def only_the_first_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a run whose rounds are quick beside the time between two states."""
    monkeypatch.setattr(run_states, "STATE_SECONDS", 600.0)


def run(folder: Path, **options: Any) -> None:
    simulate(configuration(folder, **options), Console(quiet=True))


def stop_while_replies_are_awaited(patch: pytest.MonkeyPatch) -> None:
    collect = rounds.collect

    def collect_or_stop(transport: Transport, asked: Asked, *arguments: Any) -> Any:
        if asked.server_round == STOPPED:
            raise KeyboardInterrupt
        return collect(transport, asked, *arguments)

    patch.setattr(rounds, "collect", collect_or_stop)


def stop_when_charged(patch: pytest.MonkeyPatch) -> None:
    charge = Ledger.charge

    def charge_and_stop(ledger: Ledger, release: Any) -> None:
        charge(ledger, release)
        if ledger.rounds == STOPPED:
            raise SystemExit(128 + signal.SIGTERM)

    patch.setattr(Ledger, "charge", charge_and_stop)


def stop_when_the_model_has_moved(patch: pytest.MonkeyPatch) -> None:
    step, steps = GlobalModel.step, []

    def step_and_stop(*arguments: Any) -> None:
        step(*arguments)
        steps.append(arguments)
        if len(steps) == STOPPED:
            raise KeyboardInterrupt

    patch.setattr(GlobalModel, "step", step_and_stop)


def stop_before_the_charge_is_on_disk(patch: pytest.MonkeyPatch) -> None:
    replace, writes = LockedFile.replace, []

    def replace_or_stop(file: LockedFile, data: bytes) -> None:
        writes.append(data)
        # The first one begins the ledger.
        if len(writes) == STOPPED + 1:
            raise KeyboardInterrupt
        replace(file, data)

    patch.setattr(LockedFile, "replace", replace_or_stop)


def stopped(folder: Path, how: Callable[[pytest.MonkeyPatch], None], **options: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        how(patch)
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            run(folder, **options)
    assert (read_summary(folder) or {})["status"] == "failed"


@pytest.mark.parametrize("options", [CLAIM, PLAIN], ids=["claim", "momentum"])
def test_what_was_done_is_not_done_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: dict[str, Any]
) -> None:
    seed_entropy(monkeypatch)
    whole, folder = tmp_path / "whole", tmp_path / "run"
    run(whole, **options)
    stopped(folder, stop_while_replies_are_awaited, **options)
    run(folder, resume=str(folder), **options)
    summary = read_summary(folder)
    assert summary is not None
    assert (summary["status"], summary["resumed_after"]) == ("completed", [STOPPED - 1])
    np.testing.assert_array_equal(model(whole), model(folder))
    if options is CLAIM:
        assert rounds_in(folder / "ledger.json") == ROUNDS
        assert summary["privacy"]["rounds_charged"] == ROUNDS


@pytest.mark.parametrize("how", [stop_when_charged, stop_when_the_model_has_moved])
def test_half_a_round_leaves_no_state(
    tmp_path: Path, how: Callable[[pytest.MonkeyPatch], None]
) -> None:
    """The ledger holds a round that the model has not had, or the other way round."""
    stopped(tmp_path / "run", how, **CLAIM)
    assert rounds_in(tmp_path / "run" / "ledger.json") == STOPPED
    saved = read_saved(tmp_path / "run")
    assert saved is not None
    assert saved.state.server_round == 0
    run(tmp_path / "run", resume=str(tmp_path / "run"), **CLAIM)
    assert rounds_in(tmp_path / "run" / "ledger.json") == STOPPED + ROUNDS


def test_a_charge_that_did_not_reach_the_disk_is_none(tmp_path: Path) -> None:
    """Nothing was released for it, and the summary would ask the ledger for it at a resume."""
    folder = tmp_path / "run"
    stopped(folder, stop_before_the_charge_is_on_disk, **CLAIM)
    summary = read_summary(folder)
    assert summary is not None
    assert summary["privacy"]["rounds_charged"] == rounds_in(folder / "ledger.json") == STOPPED - 1
    run(folder, resume=str(folder), **CLAIM)
    assert (read_summary(folder) or {})["privacy"]["rounds_charged"] >= STOPPED - 1 + ROUNDS


def test_an_observer_that_was_stopped_has_not_seen_the_round(tmp_path: Path) -> None:
    def stop(report: RoundReport) -> None:
        if report.server_round == STOPPED:
            raise KeyboardInterrupt

    config = configuration(tmp_path, **PLAIN)
    with pytest.raises(KeyboardInterrupt):
        simulate(config, Console(quiet=True), observers=[stop])
    saved = read_saved(tmp_path)
    assert saved is not None
    assert saved.state.server_round == 0


def test_a_client_is_not_taken_to_have_sent_more_than_it_was_asked_for(tmp_path: Path) -> None:
    """The round under way when the run was stopped is counted once, and done again."""
    options = {**CLAIM, "noise_location": "client"}
    stopped(tmp_path, stop_while_replies_are_awaited, **options)
    run(tmp_path, resume=str(tmp_path), **options)
    summary = read_summary(tmp_path)
    assert summary is not None
    assert summary["privacy"]["local"]["rounds"] == ROUNDS + 1


def test_without_states_none_is_left(tmp_path: Path) -> None:
    stopped(tmp_path, stop_while_replies_are_awaited, **PLAIN, state_every=0)
    assert not (tmp_path / "state").exists()


# An attacker who, in the fourth round, has the process told to stop.
STOPS = """
import os, signal
calls = []

def stop(own, *, num_clients, generator, honest=None):
    calls.append(own)
    if len(calls) == 4:
        os.kill(os.getpid(), signal.{name})
    return own
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_the_state_of_the_last_whole_round(
    repository: Path, tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "own.py").write_text(STOPS.format(name=number.name))
    settings = [f"attack={tmp_path}/own.py:stop", "num-byzantine=1", "state-every=1000"]
    command = [sys.executable, "-m", "blackthorn", "simulate", "recipes/demo.toml", "--quiet"]
    command += [part for setting in settings for part in ("--set", setting)]
    command += ["--output-dir", str(tmp_path / "run")]
    stopped = subprocess.run(command, cwd=repository, capture_output=True, timeout=120)
    assert stopped.returncode == 128 + number
    saved = read_saved(tmp_path / "run")
    assert saved is not None
    assert saved.state.server_round == STOPPED - 1
