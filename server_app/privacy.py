"""From a run configuration to its privacy plan, and from a strategy to what may be reported."""

import math
from pathlib import Path
from typing import Any

from server_app.config import ConfigError, RunConfig, clip_units, invited
from server_app.privacy_checks import claims_privacy
from server_app.state_files import Saved
from strategies import (
    ClipNorm,
    Figure,
    FixedParticipation,
    FullParticipation,
    Ledger,
    PoissonParticipation,
    PrivacyPlan,
    calibrated,
)
from strategies.participation import Participation
from strategies.private_averaging import PrivateAveraging

LEDGER = "ledger.json"
_FROM_DATA = "clip-norm was chosen from the clients' data without privacy, which no figure covers"
_ONLY_LOCAL = "no central figure: the sensitivity of a robust rule is unknown; see local"


def participation_of(config: RunConfig) -> Participation:
    """Who takes part in a round."""
    if config.participation == "fixed":
        return FixedParticipation(invited(config))
    if config.participation == "poisson":
        return PoissonParticipation(config.sample_rate)
    return FullParticipation()


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


def ledger_path(config: RunConfig, folder: Path) -> Path:
    """The ledger that the run continues: `ledger`, or ledger.json in its folder."""
    return Path(config.ledger).expanduser() if config.ledger else folder / LEDGER


def new_ledger(config: RunConfig, plan: PrivacyPlan | None, folder: Path) -> str | None:
    """What to tell where a run that claims privacy names a ledger that is not there, else None."""
    path = ledger_path(config, folder)
    if plan is None or not plan.claim or not config.ledger or path.exists():
        return None
    return f"warning: ledger {path} does not exist: a new one begins there, with nothing spent"


def check_ledger(config: RunConfig, plan: PrivacyPlan, path: Path, saved: Saved | None) -> None:
    """Raises ConfigError for a ledger that cannot be continued, or whose budget is spent.

    A run that is resumed (`saved`) may have spent it: then it ends with the rounds that it has had.
    Its ledger must hold them: one that is missing or older would understate what was released.
    """
    if not plan.claim:
        return
    try:
        ledger = Ledger(plan, path)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if saved is not None:
        charged = saved.state.values.get("own", {}).get("rounds_charged", 0)
        if ledger.rounds < charged:
            raise ConfigError(
                f"resume = {config.resume} is not allowed with ledger {path}: it holds "
                f"{ledger.rounds} rounds, and {charged} had been charged when the run left its "
                "state; put its ledger back"
            )
    elif not ledger.allows(plan.release()):
        raise ConfigError(
            f"max-epsilon = {plan.max_epsilon:g} is not allowed: even one more round would pass it "
            f"(ledger: {ledger.rounds} rounds)"
        )


def privacy_entry(config: RunConfig, strategy: object) -> dict[str, Any] | None:
    """The `privacy` entry of summary.json; None where nothing is claimed."""
    if not isinstance(strategy, PrivateAveraging) or not strategy.privacy.claim:
        return None
    return _entry(config, strategy.privacy, strategy.ledger, strategy.figure())


def epsilon_so_far(strategy: object) -> float | None:
    """ε that the ledger holds now, by RDP; None without a central claim."""
    if not isinstance(strategy, PrivateAveraging) or not strategy.has_central_claim:
        return None
    return strategy.ledger.epsilon_rdp


def privacy_of_dead_run(config: RunConfig, folder: Path) -> dict[str, Any] | None:
    """The same of a run that left nothing but its ledger; None where it left none."""
    path = ledger_path(config, folder)
    if not claims_privacy(config) or not path.exists():
        return None
    plan = privacy_plan(config)
    ledger = Ledger(plan, path)
    return _entry(config, plan, ledger, ledger.figure())


def _entry(
    config: RunConfig, plan: PrivacyPlan, ledger: Ledger, figure: Figure | None
) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "epsilon": _finite(figure.epsilon) if figure else None,
        "delta": plan.delta,
        "accountant": figure.accountant if figure else None,
        "noise_multiplier": plan.noise_multiplier,
        "sample_rate": plan.sample_rate,
        "neighbours": plan.relation if figure else None,
        "sampling": config.participation,
        "rounds_charged": ledger.rounds,
        "rounds_of_earlier_runs": ledger.rounds_before,
        "noise_location": plan.noise_location,
        "claim": plan.sentence() if figure else _ONLY_LOCAL,
    }
    if plan.noise_location == "client":
        local = plan.local_figure()
        entry["local"] = {
            "epsilon": _finite(local.epsilon),
            "delta": plan.delta,
            "claim": "what a client's messages tell the server; its data may change at will "
            "(sensitivity 2C), and it may be drawn in every round",
        }
    if config.clip_norm_from_data:
        entry["claim"] += f"; {_FROM_DATA}"
        entry["clip_norm_from_data"] = True
    return entry


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
