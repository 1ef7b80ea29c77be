"""What a run cannot go on from is one line, and changes nothing; a damaged state is passed over."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from digits_runs import model, summary_of
from real_deployment import COMMAND
from resumed_runs import (
    CLAIM,
    KILLED,
    ROUNDS,
    interrupt,
    killed_copy,
    refused,
    run,
    same_end,
    settings,
)
from rich.console import Console

from blackthorn.launch.commands.simulate import simulate
from blackthorn.recording.line_log import LineLog
from blackthorn.recording.state_files import FOLDER, read_saved
from blackthorn.settings.config import make_config, read_recipe


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [truncate, flip_a_bit])
def test_a_torn_state_is_told_and_the_one_before_is_used(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], None],
) -> None:
    whole, dead = killed_copy(monkeypatch, tmp_path)
    before, newest = sorted((dead / FOLDER).iterdir())
    damage(newest)
    simulate(settings(dead, resume=str(dead)), Console(width=500))
    assert (
        f"the run goes on after round {KILLED - 1}, since {newest.name} cannot be used: damaged"
        in capsys.readouterr().out
    )
    same_end(whole, dead)
    assert summary_of(dead)["resumed_after"] == [KILLED - 1]
    assert before.name.startswith(f"round-0000{KILLED - 1}-")


def test_without_a_whole_state_there_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _, dead = killed_copy(monkeypatch, tmp_path)
    for path in (dead / FOLDER).iterdir():
        flip_a_bit(path)
    refused(dead, "there is no whole state to go on from")
    shutil.rmtree(dead / FOLDER)
    refused(dead, "there is no whole state to go on from")


def test_half_a_state_never_takes_the_place_of_one(tmp_path: Path) -> None:
    """A kill while a state is written leaves its beginning under another name."""
    dead = tmp_path / "dead"

    with pytest.raises(KeyboardInterrupt):
        run(settings(dead), [interrupt])
    half = sorted((dead / FOLDER).iterdir())[-1]
    half.rename(half.with_name(f".{half.name}.part"))
    saved = read_saved(dead)
    assert saved is not None
    assert (saved.state.server_round, saved.damaged) == (KILLED - 1, ())


@pytest.mark.parametrize("older", [None, 1], ids=["missing", "older"])
def test_a_ledger_that_is_behind_the_state_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, older: int | None
) -> None:
    """Going on with it would claim less than the run's models have cost."""
    options: dict[str, Any] = {"algorithm": "dp-fedavg", **CLAIM}
    _, dead = killed_copy(monkeypatch, tmp_path, "before the state", **options)
    ledger = dead / "ledger.json"
    if older is None:
        ledger.unlink()
    else:
        content = json.loads(ledger.read_text())
        content["rounds"] = content["charges"][0]["rounds"] = older
        ledger.write_text(json.dumps(content))
    refused(
        dead, rf"holds {older or 0} rounds of this run, and by what else the run left \d", **options
    )


@pytest.fixture(scope="module")
def died(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed after its third round."""
    with pytest.MonkeyPatch.context() as patch:
        return killed_copy(patch, tmp_path_factory.mktemp("runs"))[1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"local_lr": 0.1}, r"local-lr = 0\.1 \(was 0\.05\)"),
        ({"seed": 1, "num_clients": 5}, r"num-clients = 5 \(was 4\).*seed = 1 \(was 0\)"),
        ({"num_server_rounds": ROUNDS - 1}, r"num-server-rounds = 5 \(was 6, no fewer\)"),
        ({"instruments": False}, "instruments = False"),
        ({"min_replies": 2}, "min-replies = 2"),
    ],
)
def test_what_a_run_computes_cannot_change_under_way(
    died: Path, options: dict[str, Any], words: str
) -> None:
    said = refused(died, words, **options)
    assert "is not allowed with another configuration" in said


def test_more_rounds_and_other_deadlines_are_allowed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _, dead = killed_copy(monkeypatch, tmp_path)
    longer = {"num_server_rounds": ROUNDS + 2}
    other = {**longer, "round_timeout": 7.0, "start_timeout": 8.0, "checkpoint_every": 0}
    run(settings(dead, resume=str(dead), **other))
    run(settings(tmp_path / "at once", **longer))
    np.testing.assert_array_equal(model(dead), model(tmp_path / "at once"))
    assert summary_of(dead)["rounds_completed"] == ROUNDS + 2


@pytest.mark.parametrize(
    "options",
    [
        {"output_iterate": "uniform"},
        {"output_iterate": "uniform-average"},
        {"algorithm": "dp-fedavg", **CLAIM, "noise_multiplier": 0.0, "epsilon": 50.0},
    ],
)
def test_rounds_that_something_was_drawn_or_calibrated_for_stay(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: dict[str, Any]
) -> None:
    _, dead = killed_copy(monkeypatch, tmp_path, **options)
    more = {**options, "num_server_rounds": ROUNDS + 1}
    refused(dead, r"num-server-rounds = 7 \(was 6, which .* fixed\)", **more)


def test_no_run_another_folder_or_no_states_are_refused(tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    assert "there is no run" in refused(nowhere, "there is no run")
    refused(nowhere, "there is no run", output_dir=str(tmp_path))
    refused(nowhere, "File name too long", resume="x" * 300, output_dir="")

    with pytest.raises(KeyboardInterrupt):
        run(settings(nowhere, state_every=0), [interrupt])
    refused(nowhere, "state-every = 0", state_every=0)
    own = f"the run goes on in its own folder; set output-dir = {nowhere}"
    refused(nowhere, own, state_every=0, output_dir=str(tmp_path))


def test_a_run_that_has_not_ended_is_refused(died: Path) -> None:
    log = LineLog(died / "metrics.jsonl", alone=True)
    try:
        refused(died, "the folder is in use by a run that has not ended")
    finally:
        log.close()


def test_a_run_that_is_completed_is_one_line_and_exit_status_2(tmp_path: Path) -> None:
    run(settings(tmp_path / "run", num_server_rounds=1))
    refused(tmp_path / "run", r"the run is completed \(1 rounds\)")
    recipe = tmp_path / "run" / "config.toml"
    done = subprocess.run(
        [*COMMAND, "simulate", str(recipe), "--set", f"resume={tmp_path / 'run'}"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        f"error: resume = {tmp_path / 'run'} is not allowed: the run is completed (1 rounds)"
    ]


def test_the_recipe_that_a_run_leaves_is_enough_to_go_on(died: Path, tmp_path: Path) -> None:
    folder = tmp_path / "moved"
    shutil.copytree(died, folder)
    recipe = {**read_recipe(folder / "config.toml"), "output-dir": "", "resume": str(folder)}
    run(make_config(recipe))
    assert summary_of(folder)["rounds_completed"] == ROUNDS
