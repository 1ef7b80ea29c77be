"""What an experiment found: a figure as measured, beside what it should be."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from blackthorn.experiments.estimate import Estimate

Verdict = Literal["reproduced", "partly", "not", "not significant", "not checked"]


@dataclass(frozen=True)
class Finding:
    """One line of an experiment's result. `expected` and `measured` are what a person reads;
    `holds` is None where the runs are too few to tell."""

    what: str
    measured: str
    expected: str
    holds: bool | None


def between(
    what: str, value: float | Estimate, low: float, high: float, digits: int = 3
) -> Finding:
    """A figure that should lie from `low` to `high`; either may be infinite.

    Of a mean over seeds the 95 % interval decides: it must be above (below) the bound as a whole
    where there is one bound; where there are two, a mean outside of them counts against it only
    if all of its interval is outside.
    """
    found = value if isinstance(value, Estimate) else Estimate(float(value))
    if math.isinf(high):
        expected, holds = f"above {low:g}", found.above(low)
    elif math.isinf(low):
        expected, below = f"below {high:g}", Estimate(-found.mean, found.error, found.count)
        holds = below.above(-high)
    else:
        expected, holds = f"{low:g} to {high:g}", found.inside(low, high)
    return Finding(what, found.said(digits), expected, holds)


def ahead(
    what: str,
    one: "Sequence[float] | np.ndarray",
    other: "Sequence[float] | np.ndarray",
    expected: str,
    room: float = 0.0,
    digits: int = 1,
) -> Finding:
    """That `one` is above `other`, or by less than `room` below it: values by seed, of which the
    differences decide, seed by seed."""
    difference = Estimate.of_difference(one, other)
    means = [float(np.mean(own)) for own in (one, other)]
    measured = f"{means[0]:.{digits}f} and {means[1]:.{digits}f}"
    if difference.count > 1:
        measured += f", difference {difference.said()}"
    return Finding(what, measured, expected, difference.above(-room))


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper (or, where `ours`, of this project), and what was measured of it.

    The verdict is "reproduced" where all findings hold, "not" where none does, and "partly"
    between; "not significant" where nothing speaks against it and the runs are too few to tell.
    `foreseen` is the verdict that a right implementation comes to (there are sentences that do not
    reproduce), None where that was not known beforehand. `not_checked` says why nothing is said.
    """

    text: str
    findings: Sequence[Finding]
    foreseen: Verdict | None = "reproduced"
    note: str = ""
    not_checked: str = ""
    ours: bool = False

    @property
    def verdict(self) -> Verdict:
        """What the findings come to."""
        held = [finding.holds for finding in self.findings]
        if self.not_checked or not held:
            return "not checked"
        if all(held):
            return "reproduced"
        if False not in held:
            return "not significant"
        return "partly" if any(held) else "not"

    @property
    def verdict_said(self) -> str:
        """The verdict in words that stand alone."""
        return "not reproduced" if self.verdict == "not" else self.verdict

    @property
    def agrees(self) -> bool:
        """Whether the verdict is the one that was foreseen, if any was."""
        return self.foreseen is None or self.verdict in (self.foreseen, "not checked")

    @property
    def sentence(self) -> str:
        """The measured figures, each beside what it should be."""
        if self.verdict == "not checked":
            return f"not checked: {self.not_checked or 'nothing was measured'}"
        said = []
        for finding in self.findings:
            range_said = f" (expected: {finding.expected})" if finding.expected else ""
            if finding.holds is None:
                range_said += ", not significant"
            said.append(f"{finding.what}: {finding.measured}{range_said}")
        return "; ".join(said)


def unchecked(claims: Sequence[Claim], reason: str) -> list[Claim]:
    """The claims with nothing said of them, for the `reason`; as they are for an empty one."""
    return [replace(claim, not_checked=reason) if reason else claim for claim in claims]
