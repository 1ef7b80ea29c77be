"""The ledger that a run charges: where it is, whether it is its own, and what is left in it."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blackthorn.recording.rounds_on_record import mark_on_record, rounds_of_run_on_record
from blackthorn.recording.state_files import FOLDER, Saved
from blackthorn.settings.config import ConfigError, RunConfig
from blackthorn.settings.privacy_checks import has_central_claim
from blackthorn.settings.rounding import exact, upward
from blackthorn.strategies import Ledger, PrivacyPlan
from blackthorn.strategies.ledger import LedgerInUse, mark_of
from blackthorn.strategies.ledger_file import begins_anew, behind_links
from blackthorn.strategies.noise_record import noise_file

LEDGER = "ledger.json"


def ledger_path(config: RunConfig, folder: Path) -> Path | None:
    """The ledger that the run continues: `ledger`, or ledger.json in its folder; None where no
    central figure is claimed, so that nothing is charged."""
    if not has_central_claim(config):
        return None
    return Path(config.ledger).expanduser() if config.ledger else folder / LEDGER


def with_place_of_ledger(config: RunConfig) -> RunConfig:
    """`config` with `ledger` as the path of the file itself, which is the same wherever the run
    goes on. Raises ConfigError, one line, where there can be none."""
    if not config.ledger:
        return config
    try:
        path = behind_links(Path(config.ledger).expanduser())
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return config.model_copy(update={"ledger": str(path)})


def new_ledger(config: RunConfig, folder: Path) -> str | None:
    """What to tell where a run names a ledger that is not there, else None."""
    path = ledger_path(config, folder)
    return begins_anew(path) if path is not None and config.ledger else None


@dataclass(frozen=True)
class Standing:
    """What the ledger holds when a run begins or goes on.

    `rounds_of_run`: how many rounds have been charged to the run itself, `rounds_of_others` to
    others. `allowed`: after how many of its rounds the budget ends the run. `ledger`: its mark, by
    which a run that is resumed knows it again. `replaced_accountant`: what to tell where the figure
    after these rounds is another accountant's than the configuration's. `spent`: what to tell
    of what the ledger holds before the run's next round: nothing else says it of a run that died.
    `moved`: what to tell where the ledger was elsewhere before.
    """

    rounds_of_run: int
    rounds_of_others: int
    allowed: int
    ledger: Mapping[str, Any]
    replaced_accountant: str | None = None
    spent: str | None = None
    moved: str | None = None

    def own(self) -> dict[str, Any]:
        """As a private strategy's `own_values`."""
        return {"ledger": self.ledger}


def check_ledger(
    config: RunConfig, plan: PrivacyPlan, folder: Path, saved: Saved | None
) -> Standing | None:
    """How the ledger stands, which nobody else may have; None for a run that charges none.

    Raises ConfigError for a ledger that cannot be continued, or whose budget is spent. A run that
    is resumed (`saved`) may have spent it: then it ends with the rounds that it has had. Its ledger
    must hold them: one that is missing, older or another run's would understate what was released.
    """
    path = ledger_path(config, folder)
    if path is None:
        return None
    try:
        ledger = Ledger(plan, path)
        _check_place(config, path, folder)
        if path.exists():
            ledger.hold()
            ledger.close()
    except (ValueError, LedgerInUse) as error:
        raise ConfigError(str(error)) from error
    done = 0
    if saved is not None:
        _require_own(config, path, ledger, saved)
        done = saved.state.server_round
    _require_releases(config, plan, ledger, folder, done)
    # What is charged already, and only done again.
    held = min(config.num_server_rounds, done + ledger.on_record(plan.release(), done))
    left = max(0, config.num_server_rounds - held)
    left = ledger.rounds_allowed(plan.release(), left) if left else 0
    if saved is None and not left:
        raise ConfigError(
            f"{_budget(config)} is not allowed: even one more round would pass it "
            f"(ledger {path}: {ledger.rounds} rounds, epsilon {upward(ledger.figure().epsilon, 4)})"
        )
    other = ledger.replaced_accountant(plan.release(), left)
    of_run, of_others = ledger.rounds_of_run, ledger.rounds_of_others
    mark, spent = ledger.mark(), _spent(ledger, plan)
    return Standing(of_run, of_others, held + left, mark, other, spent, ledger.moved)


def _spent(ledger: Ledger, plan: PrivacyPlan) -> str | None:
    if not ledger.rounds:
        return None
    epsilon = upward(ledger.figure().epsilon, 4)
    return (
        f"spent so far, by its ledger: epsilon {epsilon} at delta {exact(plan.delta)} "
        f"({ledger.rounds} rounds)"
    )


def _require_own(config: RunConfig, path: Path, ledger: Ledger, saved: Saved) -> None:
    """It is the one that the run charged, whatever else has as many rounds."""
    mark = mark_of(saved.state.values["own"])
    try:
        ledger.require(mark, rounds_of_run_on_record(Path(config.resume).expanduser(), mark))
    except ValueError as error:
        raise ConfigError(
            f"resume = {config.resume} is not allowed with ledger {path}: {error}; put its own "
            "ledger back"
        ) from None


def _require_releases(
    config: RunConfig, plan: PrivacyPlan, ledger: Ledger, folder: Path, done: int
) -> None:
    """Of clients that take turns, what was charged after the state is there to be done again."""
    noises = noise_folder(config, folder)
    charged = ledger.on_record(plan.release(), done)
    if noises is None or not charged:
        return
    lost = [t for t in range(done + 1, done + charged + 1) if not noise_file(noises, t).exists()]
    if lost:
        raise ConfigError(
            f"resume = {config.resume} is not allowed: round {lost[0]} has been charged, and "
            f"{noise_file(noises, lost[0])} with its noise is not there; put it back"
        )


def noise_folder(config: RunConfig, folder: Path) -> Path | None:
    """Where the noise of a run lies whose clients take turns, for as long as it may go on; None of
    other runs, and where nothing is charged."""
    rotating = config.participation == "rotating" and has_central_claim(config)
    return folder / FOLDER if rotating else None


def ledger_of_dead_run(config: RunConfig, plan: PrivacyPlan, folder: Path) -> Ledger | None:
    """The ledger of a run that left nothing else to say what it spent; None where it charged none.

    Raises ValueError, one line, where the one that is there is not known to be the run's.
    """
    path = ledger_path(config, folder)
    mark = None if path is None else mark_on_record(folder)
    rounds = rounds_of_run_on_record(folder, mark)
    if path is None or (not path.exists() and not rounds):
        return None
    ledger = Ledger(plan, path)
    if mark is None:
        raise ValueError("nothing that the run left says which ledger it charged")
    ledger.require(mark, rounds)
    return ledger


def _check_place(config: RunConfig, path: Path, folder: Path) -> None:
    """It can be written there, and no other file of the run takes its place."""
    if config.ledger:
        there = next(p for p in path.absolute().parents if p.exists())
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            raise ConfigError(f"ledger = {config.ledger} is not allowed: {there} cannot be written")
    if path.resolve().is_relative_to(folder.resolve()) and path.name != LEDGER:
        raise ConfigError(
            f"ledger = {config.ledger} is not allowed: the run writes files of its own in "
            f"{folder}; name one elsewhere, or leave it out for {LEDGER} there"
        )


def shortened(config: RunConfig, saved: Saved | None, standing: Standing | None) -> str | None:
    """What to tell where the budget ends the run before its last round, else None."""
    if standing is None or standing.allowed >= config.num_server_rounds:
        return None
    done = saved.state.server_round if saved is not None else 0
    again = config.participation == "rotating"  # rounds of its own are then lost by nothing
    held = {
        "of other runs": standing.rounds_of_others,
        "of its own that were lost": 0 if again else standing.rounds_of_run - done,
    }
    others = " and ".join(f"{rounds} {whose}" for whose, rounds in held.items() if rounds > 0)
    beside = f"beside its own {done} " if done else ""
    # Without any of them the budget is too small for the rounds, whoever has charged it.
    why = f": {beside}the ledger holds {others}" if others else ""
    return (
        f"{_budget(config)} ends the run after {standing.allowed} of "
        f"{config.num_server_rounds} rounds{why}"
    )


def _budget(config: RunConfig) -> str:
    """The key that sets the budget, and its value."""
    if not config.max_epsilon or 0 < config.epsilon < config.max_epsilon:
        return f"epsilon = {config.epsilon:g}"
    return f"max-epsilon = {config.max_epsilon:g}"
