"""The privacy ledger: what has been spent, on disk before anything is released.

A crash at any instant leaves a whole file that holds at least what was released, so that it can
only overstate what was spent. A later run on the same clients continues it.
"""

import json
import math
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .accounting import Charge, Figure, Release, replaced, spent
from .durable_file import PRIVATE_FOLDER
from .ledger_file import FORMAT, behind_links, charge_entry, load, read_charge, refuse_copy
from .locked_file import FileInUse, LockedFile
from .privacy_plan import PrivacyPlan
from .release import first_rounds


class LedgerInUse(RuntimeError):
    """A run cannot have the ledger for itself; the message says which and why, in one line."""


class Ledger:
    """Charges of a population, kept in the JSON file `path` (None: in memory alone).

    An existing file is continued, whatever link leads to it. Raises ValueError, one line, for a
    file that is no ledger, whose figures are for other neighbours or another δ than the plan's, or
    that is a copy of one that is still there.
    """

    def __init__(self, plan: PrivacyPlan, path: Path | None = None) -> None:
        self._plan = plan
        self._path = None if path is None else behind_links(path)
        self._charges: list[Charge] = []
        # None: it has none yet, as a ledger without a file.
        self._id: str | None = None
        if self._path is not None and self._path.exists():
            content = load(self._path)
            self._charges = _of_this_kind(content, self._path, plan)
            self._id = content.get("id")
        self.rounds_before = self.rounds
        self._file: LockedFile | None = None
        self._epsilon_rdp: float | None = None
        # Of which release how many rounds in all are known to keep within the budget.
        self._room: tuple[Release | None, int] = (None, 0)

    @property
    def rounds(self) -> int:
        """How many rounds have been charged, those of earlier runs included."""
        return sum(count for _, count in self._charges)

    @property
    def charges(self) -> list[Charge]:
        """All charges so far, in order; equal ones in a row are counted together."""
        return list(self._charges)

    def mark(self) -> dict[str, Any]:
        """Which ledger this is and all that it holds, as JSON values: what a run that may be
        resumed keeps, for `require`."""
        self._id = self._id or secrets.token_hex(16)
        charges = [charge_entry(charge) for charge in self._charges]
        return {"id": self._id, "path": str(self._path), "charges": charges}

    def require(self, mark: Mapping[str, Any] | None) -> None:
        """Go on only as the ledger of which `mark` was made, holding at least what it held then.

        One that has no id yet takes the mark's. Raises ValueError, one line.
        """
        if mark is None:
            raise ValueError("the run was left by an earlier version and does not say which it was")
        self._id = self._id or str(mark["id"])
        if self._id != mark["id"]:
            raise ValueError(f"the run has charged another one (then {mark['path']})")
        held = [read_charge(entry) for entry in mark["charges"]]
        if first_rounds(self._charges, sum(count for _, count in held)) != held:
            raise ValueError("it does not begin with what it held when the run left its state")

    def figure(self) -> Figure:
        """ε of everything that was charged, by the plan's accountant."""
        return spent(self._charges, self._plan.delta, self._plan.accountant)

    def replaced_accountant(self, release: Release, rounds: int) -> str | None:
        """What to tell where, after `rounds` more of `release`, `figure` is another accountant's
        than the plan's."""
        charges = [*self._charges, (release, rounds)]
        return replaced(charges, self._plan.delta, self._plan.accountant)

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
        # More rounds cost more: where they fit, so do fewer. An accountant may take long to ask.
        if release == self._room[0] and self.rounds + rounds <= self._room[1]:
            return True
        charges = [*self._charges, (release, rounds)]
        if spent(charges, self._plan.delta, self._plan.accountant).epsilon > limit:
            return False
        self._room = (release, self.rounds + rounds)
        return True

    def rounds_allowed(self, release: Release, wanted: int) -> int:
        """The largest number of rounds of `release`, up to `wanted`, within the budget."""
        if self._plan.max_epsilon is None or self.allows(release, wanted):
            return wanted
        low, high = 0, wanted
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.allows(release, middle) else (low, middle)
        return low

    def hold(self) -> None:
        """Keep everybody else from charging the file until `close`; a missing one begins here.

        Raises LedgerInUse where another process has it, it is not what this object read, or it
        cannot be written or locked where it is.
        """
        if self._path is None or self._file is not None:
            return
        self._file = _opened(self._path)
        try:
            charges = _charges_in(load(self._path), self._path) if self._path.exists() else []
            if charges != self._charges:
                raise LedgerInUse(f"ledger {self._path} was charged by another run meanwhile")
            if not self._path.exists():
                self._write()
        except BaseException:
            self.close()
            raise

    def charge(self, release: Release) -> None:
        """Add one round, and return only when the file on disk says so.

        Raises LedgerInUse as `hold` does, and where the file was replaced by another.
        """
        self.hold()
        if self._charges and self._charges[-1][0] == release:
            self._charges[-1] = (release, self._charges[-1][1] + 1)
        else:
            self._charges.append((release, 1))
        if release != self._room[0]:
            self._room = (None, 0)
        self._epsilon_rdp = self._quick_epsilon()
        self._write()

    def close(self) -> None:
        """Let another run continue the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self) -> None:
        if self._file is None:
            return
        text = json.dumps(self._content(), indent=2) + "\n"
        try:
            self._file.replace(text.encode())
        except FileInUse:
            raise LedgerInUse(
                f"ledger {self._path} was replaced by another while this run went on: the run "
                "ends here, and nothing more is released"
            ) from None

    def _content(self) -> dict[str, Any]:
        plan = self._plan
        return {
            "format": FORMAT,
            **self.mark(),
            "delta": plan.delta,
            "neighbours": plan.relation,
            "rounds": self.rounds,
            "epsilon_rdp": self._epsilon_rdp,
        }

    def _quick_epsilon(self) -> float | None:
        if any(release.drawn is not None for release, _ in self._charges):
            return None
        epsilon = spent(self._charges, self._plan.delta, "rdp").epsilon
        return epsilon if math.isfinite(epsilon) else None


def read_charges(path: Path) -> list[Charge]:
    """The charges in a ledger file. Raises ValueError, one line, if it is none."""
    return _charges_in(load(path), path)


def _of_this_kind(content: dict[str, Any], path: Path, plan: PrivacyPlan) -> list[Charge]:
    """The charges of a ledger that a run of `plan` may continue."""
    for key, own in (("neighbours", plan.relation), ("delta", plan.delta)):
        if content.get(key) != own:
            raise ValueError(
                f"ledger {path} was kept for {key} = {content.get(key)}, this run's is {own}: "
                "their figures cannot be added"
            )
    refuse_copy(content, path)
    return _charges_in(content, path)


def _check_releases(releases: Sequence[Release], neighbours: object) -> None:
    """Raises ValueError for what no plan for these neighbours is charged."""
    if neighbours not in ("add-remove", "zero-out", "replace-one"):
        raise ValueError(f"neighbours = {neighbours!r:.40}")
    for release in releases:
        if neighbours != "add-remove" and release.sample_rate < 1:
            raise ValueError(f"sample_rate = {release.sample_rate} with neighbours = {neighbours}")
        if neighbours != "replace-one" and release.drawn is not None:
            raise ValueError(f"drawn = {list(release.drawn)} with neighbours = {neighbours}")
        if release.noise_multiplier == 0:
            raise ValueError("noise_multiplier = 0")


def _opened(path: Path) -> LockedFile:
    try:
        path.parent.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
        return LockedFile(path)
    except FileInUse:
        raise LedgerInUse(f"ledger {path} is in use by another run") from None
    except OSError as error:
        raise LedgerInUse(f"ledger {path} cannot be kept there: {error.strerror}") from None


def _charges_in(content: dict[str, Any], path: Path) -> list[Charge]:
    try:
        charges = [read_charge(entry) for entry in content["charges"]]
        total = sum(count for _, count in charges)
        if total != content["rounds"]:
            told = f"{content['rounds']!r:.40}"
            raise ValueError(f"rounds = {told}, but its charges add up to {total}")
        _check_releases([release for release, _ in charges], content["neighbours"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"ledger {path} is damaged: {type(error).__name__} {error}") from None
    return charges
