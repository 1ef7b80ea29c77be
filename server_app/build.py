"""From a run configuration to a strategy. Everything that can be wrong is found here."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from blackthorn import attacks
from blackthorn.recording.privacy import local_rate_of, participation_of, privacy_plan
from blackthorn.recording.suspects import SuspectWatch, WithoutSuspects
from blackthorn.server_app.trusted_data import trusted_examples
from blackthorn.settings.catalogue import TRUSTED
from blackthorn.settings.config import ConfigError, RunConfig, to_mapping
from blackthorn.settings.derived import chain_seed, contraction_of, expected_cohort
from blackthorn.settings.own_code import (
    OWN_CODE_KEYS,
    guarded_function,
    in_one_line,
    is_own_code,
    own_function,
    read_anew,
)
from blackthorn.settings.privacy_checks import is_noised
from blackthorn.settings.robustness_checks import by_products, rule_of, unprotected
from blackthorn.strategies import (
    FederatedStrategy,
    OutputIterate,
    PrivacyPlan,
    ServerStep,
    StrategyOptions,
)
from blackthorn.strategies.aggregation import (
    Buckets,
    adaptive_clipping,
    equal_lengths,
    nearest_neighbours,
)
from blackthorn.strategies.aggregation.mean import weighted_mean
from blackthorn.strategies.aggregators import (
    Aggregator,
    CorruptionBound,
    Mixing,
    OwnRule,
    RageFilter,
    RobustRule,
)
from blackthorn.strategies.algorithms import (
    algorithm_class,
    build_own,
    check_own_algorithm,
    check_own_mechanism,
    check_training,
)
from blackthorn.strategies.judging import Judge
from blackthorn.strategies.options import Observer, PrivateOptions
from blackthorn.strategies.rounds import RoundContext
from blackthorn.strategies.trusted import FLTrust, Validated
from blackthorn.tasks.problem import Problem

logger = logging.getLogger("blackthorn")


def check_names(config: RunConfig) -> None:
    """Before a run: read code of the user's own (FILE.py:FUNCTION), which then stays as it is.

    Raises ConfigError for an attack that is not known, or code that cannot be loaded.
    """
    read_anew()
    values = to_mapping(config)
    for key in OWN_CODE_KEYS:
        name = str(values[key])
        if is_own_code(name):
            try:
                own_function(name)
            except ValueError as error:
                raise ConfigError(f"{key} = {name} is not allowed: {error}") from None
    try:
        check_own_algorithm(config)
    except ConfigError:
        raise
    except ValueError as error:
        name = config.algorithm
        raise ConfigError(
            f"algorithm = {name} is not allowed: {error}" if is_own_code(name) else str(error)
        ) from None
    known = ("none", *attacks.names())
    if config.attack not in known and not is_own_code(config.attack):
        raise ConfigError(f"attack = {config.attack!r} is not allowed: {', '.join(known)}")


def check_halves(
    config: RunConfig, plan: PrivacyPlan | None, problem: Problem, ledger: Path | None
) -> None:
    """Raises ConfigError where an algorithm of the user's own cannot be built, or its server would
    ask for another rule than its clients carry out."""
    try:
        strategy = build_strategy(config, plan=plan, ledger=ledger)
        start = problem.model.flatten(problem.state())
        with in_one_line(config.algorithm):
            rule = strategy.local_rule(RoundContext(1, config.local_lr, start))
            check_training(config, rule)
            asked = rule.sent
            own = strategy.configured_rule(config, config.local_lr, asked).sent
    except ValueError as error:
        raise ConfigError(f"algorithm = {config.algorithm} is not allowed: {error}") from error
    if asked != own:
        raise ConfigError(
            f"algorithm = {config.algorithm} is not allowed: its local_rule asks for {asked}, and "
            f"its configured_rule carries out {own}"
        )


def build_strategy(
    config: RunConfig,
    observers: Sequence[Observer] = (),
    plan: PrivacyPlan | None = None,
    ledger: Path | None = None,
    noises: Path | None = None,
    watch: SuspectWatch | None = None,
) -> FederatedStrategy:
    """The strategy that `config` describes.

    A run that adds noise has a privacy plan (computed here if it was not before), a ledger and,
    where clients take turns, a folder of its noises (None: in memory alone). `watch`: who is left
    out of cohorts, with quarantine-after.
    """
    warning = unprotected(config, expected_cohort(config))
    if warning:
        logger.warning(warning)
    return _built(config, observers, plan, ledger, noises, watch)


def _built(
    config: RunConfig,
    observers: Sequence[Observer] = (),
    plan: PrivacyPlan | None = None,
    ledger: Path | None = None,
    noises: Path | None = None,
    watch: SuspectWatch | None = None,
) -> FederatedStrategy:
    options = strategy_options(config, observers)
    aggregator = _aggregator(config)
    if aggregator is not None:
        options["aggregator"] = aggregator
    if watch is not None and config.quarantine_after:
        options["participation"] = WithoutSuspects(options["participation"], watch)
    if plan is None and is_noised(config):
        plan = privacy_plan(config)
    own = is_own_code(config.algorithm)
    build = build_own if own else _build_published
    if plan is None:
        return build(config, options)
    del options["participation"]  # the plan's
    private = PrivateOptions(**options, privacy=plan, ledger=ledger)
    if noises is not None:
        private["noises"] = noises
    if config.denominator != "fixed":
        private["denominator"] = config.denominator
    strategy = build(config, private)
    if own and plan.claim:
        check_own_mechanism(strategy, plan, options, ledger)
    return strategy


def _build_published(config: RunConfig, options: StrategyOptions) -> FederatedStrategy:
    return algorithm_class(config).build(config, options)


def server_rule(config: RunConfig) -> attacks.RuleAt:
    """What the server makes of a round's updates, at a round, a rate and a model: for an attacker
    who knows the configuration (`attacks/adaptive.py`). Noise for privacy is left out."""
    built: list[FederatedStrategy] = []

    def at(server_round: int, local_lr: float, model: torch.Tensor) -> attacks.ServerRule:
        if not built:
            built.append(_built(config))
        context = RoundContext(server_round, local_lr, model)

        def rule(updates: torch.Tensor) -> torch.Tensor:
            count = len(updates)
            weights = torch.full((count,), 1 / count, dtype=torch.float64)
            return built[0].aggregate(updates, weights, context).vector

        return attacks.ServerRule(rule, by_products(config))

    return at


def _aggregator(config: RunConfig) -> Aggregator | None:
    """The rule that the configuration names, or the algorithm has; None for the plain mean of one
    that was not asked for."""
    rule, mixing = rule_of(config), _mixing(config)
    if config.aggregator == "auto" and rule == "mean" and mixing is None:
        return None
    if rule == "mean" and mixing is None:
        return weighted_mean
    if rule == "rage":
        spectral = {
            "sigma0_squared": config.rage_variance,
            "spectral_constant": config.rage_constant,
        }
        return RageFilter(
            _corruption(config),
            config.rage_stop,
            config.rage_coordinates or None,
            config.rage_average,
            mixing,
            **(spectral if config.rage_stop == "spectral" else {}),
        )
    if rule in TRUSTED:
        trusted = trusted_examples(config)
        return FLTrust(trusted) if rule == "fltrust" else Validated(trusted, _corruption(config))
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
        "equal-lengths": equal_lengths,
    }.get(config.pre_aggregator)


def _corruption(config: RunConfig) -> CorruptionBound:
    if config.num_corrupt >= 0:
        return CorruptionBound(num_corrupt=config.num_corrupt)
    return CorruptionBound(fraction=config.corrupt_fraction)


def _judge(config: RunConfig) -> Judge:
    return Judge(config.minimise or config.maximise, higher=not config.minimise)


def strategy_options(config: RunConfig, observers: Sequence[Observer]) -> StrategyOptions:
    """What the strategy needs to know of the configuration."""
    return {
        "participation": participation_of(config),
        "local_rate": local_rate_of(config),
        "server_step": ServerStep(
            config.server_lr,
            config.server_momentum,
            config.projection_radius or None,
            config.projection,
            config.projection_center,
        ),
        "weighting": config.weighting,
        "statistics": config.statistics,
        "identity": "key" if config.node_authentication else "query",
        "num_clients": config.num_clients,
        "start_timeout": config.start_timeout,
        "min_replies": config.min_replies,
        "fail_after": config.fail_after if config.below_quorum == "fail" else None,
        "enough_replies": config.clients_per_round if config.oversample > 1 else None,
        "evaluate_every": config.evaluate_every,
        "output": OutputIterate(config.output_iterate, contraction_of(config), _judge(config)),
        "seed": chain_seed(config),
        "observers": observers,
    }
