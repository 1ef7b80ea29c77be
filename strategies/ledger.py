"""The privacy ledger: what has been spent, on disk before anything is released.

A crash at any instant leaves a whole file that holds at least what was released, so that it can
only overstate what was spent. A later run on the same clients continues it. Every charge names
the run that made it, so that a run which goes on after a crash can tell its own ledger from an
older copy that others have charged since.
"""

import json
import logging
import math
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .accounting import Charge, Figure, Release, replaced, spent
from .durable_file import PRIVATE_FOLDER, FileInUse, LockedFile
from .ledger_file import (
    FORMAT,
    Entry,
    begins_anew,
    begins_with,
    behind_links,
    charge_entry,
    charges_of,
    check_releases,
    load,
    read_charge,
    refuse_copy,
    run_of,
    was_elsewhere,
    with_rounds,
)
from .privacy_plan import PrivacyPlan
from .release import LEAST_RATE, SEEN

logger = logging.getLogger("blackthorn")


class LedgerInUse(RuntimeError):
    """A run cannot have the ledger for itself; the message says which and why, in one line."""


class Ledger:
    """Charges of a population, kept in the JSON file `path` (None: in memory alone).

    An existing file is continued, whatever link leads to it. Raises ValueError, one line, for a
    file that is no ledger, whose figures are for other neighbours or another δ than the plan's, or
    that is a copy of one that is still there, and for a rate that no ledger takes.
    """

    def __init__(
        self, plan: PrivacyPlan, path: Path | None = None, *, charged: bool = True
    ) -> None:
        self._plan = plan
        # Whether what is released is charged here: where nothing is, nothing is known of it.
        self._charged = charged
        self._path = None if path is None else behind_links(path)
        if path is not None and plan.sample_rate < LEAST_RATE:
            raise ValueError(
                f"sample rate = {plan.sample_rate} is not allowed with a ledger, which takes no "
                f"rate below {LEAST_RATE:.3g}"
            )
        self._entries: list[Entry] = []
        # None: it has none yet, as a ledger without a file.
        self._id: str | None = None
        # What to tell where the file was elsewhere when it was last charged.
        self.moved: str | None = None
        if self._path is not None and self._path.exists():
            content = load(self._path)
            self._entries = _of_this_kind(content, self._path, plan)
            self._id = content.get("id")
            self.moved = was_elsewhere(content, self._path)
        self._run = secrets.token_hex(8)
        # Charges under that name that are others': only where an earlier version named nobody.
        self._unnamed_before = 0
        self._file: LockedFile | None = None
        self._epsilon_rdp: float | None = None
        # Of which release how many rounds in all are known to keep within the budget.
        self._room: tuple[Release | None, int] = (None, 0)

    @property
    def path(self) -> Path | None:
        """The file itself; None: in memory alone."""
        return self._path

    @property
    def plan(self) -> PrivacyPlan:
        """By whose δ, accountant and budget it counts."""
        return self._plan

    @property
    def rounds(self) -> int:
        """How many rounds have been charged, those of earlier runs included."""
        return sum(entry.rounds for entry in self._entries)

    @property
    def run(self) -> str:
        """The name under which this run is charged; "": an earlier version began it."""
        return self._run

    @property
    def rounds_of_run(self) -> int:
        """How many rounds have been charged to this run, those that it did twice twice."""
        own = sum(entry.rounds for entry in self._entries if entry.run == self._run)
        return max(0, own - self._unnamed_before)

    def on_record(self, release: Release, done: int) -> int:
        """How many rounds of this run after its first `done` are charged, and not again when they
        are done again: of clients that take turns, each is one release."""
        return max(0, self.rounds_of_run - done) if release.groups > 1 else 0

    @property
    def rounds_of_others(self) -> int:
        """How many have been charged to other runs, before this one or while it was down."""
        return self.rounds - self.rounds_of_run

    @property
    def charges(self) -> list[Charge]:
        """All charges so far, in order; equal ones in a row of one run are counted together, where
        clients take turns whoever else charged in between. One of no rounds tells of an open link.
        """
        return charges_of(self._entries)

    def mark(self) -> dict[str, Any]:
        """Which ledger and which run this is, whether what that released is charged, and all that
        it holds, as JSON values: what a run that may be resumed keeps, for `require`."""
        self._id = self._id or secrets.token_hex(16)
        mark = {"id": self._id, "path": str(self._path), "run": self._run, "charged": self._charged}
        before = {} if self._run else {"rounds_before": self._unnamed_before}
        return {**mark, **before, "charges": _written(self._entries)}

    def require(self, mark: Mapping[str, Any] | None, rounds: int = 0) -> None:
        """Go on as the run that left `mark`: only in the ledger of which it was made, which holds
        at least what it held then and `rounds` charges of that run.

        One that has no id yet takes the mark's. Raises ValueError, one line.
        """
        if mark is None:
            raise ValueError("the run was left by an earlier version and does not say which it was")
        # Of a run that writes no states its name alone is known.
        known = mark.get("id", self._id)
        self._id = self._id or known
        if self._id != known:
            raise ValueError(f"the run has charged another one (then {mark['path']})")
        self._run, self._unnamed_before = mark["run"], mark.get("rounds_before", 0)
        if self.rounds_of_run < rounds:
            raise ValueError(
                f"it holds {self.rounds_of_run} rounds of this run, and by what else the run left "
                f"{rounds} had been charged"
            )
        held = [_entry(entry) for entry in mark["charges"]]
        if not begins_with(self._entries, held):
            raise ValueError("it does not begin with what it held when the run left its state")

    def go_on(self, own: Mapping[str, Any]) -> None:
        """Go on as the run that left `own` values of a private strategy. Raises ValueError, one
        line, where that has charged another ledger, or more than this one holds, or charges none
        and this one is charged."""
        mark = mark_of(own)
        if self._charged and mark is not None and not mark.get("charged", False):
            # (Earlier versions did not say it.)
            raise ValueError(
                "from_state is not allowed under a claim: it does not say that what its run "
                "released was charged, and no figure would count that; begin a new run, or set "
                "claim = False"
            )
        try:
            self.require(mark)
        except ValueError as error:
            raise ValueError(f"this ledger is not the run's: {error}; put its own back") from None

    def figure(self) -> Figure:
        """ε of everything that was charged, by the plan's accountant; infinite where the strategy
        charges nothing, whose releases have no figure."""
        if not self._charged:
            return Figure(math.inf, "rdp")
        return spent(self.charges, self._plan.delta, self._plan.accountant)

    def replaced_accountant(self, release: Release, rounds: int) -> str | None:
        """What to tell where, after `rounds` more of `release`, `figure` is another accountant's
        than the plan's."""
        charges = self._charges_with(release, rounds)
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
        charges = self._charges_with(release, rounds)
        if spent(charges, self._plan.delta, self._plan.accountant).epsilon > limit:
            return False
        self._room = (release, self.rounds + rounds)
        return True

    def _charges_with(self, release: Release, rounds: int) -> list[Charge]:
        """All charges after `rounds` more of this run."""
        return charges_of([*self._entries, Entry(release, rounds, self._run)])

    def rounds_allowed(self, release: Release, wanted: int) -> int:
        """The largest number of rounds of `release`, up to `wanted`, within the budget."""
        if self._plan.max_epsilon is None or self.allows(release, wanted):
            return wanted
        low, high = 0, wanted
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.allows(release, middle) else (low, middle)
        return low

    def last_round(self, release: Release, done: int, planned: int) -> int:
        """The last of the `planned` rounds of `release` that a run which has had `done` of them may
        have within the budget; told where that ends it sooner. ValueError where it is not one."""
        held = min(planned, done + self.on_record(release, done))
        last = held + self.rounds_allowed(release, planned - held)
        limit = self._plan.max_epsilon
        if last == 0:
            raise ValueError(
                f"max_epsilon = {limit:g} is not allowed: even one more round would pass it "
                f"({self.rounds} are in the ledger)"
            )
        if last < planned:
            form = "max_epsilon = %g ends the run after %d of %d rounds"
            logger.warning(form, limit, last, planned)
        return last

    def hold(self) -> None:
        """Keep everybody else from charging the file until `close`; a missing one begins here.

        Raises LedgerInUse where another process has it, it is not what this object read, or it
        cannot be written or locked where it is.
        """
        if self._path is None or self._file is not None:
            return
        self._file = _opened(self._path)
        try:
            entries = _entries_in(load(self._path), self._path) if self._path.exists() else []
            if entries != self._entries:
                raise LedgerInUse(f"ledger {self._path} was charged by another run meanwhile")
            anew = begins_anew(self._path)
            if anew is not None:
                self._write()
                logger.warning(anew)
        except BaseException:
            self.close()
            raise

    def charge(self, release: Release) -> None:
        """Add one round, and return only when the file on disk says so.

        Raises LedgerInUse as `hold` does, and where the file was replaced by another.
        """
        self._add(release, 1)

    def note_asked(self, release: Release) -> None:
        """Before clients are asked for a round of `release`: that its link is open, where it is, is
        on disk even if the round is never charged. Costs nothing. Raises as `charge`."""
        if release.link in SEEN:
            self._add(release, 0)

    def _add(self, release: Release, rounds: int) -> None:
        self.hold()
        before, entries = self._entries, with_rounds(self._entries, release, self._run, rounds)
        if entries == before:
            return
        try:
            self._count(entries)
            self._write()
        except BaseException:
            # Nothing is released. Where the file has no charge there is none: a run that goes on
            # would be asked for it, and turns would take it for one that was paid.
            if self._path is not None and self._holds(before):
                self._count(before)
            raise
        if release != self._room[0]:
            self._room = (None, 0)
        if self.moved is not None:
            # Told once: the file has its new place now.
            logger.warning(self.moved)
            self.moved = None

    def _count(self, entries: list[Entry]) -> None:
        self._entries = entries
        self._epsilon_rdp = self._quick_epsilon()

    def _holds(self, entries: Sequence[Entry]) -> bool:
        """Whether the file on disk has these and no more."""
        assert self._path is not None
        try:
            return _entries_in(load(self._path), self._path) == entries
        except ValueError:
            return False

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
        mark = self.mark()
        return {
            "format": FORMAT,
            **{key: mark[key] for key in ("id", "path", "charges")},
            "delta": plan.delta,
            "neighbours": plan.relation,
            "rounds": self.rounds,
            "epsilon_rdp": self._epsilon_rdp,
        }

    def _quick_epsilon(self) -> float | None:
        if not self.rounds or any(one.release.drawn is not None for one in self._entries):
            return None
        epsilon = spent(self.charges, self._plan.delta, "rdp").epsilon
        return epsilon if math.isfinite(epsilon) else None


def mark_of(own: Mapping[str, Any]) -> dict[str, Any] | None:
    """The mark in what a private strategy left as `own_values`; None where none is there.

    An earlier version named no run: all that it charged after the first rounds was its own.
    """
    mark = own.get("ledger")
    if mark is None or "run" in mark:
        return mark
    return {**mark, "run": "", "rounds_before": own["rounds_before"]}


def _of_this_kind(content: dict[str, Any], path: Path, plan: PrivacyPlan) -> list[Entry]:
    """The entries of a ledger that a run of `plan` may continue."""
    for key, own in (("neighbours", plan.relation), ("delta", plan.delta)):
        if content.get(key) != own:
            raise ValueError(
                f"ledger {path} was kept for {key} = {content.get(key)}, this run's is {own}: "
                "their figures cannot be added"
            )
    refuse_copy(content, path)
    return _entries_in(content, path)


def _opened(path: Path) -> LockedFile:
    try:
        path.parent.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
        return LockedFile(path)
    except FileInUse:
        raise LedgerInUse(f"ledger {path} is in use by another run") from None
    except OSError as error:
        raise LedgerInUse(f"ledger {path} cannot be kept there: {error.strerror}") from None


def _written(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    return [{**charge_entry((one.release, one.rounds)), "run": one.run} for one in entries]


def _entry(written: dict[str, Any]) -> Entry:
    return Entry(*read_charge(written), run_of(written))


def _entries_in(content: dict[str, Any], path: Path) -> list[Entry]:
    try:
        entries = [_entry(written) for written in content["charges"]]
        total = sum(entry.rounds for entry in entries)
        if total != content["rounds"]:
            told = f"{content['rounds']!r:.40}"
            raise ValueError(f"rounds = {told}, but its charges add up to {total}")
        check_releases([entry.release for entry in entries], content["neighbours"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"ledger {path} is damaged: {type(error).__name__} {error}") from None
    return entries
