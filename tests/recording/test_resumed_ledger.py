"""A resumed run goes on with the ledger that it charged, and with no other as long as it."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from charged_ledgers import rounds_in
from killed_runs import NOISED, ROUNDS, kill, other_run, resume, start

from blackthorn.settings.config import ConfigError
from blackthorn.strategies import ClipNorm, DPFedAvg, PoissonParticipation, PrivacyPlan


def refused(folder: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        resume(folder, options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("at", [1, 3])
def test_another_ledger_with_as_many_rounds_is_refused(tmp_path: Path, at: int) -> None:
    """Its rounds cost less: the figure would be without the run's own before the crash."""
    kill(tmp_path / "run", NOISED, at=at)
    start(tmp_path / "other", {**NOISED, "noise_multiplier": 50.0})
    own, other = (tmp_path / name / "ledger.json" for name in ("run", "other"))
    own.rename(tmp_path / "kept.json")
    shutil.copy(other, own)
    other.unlink()
    refused(
        tmp_path / "run", NOISED, r"with ledger .*: the run has charged another one \(then .*run"
    )
    shutil.move(tmp_path / "kept.json", own)
    assert resume(tmp_path / "run", NOISED)["privacy"]["rounds_charged"] == ROUNDS + 1


def test_its_own_ledger_with_other_charges_is_refused(tmp_path: Path) -> None:
    """A copy from before the run, in which other and cheaper rounds were charged since."""
    path = tmp_path / "spent.json"
    options = {**NOISED, "ledger": str(path)}
    other_run(path, 2)
    before = path.read_bytes()
    kill(tmp_path / "run", options, at=3)
    path.write_bytes(before)
    start(tmp_path / "other", {**options, "noise_multiplier": 50.0})
    assert rounds_in(path) == 2 + ROUNDS
    refused(tmp_path / "run", options, "it holds 0 rounds of this run, and by what else")


def test_another_runs_charges_in_between_are_no_other_ledger(tmp_path: Path) -> None:
    options = {**NOISED, "ledger": str(tmp_path / "spent.json")}
    kill(tmp_path / "run", options, at=3)
    start(tmp_path / "other", {**options, "noise_multiplier": 50.0})
    assert resume(tmp_path / "run", options)["privacy"]["rounds_charged"] == 3 + ROUNDS + 3


def test_a_relative_ledger_is_where_the_run_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From another folder the same words name another ledger, with as many rounds."""
    options = {**NOISED, "ledger": "spent.json"}
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        other_run(tmp_path / name / "spent.json", ROUNDS)
    monkeypatch.chdir(tmp_path / "here")
    kill(tmp_path / "run", options, at=3)
    monkeypatch.chdir(tmp_path / "there")
    refused(tmp_path / "run", options, r"ledger = .*there/spent.json \(was .*here/spent.json\)")
    resume(tmp_path / "run", {**options, "ledger": "../here/spent.json"})
    rounds = [rounds_in(tmp_path / name / "spent.json") for name in ("here", "there")]
    assert rounds == [2 * ROUNDS + 1, ROUNDS]


def test_a_strategy_goes_on_with_its_own_ledger_alone(tmp_path: Path) -> None:
    """Whoever drives it without a run folder has the same."""
    plan = PrivacyPlan(ClipNorm(1.0), 2.0, 4, 5, PoissonParticipation(0.5))
    for name, rounds in (("own", 2), ("other", 4)):
        other_run(tmp_path / name, rounds)
    left = DPFedAvg(plan, ledger=tmp_path / "own").own_values()
    DPFedAvg(plan, ledger=tmp_path / "own").restore_own(left)
    with pytest.raises(ValueError, match="not the run's: the run has charged another one"):
        DPFedAvg(plan, ledger=tmp_path / "other").restore_own(left)
