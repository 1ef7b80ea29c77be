"""From a run configuration to its privacy plan, and from a strategy to what may be reported."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from server_app.config import ConfigError, RunConfig, clip_units, invited
from server_app.privacy_checks import (
    OR_NO_CLAIM,
    claims_privacy,
    claims_sample_privacy,
    has_central_claim,
)
from server_app.rounds_on_record import (
    last_round_on_record,
    rounds_before_on_record,
    rounds_begun,
    rounds_on_record,
)
from server_app.state_files import Saved, read_saved
from strategies import (
    ClipNorm,
    Figure,
    FixedParticipation,
    FullParticipation,
    Ledger,
    LocalRate,
    PoissonParticipation,
    PrivacyPlan,
    Release,
    calibrated,
    spent,
)
from strategies.accounting import Charge
from strategies.ledger import LedgerInUse
from strategies.ledger_file import behind_links
from strategies.participation import Participation
from strategies.private_averaging import PrivateAveraging
from tasks.problem import Problem

LEDGER = "ledger.json"
_FROM_DATA = "clip-norm was chosen from the clients' data without privacy, which no figure covers"
_LOCAL = (
    "what a client's messages tell the server; its data may change at will (sensitivity 2C), and "
    "it may be drawn in every round"
)
_SAMPLE = (
    "differential privacy of every single example of a client, against everybody, the server too, "
    "for a client that trains by DP-SGD as configured in every round; neighbours differ by one "
    "example added or removed"
)
_ONLY_LOCAL = "no central figure: the sensitivity of a robust rule is unknown; see local"


def participation_of(config: RunConfig) -> Participation:
    """Who takes part in a round."""
    if config.participation == "fixed":
        return FixedParticipation(invited(config))
    if config.participation == "poisson":
        return PoissonParticipation(config.sample_rate)
    return FullParticipation()


def local_rate_of(config: RunConfig) -> LocalRate:
    """The local learning rate over the rounds."""
    return LocalRate(
        config.local_lr,
        config.local_lr_decay,
        config.local_lr_decay_when,
        config.local_lr_plateau,
    )


def privacy_plan(config: RunConfig) -> PrivacyPlan:
    """The plan of a run that adds noise, with the noise calibrated where `epsilon` asks for it.

    Raises ConfigError with one line.
    """
    plan = PrivacyPlan(
        clip_norm=ClipNorm(config.clip_norm, clip_units(config)),
        noise_multiplier=config.noise_multiplier or 1.0,
        num_clients=config.num_clients,
        rounds=config.num_server_rounds,
        participation=participation_of(config),
        delta=config.delta,
        neighbours=None if config.neighbours == "auto" else config.neighbours,
        accountant=config.accountant,
        noise_location=config.noise_location,
        top_up=config.noise_top_up,
        max_epsilon=config.max_epsilon or None,
        claim=claims_privacy(config),
        insecure_seed=config.seed if config.insecure_seeded_noise else None,
    )
    try:
        return plan if config.noise_multiplier > 0 else calibrated(plan, config.epsilon)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def check_noise(config: RunConfig, plan: PrivacyPlan, problem: Problem) -> None:
    """Raises ConfigError where the clients' models could not carry their noise in the last round.

    The models of later rounds are not known yet: the strategy looks again before each.
    """
    first = problem.model.flatten(problem.state())
    try:
        plan.check_resolution(first, local_rate_of(config).at_least(config.num_server_rounds))
    except ValueError as error:
        raise ConfigError(str(error)) from error


def check_figures(config: RunConfig, plan: PrivacyPlan | None) -> None:
    """Raises ConfigError where there is so little noise that no finite epsilon holds: a claim of
    nothing."""
    if plan is not None and has_central_claim(config):
        # Infinite or not, it is whether or not the cohort is drawn.
        charge = replace(plan.release(), drawn=None), plan.rounds
        _require_finite(config, "noise-multiplier", plan.noise_multiplier, charge)
    if claims_sample_privacy(config):
        charge = _of_an_example(config, config.num_server_rounds)
        z = config.dp_sgd_noise_multiplier
        _require_finite(config, "dp-sgd-noise-multiplier", z, charge)


def _of_an_example(config: RunConfig, rounds: int) -> Charge:
    """What DP-SGD releases of one example of a client that trains in all of `rounds`."""
    release = Release(config.dp_sgd_noise_multiplier, config.dp_sgd_sample_rate)
    return release, rounds * config.local_steps


def _require_finite(config: RunConfig, key: str, multiplier: float, charge: Charge) -> None:
    if math.isinf(spent([charge], config.delta).epsilon):
        raise ConfigError(
            f"{key} = {multiplier:g} breaks the claim: with so little noise no finite epsilon "
            f"holds at delta = {config.delta:g}; set more, {OR_NO_CLAIM}"
        )


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
    if path is None or not config.ledger or path.exists():
        return None
    return f"ledger {path} does not exist: a new one begins there, with nothing spent"


@dataclass(frozen=True)
class Standing:
    """What the ledger holds when a run begins or goes on.

    `rounds`: how many rounds have been charged, `rounds_before` of them to earlier runs.
    `allowed`: after how many of its rounds the budget ends the run. `ledger`: its mark, by which a
    run that is resumed knows it again. `replaced_accountant`: what to tell where the figure after
    these rounds is another accountant's than the configuration's.
    """

    rounds: int
    rounds_before: int
    allowed: int
    ledger: Mapping[str, Any]
    replaced_accountant: str | None = None

    def own(self) -> dict[str, Any]:
        """As a private strategy's `own_values`."""
        return {
            "rounds_before": self.rounds_before,
            "rounds_charged": self.rounds,
            "ledger": self.ledger,
        }


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
    if saved is None:
        return _new_standing(config, plan, path, ledger)
    charged = rounds_on_record(folder)
    if ledger.rounds < charged:
        raise ConfigError(
            f"resume = {config.resume} is not allowed with ledger {path}: it holds "
            f"{ledger.rounds} rounds, and by what else the run left {charged} had been charged; "
            "put its ledger back"
        )
    _require_own(config, path, ledger, saved)
    done, rounds = saved.state.server_round, config.num_server_rounds
    before = _rounds_before(folder, ledger)
    left = ledger.rounds_allowed(plan.release(), rounds - done) if rounds > done else 0
    other = ledger.replaced_accountant(plan.release(), left)
    return Standing(ledger.rounds, before, done + left, ledger.mark(), other)


def _require_own(config: RunConfig, path: Path, ledger: Ledger, saved: Saved) -> None:
    """It is the one that the run charged, whatever else has as many rounds."""
    try:
        ledger.require(saved.state.values["own"].get("ledger"))
    except ValueError as error:
        raise ConfigError(
            f"resume = {config.resume} is not allowed with ledger {path}: {error}; put its own "
            "ledger back"
        ) from None


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


def _new_standing(config: RunConfig, plan: PrivacyPlan, path: Path, ledger: Ledger) -> Standing:
    allowed = ledger.rounds_allowed(plan.release(), config.num_server_rounds)
    if not allowed:
        raise ConfigError(
            f"{_budget(config)} is not allowed: even one more round would pass it "
            f"(ledger {path}: {ledger.rounds} rounds, epsilon {ledger.figure().epsilon:.4g})"
        )
    other = ledger.replaced_accountant(plan.release(), allowed)
    return Standing(ledger.rounds, ledger.rounds, allowed, ledger.mark(), other)


def shortened(config: RunConfig, saved: Saved | None, standing: Standing | None) -> str | None:
    """What to tell where the budget ends the run before its last round, else None."""
    if standing is None or standing.allowed >= config.num_server_rounds:
        return None
    done = saved.state.server_round if saved is not None else 0
    since = standing.rounds - standing.rounds_before - done
    held = {
        "of earlier runs": standing.rounds_before,
        "that were charged since it began, and lost or another run's": since,
    }
    others = " and ".join(f"{rounds} {whose}" for whose, rounds in held.items() if rounds)
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


def privacy_entry(config: RunConfig, strategy: object) -> dict[str, Any] | None:
    """The `privacy` entry of summary.json; None where nothing is claimed."""
    if not isinstance(strategy, PrivateAveraging) or not strategy.privacy.claim:
        return None
    plan, figure = strategy.privacy, strategy.figure()
    return _entry(config, plan, strategy.ledger, figure, strategy.rounds_begun)


def sample_privacy_entry(config: RunConfig, rounds_begun: int) -> dict[str, Any] | None:
    """The `sample_privacy` entry of summary.json: ε at δ of one example of a client that trained in
    every round that was begun, by RDP; None where it is not claimed.

    It is of the configuration and the number of rounds alone: no client's word is in it, and it
    tells of none.
    """
    if not claims_sample_privacy(config):
        return None
    figure = spent([_of_an_example(config, rounds_begun)], config.delta)
    return {
        "epsilon": _finite(figure.epsilon),
        "delta": config.delta,
        "accountant": figure.accountant,
        "level": "examples of each client",
        "rounds": rounds_begun,
        "claim": _claimed(figure, _SAMPLE),
    }


def spent_so_far(strategy: object) -> dict[str, float]:
    """What the ledger holds now, for a round's line: ε by RDP, and how many rounds were charged.
    Empty without a central claim."""
    if not isinstance(strategy, PrivateAveraging) or not strategy.has_central_claim:
        return {}
    epsilon = strategy.ledger.epsilon_rdp
    spent = {} if epsilon is None else {"epsilon_rdp": epsilon}
    return {**spent, "rounds_charged": strategy.ledger.rounds}


def privacy_of_dead_run(config: RunConfig, folder: Path) -> dict[str, Any] | None:
    """The same of a run that left nothing but its ledger; None where it left none."""
    path = ledger_path(config, folder)
    if path is None or not path.exists():
        return None
    plan = privacy_plan(config)
    ledger = Ledger(plan, path)
    ledger.rounds_before = _rounds_before(folder, ledger)
    saved = read_saved(folder)
    begun = rounds_begun(folder, saved) if saved else last_round_on_record(folder) + 1
    return _entry(config, plan, ledger, ledger.figure(), begun)


def _rounds_before(folder: Path, ledger: Ledger) -> int:
    """How many of the ledger's rounds are earlier runs' than that in `folder`."""
    known = rounds_before_on_record(folder)
    if known is not None:
        return known
    # Without a state: what the run has not on record itself.
    return max(0, ledger.rounds - last_round_on_record(folder))


def _entry(
    config: RunConfig, plan: PrivacyPlan, ledger: Ledger, figure: Figure | None, begun: int
) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "epsilon": _finite(figure.epsilon) if figure else None,
        "delta": plan.delta,
        "accountant": figure.accountant if figure else None,
        "noise_multiplier": plan.noise_multiplier,
        "sample_rate": plan.sample_rate,
        "cohort_size": plan.cohort_size,
        "num_clients": plan.num_clients,
        "neighbours": plan.relation if figure else None,
        "sampling": config.participation,
        "rounds_charged": ledger.rounds,
        "rounds_of_earlier_runs": ledger.rounds_before,
        "rounds_planned": plan.rounds,
        "max_epsilon": plan.max_epsilon,
        "noise_location": plan.noise_location,
        "claim": _claimed(figure, plan.sentence()) if figure else _ONLY_LOCAL,
    }
    if plan.noise_location == "client":
        local = plan.local_figure(begun)
        entry["local"] = {
            "epsilon": _finite(local.epsilon),
            "delta": plan.delta,
            "rounds": max(plan.rounds, begun),
            "claim": _claimed(local, _LOCAL),
        }
    if config.clip_norm_from_data:
        entry["claim"] += f"; {_FROM_DATA}"
        entry["clip_norm_from_data"] = True
    return entry


def _claimed(figure: Figure, sentence: str) -> str:
    holds = "" if math.isfinite(figure.epsilon) else "none, as no finite epsilon holds: "
    return f"{holds}{sentence}"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
