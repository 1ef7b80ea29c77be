"""Aggregation rules: pure functions from updates [K, d] to an `Aggregate`, one file a rule."""

from collections.abc import Callable
from typing import Any

from .aggregate import Aggregate, RoundOfRule
from .bulyan import bulyan
from .caf import caf
from .centered_clipping import centered_clipping
from .coordinate_median import coordinate_median
from .geometric_median import geometric_median
from .krum import krum, multi_krum
from .mean import mean
from .mean_around_median import mean_around_median
from .nearest_to_pivot import monna
from .pre_aggregation import (
    Buckets,
    adaptive_clipping,
    equal_lengths,
    mix,
    nearest_neighbours,
    trace_back,
)
from .rage import rage
from .tightest_subset import mda, smea
from .trimmed_mean import trimmed_mean
from .trusted import clipped_to, fltrust, validated

__all__ = [
    "RULES",
    "Aggregate",
    "Buckets",
    "RoundOfRule",
    "Rule",
    "adaptive_clipping",
    "bulyan",
    "caf",
    "centered_clipping",
    "clipped_to",
    "coordinate_median",
    "equal_lengths",
    "fltrust",
    "geometric_median",
    "get",
    "krum",
    "mda",
    "mean",
    "mean_around_median",
    "mix",
    "monna",
    "multi_krum",
    "nearest_neighbours",
    "rage",
    "smea",
    "trace_back",
    "trimmed_mean",
    "validated",
]

# rule(updates [K, d], num_corrupt, **the rule's own options) -> Aggregate
Rule = Callable[..., Aggregate]


def _mean_rule(updates: Any, num_corrupt: int = 0, *, weights: Any = None) -> Aggregate:
    """`mean` with the arguments of the other rules: it protects against no b and looks at none."""
    del num_corrupt
    return mean(updates, weights)


RULES: dict[str, Rule] = {
    "bulyan": bulyan,
    "caf": caf,
    "centered-clipping": centered_clipping,
    "coordinate-median": coordinate_median,
    "geometric-median": geometric_median,
    "krum": krum,
    "mda": mda,
    "mean": _mean_rule,
    "mean-around-median": mean_around_median,
    "monna": monna,
    "multi-krum": multi_krum,
    "rage": rage,
    "smea": smea,
    "trimmed-mean": trimmed_mean,
}


def get(name: str) -> Rule:
    """The rule of this name, as a function `rule(updates, num_corrupt, **options)`.

    Raises:
        ValueError: for another name than those in RULES.
    """
    if name not in RULES:
        raise ValueError(f"aggregator must be one of {', '.join(RULES)}: got {name!r}")
    return RULES[name]
