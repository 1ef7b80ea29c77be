"""What the guard refused, of whom; which keys are barred; and who an operator said a key is.

What must outlive the SuperLink is in `keys.json` of the guard's folder, written whole or not at
all.
"""

import contextlib
import hashlib
import json
import logging
import os
import threading
import time
from collections import deque
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

KEYS = "keys.json"
STRANGERS = "unknown keys"
_HOUR = 3600.0
# A refusal that comes again and again is one line of the log a minute.
_QUIET_SECONDS = 60.0
# Different things that are remembered of strangers and of keys; beyond them only the numbers grow.
_MOST_KINDS = 1000
_LONGEST_WORDS = 300

logger = logging.getLogger("flwr")


@dataclass(frozen=True)
class Registration:
    """What an operator said of a key: its name, its client id, its largest number of examples.

    `barred` says why the guard shut it out (empty: it did not). `replaces` is the fingerprint of
    the same client's key before, as long as that is registered.
    """

    name: str = ""
    client_id: int | None = None
    max_examples: int | None = None
    barred: str = ""
    replaces: str = ""


@dataclass
class Refusal:
    """`count` requests of a kind that were refused; `last` says what was wrong with the last."""

    key: str
    node: int
    kind: str
    last: str
    count: int = 0
    logged: float = -_QUIET_SECONDS


class Records:
    """Refusals by key and kind, and the registrations, for the threads of a SuperLink."""

    def __init__(self, folder: Path, offences: int) -> None:
        """`offences`: in an hour, after which a key is barred. Raises OSError, ValueError."""
        self._file = folder / KEYS
        self._offences_allowed = offences
        self._lock = threading.Lock()
        self._refusals: dict[tuple[str, str], Refusal] = {}
        self._offences: dict[str, deque[float]] = {}
        self._keys: dict[str, Registration] = {}
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            stored = json.loads(self._file.read_text(encoding="utf-8"))
            self._keys = {print_: Registration(**entry) for print_, entry in stored.items()}

    def registration(self, key: bytes) -> Registration:
        """What is known of a key."""
        return self._keys.get(fingerprint(key), Registration())

    def register(self, key: bytes, name: str, changes: dict[str, Any]) -> Registration:
        """Take down what the operator says; a client id is one key's, or that of one key and of the
        one that `replaces` it, which has all that was said of the other (ValueError)."""
        print_ = fingerprint(key)
        with self._lock:
            if "replaces" in changes:
                changes = {**self._said_of(changes["replaces"], print_), **changes}
            known = replace(self._keys.get(print_, Registration()), name=name, **changes)
            wanted = changes.get("client_id")
            for other, its in self._keys.items():
                is_own = other in (print_, known.replaces) or its.replaces == print_
                if wanted is not None and its.client_id == wanted and not is_own:
                    raise ValueError(f"client {wanted} is {its.name or other}'s already")
            self._save(_with_true_pairs({**self._keys, print_: known}))
            return self._keys[print_]

    def _said_of(self, replaced: str, print_: str) -> dict[str, Any]:
        """What a key takes over from the one that it replaces. ValueError."""
        known = self._keys.get(replaced, Registration())
        if known.client_id is None or replaced == print_:
            raise ValueError(f"{known.name or replaced} is no other key of a client to be replaced")
        return {"client_id": known.client_id, "max_examples": known.max_examples}

    def forget(self, key: bytes) -> None:
        """The key was unregistered: its client id is free, or that of the key that replaces it."""
        with self._lock:
            left = {p: k for p, k in self._keys.items() if p != fingerprint(key)}
            if left != self._keys:
                self._save(_with_true_pairs(left))

    def lift(self, key: bytes) -> bool:
        """Let a barred key in again; whether it was barred."""
        print_ = fingerprint(key)
        with self._lock:
            known = self._keys.get(print_, Registration())
            self._offences.pop(print_, None)
            if not known.barred:
                return False
            self._save({**self._keys, print_: replace(known, barred="")})
        logger.warning("guard: %s is let in again", self.name(key))
        return True

    def name(self, key: bytes) -> str:
        """The key's registered name, or its fingerprint."""
        return self.registration(key).name or fingerprint(key)

    def refuse(
        self, kind: str, what: str, key: bytes = b"", node: int = 0, offence: bool = False
    ) -> None:
        """Count a refusal, of strangers where there is no key; log it, not too often.

        An `offence` is what no honest program does: it counts towards being barred.
        """
        name = self.name(key) if key else STRANGERS
        # Some of it may be the sender's, and is shown in terminals.
        what = "".join(c if c.isprintable() else "?" for c in what[:_LONGEST_WORDS])
        now = time.monotonic()
        with self._lock:
            entry = self._refusals.get((name, kind)) or Refusal(name, node, kind, what)
            if len(self._refusals) < _MOST_KINDS:
                self._refusals[name, kind] = entry
            entry.count += 1
            entry.last, entry.node = what, node or entry.node
            known = (name, kind) in self._refusals
            loud = known and now - entry.logged >= _QUIET_SECONDS
            if loud:
                entry.logged = now
            barred = offence and bool(key) and self._count_offence(fingerprint(key), kind, now)
        if loud:
            whose = name + (f" (node {node})" if node else "")
            logger.warning("guard: %s: refused, the %d. time: %s", whose, entry.count, what)
        if barred:
            logger.warning(
                "guard: %s is barred until `blackthorn register --lift`: %d offences in an hour",
                name,
                self._offences_allowed,
            )

    def refusals(self) -> list[dict[str, Any]]:
        """All kinds of refusals since the SuperLink started, with their counts."""
        with self._lock:
            found = [asdict(entry) for entry in self._refusals.values()]
            barred = {k.name or p for p, k in self._keys.items() if k.barred}
        for entry in found:
            del entry["logged"]
            entry["barred"] = entry["key"] in barred
        return found

    def _count_offence(self, print_: str, kind: str, now: float) -> bool:
        """Whether this one bars the key."""
        past = self._offences.setdefault(print_, deque())
        past.append(now)
        while now - past[0] > _HOUR:
            past.popleft()
        known = self._keys.get(print_, Registration())
        if len(past) < self._offences_allowed or known.barred:
            return False
        past.clear()
        barred = {**self._keys, print_: replace(known, barred=kind)}
        # A disk that is full must not let the key in again while the SuperLink runs.
        with contextlib.suppress(OSError):
            self._save(barred)
        self._keys = barred
        return True

    def _save(self, keys: dict[str, Registration]) -> None:
        """From now on these are the registrations. OSError where they cannot be stored."""
        unfinished = self._file.with_suffix(".part")
        try:
            with unfinished.open("w", encoding="utf-8") as output:
                json.dump({p: asdict(k) for p, k in sorted(keys.items())}, output, indent=1)
                output.flush()
                os.fsync(output.fileno())
            unfinished.replace(self._file)
        except OSError as error:
            unfinished.unlink(missing_ok=True)
            raise OSError(error.errno, error.strerror, str(self._file)) from error
        self._keys = keys


def _with_true_pairs(keys: dict[str, Registration]) -> dict[str, Registration]:
    """A key replaces another as long as that is registered, and for the same client."""
    found = {}
    for print_, known in keys.items():
        other = keys.get(known.replaces, Registration())
        is_pair = other.client_id is not None and other.client_id == known.client_id
        found[print_] = known if is_pair else replace(known, replaces="")
    return found


def fingerprint(key: bytes) -> str:
    """A public key's short name: the beginning of its SHA-256, as hexadecimal digits."""
    return "key " + hashlib.sha256(key).hexdigest()[:16]
