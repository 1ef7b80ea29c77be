"""From a run configuration to its privacy plan, and from a strategy to what may be reported."""

import contextlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blackthorn.recording.given_weights import (
    CODE_FIELD,
    FIELD,
    UNKNOWN,
    given_on_record,
    of_own_code,
    own_code_of,
)
from blackthorn.recording.resume import with_its_places
from blackthorn.recording.rounds_on_record import rounds_begun
from blackthorn.recording.run_ledger import ledger_of_dead_run, ledger_path
from blackthorn.recording.state_files import read_saved
from blackthorn.settings.config import ConfigError, RunConfig
from blackthorn.settings.derived import (
    clip_units,
    invited,
    is_secure,
    noise_bands,
    secure_survivors,
    secure_threshold,
)
from blackthorn.settings.privacy_checks import (
    claims_privacy,
    claims_sample_privacy,
    has_central_claim,
)
from blackthorn.strategies import (
    ClipNorm,
    Figure,
    FixedParticipation,
    FullParticipation,
    Ledger,
    LocalRate,
    PoissonParticipation,
    PrivacyPlan,
    Release,
    RotatingParticipation,
    calibrated,
    spent,
)
from blackthorn.strategies.accounting import Charge
from blackthorn.strategies.adaptive_threshold import AdaptiveThreshold
from blackthorn.strategies.participation import Participation
from blackthorn.strategies.privacy_plan import GIVEN_WEIGHTS, NO_FIGURE, ONLY_LOCAL
from blackthorn.strategies.private_averaging import PrivateAveraging
from blackthorn.strategies.secure_plan import SecurePlan

_NOTHING: Mapping[str, str] = {}
_FROM_DATA = "clip-norm was chosen from the clients' data without privacy, which no figure covers"
_LOCAL = (
    "what a client's messages of this run alone tell the server; its data may change at will "
    "(sensitivity 2C), and it may be drawn in every round"
)
_SAMPLE = (
    "differential privacy of every single example of a client, in this run alone, against "
    "everybody, the server too, for a client that trains by DP-SGD as configured in every round; "
    "neighbours differ by one example added or removed"
)


def participation_of(config: RunConfig) -> Participation:
    """Who takes part in a round."""
    if config.participation == "fixed":
        return FixedParticipation(invited(config))
    if config.participation == "poisson":
        return PoissonParticipation(config.sample_rate)
    if config.participation == "rotating":
        return RotatingParticipation(config.bands, config.seed)
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
    options: dict[str, Any] = {
        "clip_norm": ClipNorm(config.clip_norm, clip_units(config)),
        "noise_multiplier": config.noise_multiplier or 1.0,
        "num_clients": config.num_clients,
        "rounds": config.num_server_rounds,
        "participation": participation_of(config),
        "delta": config.delta,
        "neighbours": None if config.neighbours == "auto" else config.neighbours,
        "accountant": config.accountant,
        "bands": noise_bands(config),
        "adaptive": AdaptiveThreshold(config.clip_quantile, config.clip_rate)
        if config.clip_quantile
        else None,
        "noise_location": config.noise_location,
        "top_up": config.noise_top_up,
        "max_epsilon": config.max_epsilon or None,
        "claim": claims_privacy(config),
        "insecure_seed": config.seed if config.insecure_seeded_noise else None,
    }
    kind: type[PrivacyPlan] = PrivacyPlan
    if is_secure(config):
        kind = SecurePlan
        options |= {
            "survivors": secure_survivors(config),
            "threshold": secure_threshold(config),
            "bits": config.secure_bits,
        }
    try:
        plan = kind(**options)
        plan = plan if config.noise_multiplier > 0 else calibrated(plan, config.epsilon)
        # Where an adaptive threshold's count alone would cost more.
        _ = plan.update_multiplier
        return plan
    except ValueError as error:
        raise ConfigError(str(error)) from error


def of_an_example(config: RunConfig, rounds: int) -> Charge:
    """What DP-SGD releases of one example of a client that trains in all of `rounds`."""
    release = Release(config.dp_sgd_noise_multiplier, config.dp_sgd_sample_rate)
    return release, rounds * config.local_steps


def privacy_entry(
    config: RunConfig, strategy: object, given: Mapping[str, str] = _NOTHING
) -> dict[str, Any] | None:
    """The `privacy` entry of summary.json; None where nothing is claimed. `given`: the digests of
    the weights that the run starts from, if it was given any."""
    if not isinstance(strategy, PrivateAveraging) or not strategy.privacy.claim:
        return None
    ledger = strategy.ledger if strategy.has_central_claim else None
    return _entry(config, strategy.privacy, ledger, ONLY_LOCAL, strategy.rounds_begun, given)


def sample_privacy_entry(
    config: RunConfig, rounds_begun: int, given: Mapping[str, str] = _NOTHING
) -> dict[str, Any] | None:
    """The `sample_privacy` entry of summary.json: ε at δ of one example of a client that trained in
    every round that was begun, by RDP; None where it is not claimed. `given` as for
    `privacy_entry`.

    It is of the configuration and the number of rounds alone: no client's word is in it, and it
    tells of none.
    """
    if not claims_sample_privacy(config):
        return None
    figure = spent([of_an_example(config, rounds_begun)], config.delta)
    return {
        "epsilon": _finite(figure.epsilon),
        "delta": config.delta,
        "accountant": figure.accountant,
        "level": "examples of each client",
        "rounds": rounds_begun,
        "claim": _claimed(figure, _SAMPLE) + _start(given) + of_own_code(config),
        **_taken_to_be_public(config, given),
    }


def believed_figures(
    config: RunConfig, told: Mapping[int, float], rounds_begun: int
) -> dict[int, float]:
    """What clients have `told` of their examples' ε, by client, without what cannot be true: any
    where nothing is claimed, and less than what a client spends that was asked so often."""
    entry = sample_privacy_entry(config, rounds_begun)
    if entry is None or entry["epsilon"] is None:
        return {}
    # Another machine's float64 may differ in the last digits.
    least = entry["epsilon"] * (1 - 1e-9)
    return {client: epsilon for client, epsilon in told.items() if epsilon >= least}


def spent_so_far(strategy: object) -> dict[str, Any]:
    """What the ledger holds now, for a round's line: ε by RDP, and how many rounds were charged.
    Empty without a central claim."""
    if not isinstance(strategy, PrivateAveraging) or not strategy.has_central_claim:
        return {}
    epsilon = strategy.ledger.epsilon_rdp
    spent = {} if epsilon is None else {"epsilon_rdp": epsilon}
    return {**spent, **_charged(strategy.ledger)}


def _charged(ledger: Ledger | None) -> dict[str, Any]:
    return {
        "rounds_charged": ledger and ledger.rounds,
        "rounds_of_earlier_runs": ledger and ledger.rounds_of_others,
        "run": ledger and ledger.run,
    }


def privacy_of_dead_run(config: RunConfig, folder: Path) -> dict[str, Any] | None:
    """The same of a run that left nothing but its ledger; None where nothing is claimed or charged.

    Where the ledger is not known to be the run's own there is no figure, and the reason in its
    place: another's could say less than was spent.
    """
    if not claims_privacy(config):
        return None
    config = _with_its_places(config, folder)
    plan, no_figure = privacy_plan(config), ONLY_LOCAL
    ledger = None
    try:
        ledger = ledger_of_dead_run(config, plan, folder)
        if ledger is None and has_central_claim(config):
            return None
    except ValueError as error:
        no_figure = f"no figure of ledger {ledger_path(config, folder)}: {error}"
    return _entry(config, plan, ledger, no_figure, _begun(folder), _given(config, folder))


def sample_privacy_of_dead_run(config: RunConfig, folder: Path) -> dict[str, Any] | None:
    """As `sample_privacy_entry`, of a run that left no summary: for a client that trained as often
    as the server can have asked."""
    given = _given(_with_its_places(config, folder), folder)
    return sample_privacy_entry(config, _begun(folder), given)


def _given(config: RunConfig, folder: Path) -> dict[str, str]:
    """Digests of the weights that a dead run was given; lines of an earlier version say none."""
    unknown = {FIELD: UNKNOWN} if config.initial_model else {}
    return {**unknown, **given_on_record(folder)}


def _start(given: Mapping[str, str]) -> str:
    return GIVEN_WEIGHTS if FIELD in given else ""


def _with_its_places(config: RunConfig, folder: Path) -> RunConfig:
    """What the run leaves to be released does not say where its ledger is; its states do."""
    with contextlib.suppress(ValueError):
        saved = read_saved(folder)
        if saved is not None:
            return with_its_places(config, saved)
    return config


def _begun(folder: Path) -> int:
    """How often at most a run that is dead has asked its clients to train."""
    saved = None
    with contextlib.suppress(ValueError):
        saved = read_saved(folder)
    return rounds_begun(folder, saved)


def _entry(
    config: RunConfig,
    plan: PrivacyPlan,
    ledger: Ledger | None,
    no_figure: str,
    begun: int,
    given: Mapping[str, str],
) -> dict[str, Any]:
    """`no_figure`: why there is none where there is no ledger."""
    figure, charges = (ledger.figure(), ledger.charges) if ledger else (None, [])
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
        **({} if plan.adaptive is None else {"update_noise_multiplier": plan.update_multiplier}),
        **({} if plan.groups == 1 else {"groups": plan.groups, "noise_bands": plan.bands}),
        **_charged(ledger),
        "rounds_planned": plan.rounds,
        "max_epsilon": plan.max_epsilon,
        "noise_location": plan.drawn_by,
        **({"survivors": plan.survivors} if isinstance(plan, SecurePlan) else {}),
        "covers_clients": plan.covers_clients(charges) if figure else None,
        "claim": plan.sentence(charges, given_weights=FIELD in given) + of_own_code(config)
        if figure
        else no_figure,
        **(_taken_to_be_public(config, given) if figure else {}),
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


def _taken_to_be_public(config: RunConfig, given: Mapping[str, str]) -> dict[str, Any]:
    code = own_code_of(config)
    return {**given, **({CODE_FIELD: code} if code else {})}


def _claimed(figure: Figure, sentence: str) -> str:
    return sentence if math.isfinite(figure.epsilon) else f"{NO_FIGURE}{sentence}"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
