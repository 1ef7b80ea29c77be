"""What an experiment found: a figure as measured, beside what it should be."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

Verdict = Literal["reproduced", "partly", "not", "not checked"]


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


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper (or, where `ours`, of this project), and what was measured of it.

    The verdict is "reproduced" where all findings hold, "not" where none does, and "partly"
    between. `foreseen` is the verdict that a right implementation comes to (there are sentences
    that do not reproduce), None where that was not known beforehand. `not_checked` says why
    nothing is said.
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
            said.append(f"{finding.what}: {finding.measured}{range_said}")
        return "; ".join(said)


def unchecked(claims: Sequence[Claim], reason: str) -> list[Claim]:
    """The claims with nothing said of them, for the `reason`; as they are for an empty one."""
    return [replace(claim, not_checked=reason) if reason else claim for claim in claims]
