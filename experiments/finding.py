"""What an experiment found: a figure as measured, beside what it should be."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One line of an experiment's result. `expected` and `measured` are what a person reads."""

    what: str
    measured: str
    expected: str
    holds: bool


def between(what: str, value: float, low: float, high: float, digits: int = 3) -> Finding:
    """A figure that should lie from `low` to `high`; either may be infinite."""
    if math.isinf(high):
        expected = f"above {low:g}"
    elif math.isinf(low):
        expected = f"below {high:g}"
    else:
        expected = f"{low:g} to {high:g}"
    return Finding(what, f"{value:.{digits}g}", expected, low <= value <= high)
