"""Keys that were set and that nothing in the run reads: told before it starts."""

from collections.abc import Callable, Sequence

from blackthorn.settings.catalogue import facts_of
from blackthorn.settings.config import RunConfig
from blackthorn.settings.robustness_checks import rule_of


def unused_settings(config: RunConfig) -> list[str]:
    """One line for each key of the adversary and of the rules that has no effect as it is set."""
    rule = rule_of(config)
    notes = []
    own = facts_of(config.algorithm).rule
    if own not in ("mean", rule):
        notes.append(f"aggregator = {rule} replaces the rule of algorithm {config.algorithm}")
    for names, is_read, why in _READERS:
        notes += [
            f"{_key(name)} = {_said(getattr(config, name))} is not used: {why(config)}"
            for name in names
            if getattr(config, name) != RunConfig.model_fields[name].default and not is_read(config)
        ]
    return notes


def _rule(*rules: str) -> Callable[[RunConfig], bool]:
    return lambda config: rule_of(config) in rules


def _aggregator(config: RunConfig) -> str:
    return f"aggregator = {rule_of(config)}"


# The fields, whether the run reads them, and what keeps it from doing so.
_READERS: Sequence[
    tuple[tuple[str, ...], Callable[[RunConfig], bool], Callable[[RunConfig], str]]
] = (
    (
        ("omniscient", "byzantine_set", "collusion"),
        lambda config: config.num_byzantine > 0,
        lambda _: "num-byzantine = 0",
    ),
    (("rage_stop", "rage_coordinates", "rage_average"), _rule("rage"), _aggregator),
    (("krum_selected",), _rule("multi-krum"), _aggregator),
    (
        ("centered_clipping_radius", "centered_clipping_iterations"),
        _rule("centered-clipping"),
        _aggregator,
    ),
    (
        ("bucket_size",),
        lambda config: config.pre_aggregator == "bucketing",
        lambda config: f"pre-aggregator = {config.pre_aggregator}",
    ),
    (
        ("num_corrupt", "corrupt_fraction"),
        lambda config: rule_of(config) != "mean" or config.pre_aggregator != "none",
        _aggregator,
    ),
    (
        ("corrupt_fraction",),
        lambda config: config.num_corrupt < 0,
        lambda config: f"num-corrupt = {config.num_corrupt} counts",
    ),
)


def _key(name: str) -> str:
    return name.replace("_", "-")


def _said(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
