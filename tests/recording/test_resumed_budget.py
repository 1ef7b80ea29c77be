"""Runs that were killed and resumed, or share a ledger, never spend more than their budget."""

from pathlib import Path

import pytest
from charged_ledgers import read_charges, rounds_in
from killed_runs import (
    BUDGET,
    NOISED,
    ROUNDS,
    kill,
    resume,
    start,
)
from rich.console import Console

from blackthorn.settings.config import ConfigError
from blackthorn.strategies import (
    Release,
    spent,
)
from blackthorn.strategies.accounting import Accountant


def shown(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out


def test_what_is_done_again_is_taken_from_the_rounds_that_are_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kill(tmp_path, BUDGET, at=2)
    kill(tmp_path, BUDGET, at=3, again=True)
    capsys.readouterr()
    summary = resume(tmp_path, BUDGET, Console(width=500))
    line = (
        f"epsilon = 3 ends the run after {ROUNDS - 2} of {ROUNDS} rounds: beside its own 2 the "
        "ledger holds 2 of its own that were lost"
    )
    assert f"warning: {line}\n" in shown(capsys)
    assert line in summary["warnings"]
    assert (summary["status"], summary["rounds_completed"]) == ("completed", ROUNDS - 2)
    privacy = summary["privacy"]
    assert (privacy["rounds_planned"], privacy["max_epsilon"]) == (ROUNDS, 3.0)
    # An oracle of its own: T rounds cost epsilon, and T were charged.
    charges = read_charges(tmp_path / "ledger.json")
    assert sum(count for _, count in charges) == ROUNDS
    assert 0.99 * 3.0 < spent(charges, 1e-5).epsilon <= 3.0
    assert privacy["epsilon"] <= 3.0


def test_however_often_a_run_is_resumed_it_keeps_to_its_budget(tmp_path: Path) -> None:
    """Killed at the same round until nothing is left: it ends with the rounds that it has."""
    kill(tmp_path, BUDGET, at=2)
    for _ in range(ROUNDS - 2):
        kill(tmp_path, BUDGET, at=2, again=True)
    assert rounds_in(tmp_path / "ledger.json") == ROUNDS
    summary = resume(tmp_path, BUDGET)
    assert (summary["status"], summary["rounds_completed"]) == ("completed", 1)
    assert rounds_in(tmp_path / "ledger.json") == ROUNDS
    assert summary["privacy"]["epsilon"] <= 3.0


def test_what_an_earlier_run_has_spent_is_taken_from_the_budget(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """8 became 18.63: the second run is refused, or ends before it would pass what is left."""
    ledger = tmp_path / "spent.json"
    options = {**BUDGET, "ledger": str(ledger)}
    assert start(tmp_path / "one", options)["privacy"]["epsilon"] <= 3.0
    with pytest.raises(ConfigError, match=r"epsilon = 3 is not allowed: even one more round") as e:
        start(tmp_path / "two", options)
    assert "\n" not in str(e.value)
    assert not (tmp_path / "two").exists()
    capsys.readouterr()
    more = {**options, "epsilon": 3.5}
    summary = start(tmp_path / "three", more, Console(width=500))
    assert 0 < summary["rounds_completed"] < ROUNDS
    assert summary["privacy"]["epsilon"] <= 3.5
    assert spent(read_charges(ledger), 1e-5).epsilon <= 3.5
    ends = f"epsilon = 3.5 ends the run after {summary['rounds_completed']} of {ROUNDS} rounds"
    assert ends in shown(capsys)
    # The smaller of two limits counts.
    with pytest.raises(ConfigError, match="max-epsilon = 1 is not allowed"):
        start(tmp_path / "four", {**options, "epsilon": 9.0, "max_epsilon": 1.0})


@pytest.mark.parametrize("accountant", ["prv", "pld"])
def test_the_budget_holds_by_whichever_accountant(tmp_path: Path, accountant: Accountant) -> None:
    """What was lost is charged too: a round less is left, whose cost would pass the limit."""
    limit = 1.001 * spent([(Release(2.0, 0.5), ROUNDS)], 1e-5, accountant).epsilon
    options = {**NOISED, "accountant": accountant, "max_epsilon": limit}
    kill(tmp_path, options, at=2)
    summary = resume(tmp_path, options)
    assert summary["rounds_completed"] == ROUNDS - 1
    assert rounds_in(tmp_path / "ledger.json") == ROUNDS
    assert summary["privacy"]["epsilon"] <= limit
