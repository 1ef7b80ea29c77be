"""A client's own ledger: what it has sent, on disk before it sends it, whoever asked for it.

One file stands for one client's data. Rounds of all runs and all servers add up in it, so that no
server can have more than the client's policy allows by asking twice, by another round's number or
by another run. It survives the client's restart; a crash after the charge leaves it as if the reply
had been sent.
"""

import json
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blackthorn.strategies.accounting import Charge, Release
from blackthorn.strategies.durable_file import PRIVATE_FOLDER, FileInUse, LockedFile
from blackthorn.strategies.ledger_file import (
    FORMAT,
    begins_anew,
    behind_links,
    charge_entry,
    load,
    read_charge,
    refuse_copy,
    was_elsewhere,
)

_KIND = "client"
# Several of a client's programs may want it at once, each for some milliseconds.
_PATIENCE_SECONDS = 60.0
_LOOK_SECONDS = 0.02


class LedgerUnusable(ValueError):
    """The ledger cannot be read or written, so that nothing may be sent; one line says why."""


@dataclass
class Sent:
    """All replies so far: `last_round` by run, how many `rounds` in all, and what they cost.

    `told_exactly`: whether a run that claims nothing was told of the examples beside its rounds,
    where the client enrolled or evaluated.
    `ledger` tells one client's ledger from another, and a copy from none.
    """

    ledger: str = field(default_factory=lambda: secrets.token_hex(16), compare=False)
    rounds: int = 0
    last_round: dict[str, int] = field(default_factory=dict)
    local: list[Charge] = field(default_factory=list)
    sample: list[Charge] = field(default_factory=list)
    told_exactly: bool = False

    def costs(self) -> tuple[list[Charge], list[Charge]]:
        """All charges of the client's data, and of one example: no noise covers what was told
        exactly."""
        more = [(Release(0.0), 1)] if self.told_exactly else []
        return [*self.local, *more], [*self.sample, *more]

    def add(self, run_id: int, server_round: int, local: Charge, sample: Charge) -> None:
        """Count one more reply."""
        self.rounds += 1
        last = self.last_round.get(str(run_id), 0)
        self.last_round[str(run_id)] = max(last, server_round)
        _append(self.local, local)
        _append(self.sample, sample)


def tell_exactly(sent: Sent) -> None:
    """Count an answer that no noise covers, beside a run's rounds."""
    sent.told_exactly = True


class ClientLedger:
    """The ledger in the file `path`, whatever link leads to it.

    A missing file is an empty ledger, unless `known` says which one has to be there: then neither
    that nor another's may take its place. Raises LedgerUnusable where something else than a file
    is there, or a link to nothing.
    """

    def __init__(self, path: Path, known: str = "") -> None:
        self._known = known
        try:
            self._path = behind_links(path.expanduser())
        except ValueError as error:
            raise LedgerUnusable(str(error)) from None

    @property
    def begins_anew(self) -> str | None:
        """What to tell where there is no file yet."""
        return begins_anew(self._path)

    @property
    def moved(self) -> str | None:
        """What to tell where the file was elsewhere when a reply was last counted. Raises
        LedgerUnusable as `read` does."""
        if not self._path.exists():
            return None
        self.read()
        return was_elsewhere(load(self._path), self._path)

    def read(self) -> Sent:
        """What has been sent. Raises LedgerUnusable for a file that is no client's ledger, or that
        is a copy of one that is still there."""
        try:
            if not self._path.exists():
                return self._as_known(Sent())
            content = load(self._path)
            refuse_copy(content, self._path)
        except (OSError, ValueError) as error:
            raise LedgerUnusable(str(error)) from None
        return self._as_known(_sent_in(content, self._path))

    def _as_known(self, sent: Sent) -> Sent:
        if self._known and sent.ledger != self._known:
            raise LedgerUnusable(
                f"ledger {self._path} is not the one that was there when the client started: put "
                "that back, or start the client again"
            )
        return sent

    def change(self, change: Callable[[Sent], None]) -> Sent:
        """Let `change` check and count, alone, and put what it leaves on disk before returning it.

        What `change` raises leaves the file as it was. Raises LedgerUnusable where it cannot be
        read or written, or others hold it for a minute.
        """
        end = time.monotonic() + _PATIENCE_SECONDS
        while True:
            try:
                return self._change_alone(change)
            except FileInUse:
                if time.monotonic() > end:
                    raise LedgerUnusable(f"ledger {self._path} is in use elsewhere") from None
                time.sleep(_LOOK_SECONDS)
            except OSError as error:
                reason = error.strerror or error
                raise LedgerUnusable(f"ledger {self._path} cannot be kept: {reason}") from None

    def _change_alone(self, change: Callable[[Sent], None]) -> Sent:
        self._path.parent.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
        file = LockedFile(self._path)
        try:
            sent = self.read()
            change(sent)
            text = json.dumps(_content(sent, self._path), indent=2) + "\n"
            file.replace(text.encode())
        finally:
            file.close()
        return sent


def _append(charges: list[Charge], charge: Charge) -> None:
    release, count = charge
    if charges and charges[-1][0] == release:
        charges[-1] = (release, charges[-1][1] + count)
    else:
        charges.append(charge)


def _content(sent: Sent, path: Path) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "kind": _KIND,
        "id": sent.ledger,
        "path": str(path),
        "rounds": sent.rounds,
        "last_round": sent.last_round,
        "local": [charge_entry(charge) for charge in sent.local],
        "sample": [charge_entry(charge) for charge in sent.sample],
        "told_exactly": sent.told_exactly,
    }


def _sent_in(content: dict[str, Any], path: Path) -> Sent:
    if content.get("kind") != _KIND:
        raise LedgerUnusable(f"{path} is not a client's ledger")
    try:
        sent = Sent(
            str(content["id"]),
            _whole(content["rounds"]),
            {str(run): _whole(last) for run, last in content["last_round"].items()},
            [read_charge(entry) for entry in content["local"]],
            [read_charge(entry) for entry in content["sample"]],
            # An earlier version did not note it.
            content.get("told_exactly", False) is not False,
        )
        charged = sum(count for _, count in sent.local)
        if charged != sent.rounds:
            raise ValueError(f"rounds = {sent.rounds}, but {charged} are charged")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise LedgerUnusable(f"ledger {path} is damaged: {type(error).__name__} {error}") from None
    return sent


def _whole(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no number of rounds")
    return value
