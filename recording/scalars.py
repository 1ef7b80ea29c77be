"""A round's line as numbers by name, which is all that trackers know."""

import math
from collections.abc import Mapping
from statistics import median
from typing import Any

_LISTS_OF_CLIENTS = ("rejected", "filtered", "over_bound")
_COUNTS = ("invited", "replied")


def scalars(entry: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a line of metrics.jsonl by name, such as clients/rejected.

    Lists of clients count as their lengths, measures by client as their median.
    """
    found: dict[str, Any] = {}
    for key, value in entry.items():
        if key in _COUNTS:
            found[f"clients/{key}"] = value
        elif key in _LISTS_OF_CLIENTS:
            found[f"clients/{key}"] = len(value)
        elif isinstance(value, Mapping):
            found.update({f"{key}/{name}": _number(item) for name, item in value.items()})
        elif key != "round":
            found[key] = value
    return {name: float(value) for name, value in found.items() if _is_finite(value)}


def _number(value: Any) -> Any:
    """The median of a measure by client; anything else as it is."""
    if not isinstance(value, Mapping):
        return value
    known = [item for item in value.values() if _is_finite(item)]
    return median(known) if known else None


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
