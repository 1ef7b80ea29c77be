"""A run whose clients take turns dies and goes on: no round has two noises, and none is charged
twice."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from charged_ledgers import read_charges
from digits_runs import configuration, model
from killed_runs import Killed, kill, resume, start

from blackthorn.recording.run_folder import read_metrics
from blackthorn.recording.state_files import FOLDER
from blackthorn.server_app.run import prepare
from blackthorn.settings.config import ConfigError
from blackthorn.strategies import Release
from blackthorn.strategies.ledger import Ledger
from blackthorn.strategies.noise_record import NoiseRecord, Recorded, noise_file

TURNS: dict[str, Any] = {
    "algorithm": "dp-fedavg",
    "clip_norm": 1.0,
    "noise_multiplier": 2.0,
    "participation": "rotating",
    "bands": 2,
    "instruments": False,
    "num_server_rounds": 5,
    "state_every": 1,
    "checkpoint_every": 1,
}


def charges(folder: Path) -> list[tuple[Release, int]]:
    return read_charges(folder / "ledger.json")


@pytest.mark.parametrize("banded", [True, False])
@pytest.mark.parametrize("every", [1, 2])
def test_a_round_that_is_done_again_is_the_same_release(
    tmp_path: Path, banded: bool, every: int
) -> None:
    options = {**TURNS, "banded_noise": banded, "state_every": every}
    real = Ledger.charge

    def charge(ledger: Ledger, release: Release) -> None:
        # Its noise and the release itself are on disk before it is charged, and it is seen after.
        assert noise_file(tmp_path / FOLDER, ledger.rounds + 1).exists()
        real(ledger, release)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ledger, "charge", charge)
        kill(tmp_path, options, at=4)
        files = [*(tmp_path / FOLDER).glob("noise-*")]
        assert files
        assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
        recorded = NoiseRecord(2, tmp_path / FOLDER).released(4)
        before = {t: model(tmp_path, f"round-{t:05d}") for t in range(1, 4)}
        summary = resume(tmp_path, options)
    for t, kept in before.items():
        np.testing.assert_array_equal(model(tmp_path, f"round-{t:05d}"), kept)
    assert recorded is not None
    moved = before[3] - model(tmp_path, "round-00004")
    np.testing.assert_allclose(moved, 0.1 * recorded.vector, atol=1e-5)
    ((release, rounds),) = charges(tmp_path)
    assert (release.groups, rounds) == (2, 5)
    assert summary["privacy"]["groups"] == 2
    assert summary["privacy"]["noise_bands"] == (2 if banded else 1)
    assert read_metrics(tmp_path)[-1]["rounds_charged"] == 5
    # Nobody needs the noises any more.
    assert not (tmp_path / FOLDER).exists()


def test_a_death_between_record_and_charge_charges_the_recorded_release(tmp_path: Path) -> None:
    real = Ledger.charge

    def die(ledger: Ledger, release: Release) -> None:
        if ledger.rounds == 2:
            raise Killed
        real(ledger, release)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ledger, "charge", die)
        with pytest.raises(Killed):
            start(tmp_path, TURNS)
    (tmp_path / "summary.json").unlink(missing_ok=True)
    recorded = NoiseRecord(2, tmp_path / FOLDER).released(3)
    assert recorded is not None
    seen: list[int] = []
    real_keep = NoiseRecord.keep

    def keep(record: NoiseRecord, server_round: int, released: Recorded) -> None:
        seen.append(server_round)
        real_keep(record, server_round, released)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NoiseRecord, "keep", keep)
        resume(tmp_path, TURNS)
    assert seen == [4, 5]
    assert charges(tmp_path)[0][1] == 5


def test_the_budget_is_that_of_a_run_that_never_died(tmp_path: Path) -> None:
    options = {**TURNS, "noise_multiplier": 0.0, "epsilon": 3.0, "state_every": 3}
    kill(tmp_path, options, at=3)
    summary = resume(tmp_path, options)
    assert summary["rounds_completed"] == 5
    assert not any("ends the run after" in line for line in summary["warnings"])
    assert summary["privacy"]["epsilon"] <= 3.0


def test_without_its_noise_a_run_is_not_gone_on_with(tmp_path: Path) -> None:
    kill(tmp_path, TURNS, at=3)
    noise_file(tmp_path / FOLDER, 3).unlink()
    with pytest.raises(ConfigError, match="round 3 has been charged") as caught:
        prepare(configuration(tmp_path, **TURNS, resume=str(tmp_path)))
    assert "\n" not in str(caught.value)


def test_a_run_that_dies_before_its_first_state_keeps_its_noise(tmp_path: Path) -> None:
    kill(tmp_path, TURNS, at=1)
    released = NoiseRecord(2, tmp_path / FOLDER).released(1)
    assert released is not None
    copy = tmp_path.with_name("kept")
    shutil.copytree(tmp_path / FOLDER, copy)
    resume(tmp_path, TURNS)
    assert charges(tmp_path)[0][1] == 5
