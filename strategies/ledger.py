"""The privacy ledger: what has been spent, on disk before anything is released.

A crash at any instant leaves a whole file that holds at least what was released, so that it can
only overstate what was spent. A later run on the same clients continues it.
"""

import fcntl
import json
import math
from pathlib import Path
from typing import IO, Any

from .accounting import Charge, Figure, Release, spent
from .durable_file import replace_file
from .privacy_plan import PrivacyPlan

_FORMAT = 1


class LedgerInUse(RuntimeError):
    """Two runs would charge one ledger; the message says which, in one line."""


class Ledger:
    """Charges of a population, kept in the JSON file `path` (None: in memory alone).

    An existing file is continued. Raises ValueError, one line, for a file that is no ledger or
    whose figures are for other neighbours or another δ than the plan's.
    """

    def __init__(self, plan: PrivacyPlan, path: Path | None = None) -> None:
        self._plan = plan
        self._path = path
        self._charges: list[Charge] = []
        if path is not None and path.exists():
            self._charges = _read(path, plan)
        self.rounds_before = self.rounds
        self._lock: IO[str] | None = None
        self._epsilon_rdp: float | None = None

    @property
    def rounds(self) -> int:
        """How many rounds have been charged, those of earlier runs included."""
        return sum(count for _, count in self._charges)

    @property
    def charges(self) -> list[Charge]:
        """All charges so far, in order; equal ones in a row are counted together."""
        return list(self._charges)

    def figure(self) -> Figure:
        """ε of everything that was charged, by the plan's accountant."""
        return spent(self._charges, self._plan.delta, self._plan.accountant)

    @property
    def epsilon_rdp(self) -> float | None:
        """ε of everything that was charged, by RDP: never below `figure`, and always at hand.

        None before the first charge, for cohorts without replacement, whose accountant takes too
        long to ask in every round, and where it is infinite.
        """
        return self._epsilon_rdp

    def allows(self, release: Release, rounds: int = 1) -> bool:
        """Whether `rounds` more of `release` keep within the plan's budget."""
        limit = self._plan.max_epsilon
        if limit is None:
            return True
        charges = [*self._charges, (release, rounds)]
        return spent(charges, self._plan.delta, self._plan.accountant).epsilon <= limit

    def rounds_allowed(self, release: Release, wanted: int) -> int:
        """The largest number of rounds of `release`, up to `wanted`, within the budget."""
        if self._plan.max_epsilon is None or self.allows(release, wanted):
            return wanted
        low, high = 0, wanted
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.allows(release, middle) else (low, middle)
        return low

    def charge(self, release: Release) -> None:
        """Add one round, and return only when the file on disk says so.

        Raises LedgerInUse where another process charges the same file.
        """
        if self._path is not None and self._lock is None:
            self._lock = _lock(self._path)
            if self._path.exists() and _read(self._path, self._plan) != self._charges:
                raise LedgerInUse(f"ledger {self._path} was charged by another run meanwhile")
        if self._charges and self._charges[-1][0] == release:
            self._charges[-1] = (release, self._charges[-1][1] + 1)
        else:
            self._charges.append((release, 1))
        self._epsilon_rdp = self._quick_epsilon()
        if self._path is not None:
            text = json.dumps(self._content(), indent=2) + "\n"
            replace_file(self._path, text.encode())

    def close(self) -> None:
        """Let another run continue the file."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _content(self) -> dict[str, Any]:
        plan = self._plan
        return {
            "format": _FORMAT,
            "delta": plan.delta,
            "neighbours": plan.relation,
            "rounds": self.rounds,
            "epsilon_rdp": self._epsilon_rdp,
            "charges": [
                {
                    "rounds": count,
                    "noise_multiplier": release.noise_multiplier,
                    "sample_rate": release.sample_rate,
                    "drawn": list(release.drawn) if release.drawn else None,
                }
                for release, count in self._charges
            ],
        }

    def _quick_epsilon(self) -> float | None:
        if any(release.drawn is not None for release, _ in self._charges):
            return None
        epsilon = spent(self._charges, self._plan.delta, "rdp").epsilon
        return epsilon if math.isfinite(epsilon) else None


def read_charges(path: Path) -> list[Charge]:
    """The charges in a ledger file. Raises ValueError, one line, if it is none."""
    return _charges_in(_load(path), path)


def _read(path: Path, plan: PrivacyPlan) -> list[Charge]:
    content = _load(path)
    for key, own in (("neighbours", plan.relation), ("delta", plan.delta)):
        if content.get(key) != own:
            raise ValueError(
                f"ledger {path} was kept for {key} = {content.get(key)}, this run's is {own}: "
                "their figures cannot be added"
            )
    return _charges_in(content, path)


def _load(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"ledger {path} cannot be read: {error}") from None
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise ValueError(f"{path} is not a privacy ledger of format {_FORMAT}")
    return content


def _charges_in(content: dict[str, Any], path: Path) -> list[Charge]:
    try:
        return [
            (
                Release(
                    float(entry["noise_multiplier"]),
                    float(entry["sample_rate"]),
                    tuple(map(int, entry["drawn"])) if entry["drawn"] else None,  # type: ignore[arg-type]
                ),
                int(entry["rounds"]),
            )
            for entry in content["charges"]
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"ledger {path} is damaged: {type(error).__name__} {error}") from None


def _lock(path: Path) -> IO[str]:
    """Held as long as this process lives: two runs that write one ledger would lose charges."""
    path.parent.mkdir(parents=True, exist_ok=True)
    stream = path.with_name(f".{path.name}.lock").open("w")
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        stream.close()
        raise LedgerInUse(f"ledger {path} is in use by another run") from None
    return stream
