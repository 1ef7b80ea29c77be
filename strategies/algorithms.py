"""From the key `algorithm` to the class that it names, imported when it is needed; what holds of a
class of the user's own, FILE.py:NAME, before anybody is contacted."""

import inspect
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache, wraps
from pathlib import Path
from typing import Any

from torch import Tensor

from blackthorn.settings.algorithm_checks import check_algorithm
from blackthorn.settings.catalogue import ALGORITHMS, Facts, facts_of, load
from blackthorn.settings.config import RunConfig
from blackthorn.settings.keys import Keys
from blackthorn.settings.own_code import (
    OwnCodeFailed,
    guard,
    in_one_line,
    is_own_code,
    own_function,
)
from blackthorn.settings.privacy_checks import OR_NO_CLAIM, claims_privacy, is_noised

from .aggregation import Aggregate
from .base import FederatedStrategy
from .bounding import NormBound
from .ledger_file import behind_links
from .local_rule import LocalRule
from .options import StrategyOptions
from .own_mechanism import (
    OF_NO_CLAIM,
    check_untouched,
    in_own_classes,
    names_of,
    overridden,
    published,
    seeing_releases_alone,
)
from .participation import CohortPlan
from .privacy_plan import PrivacyPlan
from .private_averaging import PrivateAveraging
from .rounds import RoundContext

# What hooks give: anything else would end a run far from where it came from.
_GIVES: dict[str, type] = {
    "build": FederatedStrategy,
    "draw_cohort": CohortPlan,
    "local_rule": LocalRule,
    "configured_rule": LocalRule,
    "norm_bound": NormBound,
    "bound": Tensor,
    "combine": Aggregate,
    "aggregate": Aggregate,
    "on_aggregate": Tensor,
    "rounds_allowed": int,
    "own_values": dict,
}
# By what clients are asked in a run, and how often is counted.
_ASKING = {
    *(name for name in vars(FederatedStrategy) if not name.startswith(("__", "_abc"))),
    "gather",
} - {"build", "summary"}
_COUNTED = {"rounds_begun": 0, "knows_rounds_begun": True, "_round": 0, "_asked_round": 0}
_SETTABLE = ("clip_norm", "mean_only", "own_steps", "samples_posterior", "participation", "leaves")


def algorithm_class(config: Keys) -> type[FederatedStrategy]:
    """The Strategy that runs: the noised one where noise for privacy is asked for.

    Raises ValueError, one line, for one of the user's own that cannot be loaded.
    """
    if is_own_code(config.algorithm):
        return _own_class(config.algorithm)
    facts = facts_of(config.algorithm)
    found: type[FederatedStrategy] = load(facts.noised if is_noised(config) else facts.where)
    return found


def algorithm_facts(config: Keys) -> Facts:
    """The facts of the algorithm that runs: of an own one those of the published class that it
    stands on, which its own may make narrower.

    Raises ValueError, one line, for own ones that say more.
    """
    if not is_own_code(config.algorithm):
        return facts_of(config.algorithm)
    return _own_facts(algorithm_class(config))


def _own_facts(found: type[FederatedStrategy]) -> Facts:
    # As it stands in the class: a descriptor might give others at every look.
    own, row = inspect.getattr_static(found, "facts"), _row_of(found)[1]
    if type(own) is not Facts:
        raise ValueError(f"its facts are {own!r:.60}, no Facts of blackthorn.settings.catalogue")
    if own != replace(Facts(), **{name: getattr(own, name) for name in _SETTABLE}):
        raise ValueError(f"its facts say more than {', '.join(_SETTABLE)}")
    said = own is not FederatedStrategy.facts
    return replace(
        row,
        clip_norm=own.clip_norm if row.clip_norm != "needed" else "needed",
        mean_only=own.mean_only or row.mean_only,
        own_steps=own.own_steps or row.own_steps,
        samples_posterior=own.samples_posterior or row.samples_posterior,
        participation=tuple(
            kind for kind in row.participation if not said or kind in own.participation
        ),
        leaves={**own.leaves, **row.leaves},
    )


def _row_of(found: type[FederatedStrategy]) -> tuple[str, Facts]:
    """The published system nearest to a class, and what is known of it."""
    rows = [(name, row, load(row.where)) for name, row in ALGORITHMS.items()]
    for one in found.__mro__:
        for name, row, its_class in rows:
            if one is its_class:
                return name, row
    # No sampler of ours draws one client twice.
    ours = FederatedStrategy.draw_cohort, PrivateAveraging.draw_cohort
    drawn = () if found.draw_cohort in ours else ("with-replacement",)
    return "FederatedStrategy", Facts(participation=(*Facts().participation, *drawn))


def check_own_algorithm(config: RunConfig) -> None:
    """Raises ValueError, one line, where the run's keys do not go with what the class of an own
    algorithm says of itself and, under a claim of privacy, where it touches the mechanism."""
    found = algorithm_class(config)
    if not is_own_code(config.algorithm):
        found.option_values(config)
        return
    with in_one_line(config.algorithm):
        found.option_values(config)
        _check_own(config, found)


def build_own(config: RunConfig, options: StrategyOptions) -> FederatedStrategy:
    """What the class of an own algorithm builds. Raises ValueError, one line, where it cannot."""
    with in_one_line(config.algorithm):
        built = algorithm_class(config).build(config, options)
    if not hasattr(built, "rounds_begun"):
        raise ValueError("its constructor has not called that of FederatedStrategy")
    if config.local_dp_sgd:
        held = vars(built)
        _refuse_asking(
            held.keys() & _ASKING | {name for name, n in _COUNTED.items() if held[name] != n}
        )
    return built


def _check_own(config: RunConfig, found: type[FederatedStrategy]) -> None:
    facts = _own_facts(found)
    _check_named(config, found)
    private = issubclass(found, PrivateAveraging)
    if private != is_noised(config):
        raise ValueError(
            "it stands on PrivateAveraging: set noise-multiplier or epsilon above 0"
            if private
            else "it does not stand on PrivateAveraging, which alone adds noise: set "
            "noise-multiplier = 0 and epsilon = 0"
        )
    check_algorithm(config, facts)
    if config.local_dp_sgd:
        _check_asking(found)
    if private and claims_privacy(config):
        check_untouched("it", overridden(found), OR_NO_CLAIM)
        if facts.samples_posterior:
            raise ValueError(
                "its facts say samples_posterior, and no privacy is claimed for samples, which say "
                f"how many clients were asked and answered: leave it out, {OR_NO_CLAIM}"
            )


def _check_asking(found: type[FederatedStrategy]) -> None:
    """What an example has spent is known of one exchange a round, on record before anybody is
    asked: who asks otherwise has clients train more often. Raises ValueError, one line."""
    base = next(one for one in found.__mro__ if not _is_own(one))
    _refuse_asking(in_own_classes(found, base) & {*_ASKING, *_COUNTED})


def _refuse_asking(touched: set[str]) -> None:
    if touched:
        raise ValueError(
            f"it overrides {', '.join(sorted(touched))} of FederatedStrategy, by which clients are "
            "asked, so that what an example spends is not known: leave that alone, or set "
            "local-dp-sgd = false"
        )


def _check_named(config: RunConfig, found: type[FederatedStrategy]) -> None:
    """What `auto` stands for is known of published names alone: of an own class it has to be said
    where that of the class that it stands on is not the usual."""
    base, row = _row_of(found)
    for key, usual, own in (
        ("clip-units", "gradient", row.units),
        ("aggregator", "mean", row.rule),
    ):
        if getattr(config, key.replace("-", "_")) == "auto" and own != usual:
            raise ValueError(f"{key} = auto is not known of it: set {key} = {own}, as of {base}")


def check_training(config: RunConfig, rule: LocalRule) -> None:
    """Raises ValueError where a client that trains by DP-SGD would attest steps that it has not
    done: whatever an algorithm's facts say, its rule tells."""
    if config.local_dp_sgd and rule.is_in_training:
        raise ValueError(
            f"local-dp-sgd = true is not allowed with algorithm {config.algorithm}, whose rule "
            f"{rule.name} is carried out at every step: set local-dp-sgd = false"
        )


def check_own_mechanism(
    strategy: FederatedStrategy, plan: PrivacyPlan, options: StrategyOptions, ledger: Path | None
) -> None:
    """Raises ValueError, one line, where the constructor of an own algorithm that claims privacy
    has put something in place of the mechanism, has not passed on the plan or the ledger, or has
    left what cannot be copied."""
    assert isinstance(strategy, PrivateAveraging)  # as it claims privacy
    path = None if ledger is None else behind_links(ledger)
    ledger_is_of = strategy.ledger.plan, strategy.ledger.path
    if strategy.privacy != plan or ledger_is_of != (plan, path):
        raise ValueError("its constructor or its build has not passed on privacy and ledger")
    # `build` may have given another class than the one that is named.
    check_untouched("it", overridden(type(strategy)), OR_NO_CLAIM)
    base = published(type(strategy))
    usual = vars(base(plan, **options))
    held = vars(strategy)
    # In the class they would stand before the object's, as a property does.
    check_untouched("it", in_own_classes(type(strategy), base) & usual.keys(), OR_NO_CLAIM)
    own = {name for name in held.keys() & names_of(base) if name not in usual}
    changed = {name for name in usual.keys() - OF_NO_CLAIM if _differs(held, usual, name)}
    check_untouched("it", own | changed, OR_NO_CLAIM)
    # Here already it is found what it holds that could not be copied.
    seeing_releases_alone(strategy)


def _differs(held: Mapping[str, Any], usual: Mapping[str, Any], name: str) -> bool:
    """Whether an attribute of a strategy is not what its class has there: of values that cannot be
    compared, as registries, another kind of them."""
    found, expected = held.get(name), usual[name]
    comparable = type(expected).__eq__ is not object.__eq__ or callable(expected)
    return type(found) is not type(expected) or (comparable and found != expected)


def _is_own(one: type) -> bool:
    """Whether the user wrote it, in the file that is named or in a module beside it."""
    return one.__module__.partition(".")[0] not in ("blackthorn", "flwr", "abc", "builtins")


def _in_its_shape(bound: Any, name: str) -> Any:
    @wraps(bound)
    def checked(self: FederatedStrategy, updates: Tensor, context: RoundContext) -> Any:
        bounded = bound(self, updates, context)
        if bounded.shape != updates.shape:
            shapes = [*updates.shape], [*bounded.shape]
            raise OwnCodeFailed(f"{name}: bound gave the shape {shapes[1]}, not {shapes[0]}")
        return bounded

    return checked


@lru_cache
def _own_class(name: str) -> type[FederatedStrategy]:
    found: Any = own_function(name)
    if not (isinstance(found, type) and issubclass(found, FederatedStrategy)):
        raise ValueError(f"{name} is no subclass of blackthorn.strategies.FederatedStrategy")
    # What its hooks raise, of whatever kind, is one line; in a round it leaves the model as it was.
    for one in filter(_is_own, found.__mro__):
        for key, method in list(vars(one).items()):
            if key == "__init__" or (hasattr(FederatedStrategy, key) and not key.startswith("__")):
                guarded = guard(method, name, _GIVES.get(key))
                setattr(one, key, _in_its_shape(guarded, name) if key == "bound" else guarded)
    return found
