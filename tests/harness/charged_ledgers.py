"""Ledgers that runs have charged."""

from pathlib import Path

from blackthorn.strategies import (
    ClipNorm,
    Ledger,
    PoissonParticipation,
    PrivacyPlan,
)
from blackthorn.strategies.ledger import read_charges


def plan() -> PrivacyPlan:
    return PrivacyPlan(ClipNorm(1.0), 2.0, 2, 100, PoissonParticipation(0.5))


def charge(path: Path, times: int = 1) -> None:
    """A run that charges `times` rounds."""
    ledger = Ledger(plan(), path)
    for _ in range(times):
        ledger.charge(plan().release())
    ledger.close()


def rounds(path: Path) -> int:
    return sum(count for _, count in read_charges(path))
