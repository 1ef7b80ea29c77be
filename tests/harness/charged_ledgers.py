"""Ledgers that runs have charged."""

import json
from pathlib import Path

from blackthorn.strategies import (
    ClipNorm,
    Ledger,
    PoissonParticipation,
    PrivacyPlan,
)
from blackthorn.strategies.ledger_file import read_charge
from blackthorn.strategies.release import Charge


def plan() -> PrivacyPlan:
    return PrivacyPlan(ClipNorm(1.0), 2.0, 2, 100, PoissonParticipation(0.5))


def charge(path: Path, times: int = 1) -> None:
    """A run that charges `times` rounds."""
    ledger = Ledger(plan(), path)
    for _ in range(times):
        ledger.charge(plan().release())
    ledger.close()


def read_charges(path: Path) -> list[Charge]:
    """What the file lists, in its order."""
    return [read_charge(entry) for entry in json.loads(path.read_text())["charges"]]


def rounds_in(path: Path) -> int:
    """How many rounds a ledger holds, of whichever runs."""
    return sum(count for _, count in read_charges(path))
