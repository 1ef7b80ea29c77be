"""From a run configuration to a strategy. Everything that can be wrong is found here."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from blackthorn import attacks
from blackthorn.recording.privacy import local_rate_of, participation_of, privacy_plan
from blackthorn.settings.catalogue import facts_of
from blackthorn.settings.config import ConfigError, RunConfig
from blackthorn.settings.derived import clip_units, contraction_of, expected_cohort
from blackthorn.settings.own_code import OWN_CODE_KEYS, guarded_function, is_own_code, own_function
from blackthorn.settings.privacy_checks import is_noised
from blackthorn.settings.robustness_checks import rule_of, unprotected
from blackthorn.strategies import (
    CEFedAvg,
    DPFedAvg,
    DPNormFedAvg,
    FatClippingPI,
    FatClippingPR,
    FederatedStrategy,
    FedLangevin,
    GFedAvg,
    Langevin,
    LangevinRate,
    ModelClipping,
    OutputIterate,
    PrivacyPlan,
    Rage,
    ServerStep,
    StrategyOptions,
)
from blackthorn.strategies.aggregators import (
    Aggregator,
    Buckets,
    Mixing,
    OwnRule,
    RageFilter,
    RobustRule,
    adaptive_clipping,
    nearest_neighbours,
    weighted_mean,
)
from blackthorn.strategies.base import Observer
from blackthorn.strategies.corruption import CorruptionBound
from blackthorn.strategies.fed_langevin import Scheme

logger = logging.getLogger("blackthorn")


def check_names(config: RunConfig) -> None:
    """Raises ConfigError for an attack that is not known, or code of the user's own (FILE.py:
    FUNCTION) that cannot be loaded."""
    for key in OWN_CODE_KEYS:
        name = getattr(config, key)
        if is_own_code(name):
            try:
                own_function(name)
            except ValueError as error:
                raise ConfigError(f"{key} = {name} is not allowed: {error}") from None
    known = ("none", *attacks.names())
    if config.attack not in known and not is_own_code(config.attack):
        raise ConfigError(f"attack = {config.attack!r} is not allowed: {', '.join(known)}")


def build_strategy(
    config: RunConfig,
    observers: Sequence[Observer] = (),
    plan: PrivacyPlan | None = None,
    ledger: Path | None = None,
) -> FederatedStrategy:
    """The strategy that `config` describes.

    A run that adds noise has a privacy plan (computed here if it was not before), and a ledger
    (None: in memory alone).
    """
    warning = unprotected(config, expected_cohort(config))
    if warning:
        logger.warning(warning)
    options = strategy_options(config, observers)
    aggregator = _aggregator(config)
    if aggregator is not None:
        options["aggregator"] = aggregator
    if plan is None and is_noised(config):
        plan = privacy_plan(config)
    if plan is not None:
        del options["participation"]
        private = DPNormFedAvg if config.algorithm == "dp-normfedavg" else DPFedAvg
        return private(plan, ledger=ledger, **options)
    return ALGORITHMS[config.algorithm](config, options)


def _gfedavg(config: RunConfig, options: StrategyOptions) -> FederatedStrategy:
    del config
    return GFedAvg(**options)


def _rage(config: RunConfig, options: StrategyOptions) -> FederatedStrategy:
    if "aggregator" in options:
        # Local SGD under a rule that was asked for by name, to compare with RAGE.
        return GFedAvg(**options)
    num_corrupt = config.num_corrupt if config.num_corrupt >= 0 else None
    return Rage(
        num_corrupt,
        corrupt_fraction=config.corrupt_fraction if num_corrupt is None else None,
        stop=config.rage_stop,
        coordinates=config.rage_coordinates or None,
        average=config.rage_average,
        mixing=_mixing(config),
        **options,
    )


def _fat_clipping_pr(config: RunConfig, options: StrategyOptions) -> FederatedStrategy:
    return FatClippingPR(config.clip_norm, clip_units=clip_units(config), **options)


def _fat_clipping_pi(config: RunConfig, options: StrategyOptions) -> FederatedStrategy:
    return FatClippingPI(
        config.clip_norm, config.local_steps, clip_units=clip_units(config), **options
    )


def _ce_fedavg(config: RunConfig, options: StrategyOptions) -> FederatedStrategy:
    return CEFedAvg(config.clip_norm, clip_units=clip_units(config), **options)


def _model_clipping(config: RunConfig, options: StrategyOptions) -> FederatedStrategy:
    return ModelClipping(config.clip_norm, **options)


def _fa_ld(config: RunConfig, options: StrategyOptions) -> FederatedStrategy:
    # These are the scheme's and the step size's to set.
    for key in ("participation", "weighting", "server_step", "local_rate"):
        options.pop(key)  # type: ignore[misc]
    decays = config.step_size == "decaying"
    rate = LangevinRate(
        config.local_lr,
        strong_convexity=config.strong_convexity if decays else 0.0,
        local_steps=config.local_steps,
    )
    return FedLangevin(
        rate,
        langevin=Langevin(config.temperature, config.shared_noise, config.prior_precision),
        scheme=LANGEVIN_SCHEMES[config.participation],
        draws=config.clients_per_round,
        shared_seed=None if config.langevin_seed < 0 else config.langevin_seed,
        **options,
    )


LANGEVIN_SCHEMES: dict[str, Scheme] = {
    "full": "full",
    "with-replacement": "with-replacement",
    "fixed": "without-replacement",
}

ALGORITHMS: dict[str, Callable[[RunConfig, StrategyOptions], FederatedStrategy]] = {
    "gfedavg": _gfedavg,
    "fat-clipping-pr": _fat_clipping_pr,
    "fat-clipping-pi": _fat_clipping_pi,
    "ce-fedavg": _ce_fedavg,
    "model-clipping": _model_clipping,
    "rage": _rage,
    "fa-ld": _fa_ld,
}


def _aggregator(config: RunConfig) -> Aggregator | None:
    """The rule that the configuration names; None for the algorithm's own."""
    if config.aggregator == "auto" and (
        config.pre_aggregator == "none" or facts_of(config.algorithm).rule != "mean"
    ):
        return None
    rule = rule_of(config)
    mixing = _mixing(config)
    if rule == "mean" and mixing is None:
        return weighted_mean
    if rule == "rage":
        return RageFilter(
            _corruption(config),
            config.rage_stop,
            config.rage_coordinates or None,
            config.rage_average,
            mixing,
        )
    if is_own_code(rule):
        return OwnRule(rule, _corruption(config), mixing=mixing, function=guarded_function(rule))
    name = {"median": "coordinate-median"}.get(rule, rule)
    return RobustRule(name, _corruption(config), _rule_options(config, rule), mixing)


def _rule_options(config: RunConfig, rule: str) -> dict[str, Any]:
    if rule == "multi-krum":
        return {"num_selected": config.krum_selected or None}
    if rule == "centered-clipping":
        return {
            "radius": config.centered_clipping_radius or None,
            "iterations": config.centered_clipping_iterations,
        }
    return {}


def _mixing(config: RunConfig) -> Mixing | None:
    if config.pre_aggregator == "bucketing":
        return Buckets(config.bucket_size)
    return {
        "nearest-neighbour-mixing": nearest_neighbours,
        "adaptive-clipping": adaptive_clipping,
    }.get(config.pre_aggregator)


def _corruption(config: RunConfig) -> CorruptionBound:
    if config.num_corrupt >= 0:
        return CorruptionBound(num_corrupt=config.num_corrupt)
    return CorruptionBound(fraction=config.corrupt_fraction)


def strategy_options(config: RunConfig, observers: Sequence[Observer]) -> StrategyOptions:
    """What the strategy needs to know of the configuration."""
    return {
        "participation": participation_of(config),
        "local_rate": local_rate_of(config),
        "server_step": ServerStep(
            config.server_lr, config.server_momentum, config.projection_radius or None
        ),
        "weighting": config.weighting,
        "identity": "key" if config.node_authentication else "query",
        "num_clients": config.num_clients,
        "start_timeout": config.start_timeout,
        "min_replies": config.min_replies,
        "fail_after": config.fail_after if config.below_quorum == "fail" else None,
        "enough_replies": config.clients_per_round if config.oversample > 1 else None,
        "evaluate_every": config.evaluate_every,
        "output": OutputIterate(config.output_iterate, contraction_of(config)),
        "seed": config.seed,
        "observers": observers,
    }
