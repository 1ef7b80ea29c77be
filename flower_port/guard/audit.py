"""Who told the server to do what: audit.jsonl, a line of JSON an event, only ever appended to.

Each line holds the SHA-256 of the line before it, so that one that was changed or taken out is
found; the last lines, cut off, are not: copy the file, or its last line's digest, elsewhere.

    python -m blackthorn.flower_port.guard.audit state/guard/audit.jsonl
"""

import contextlib
import fcntl
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

FILE = "audit.jsonl"
_BEFORE = "before"
_NOTHING = "0" * 64
# The last line is looked for in so many bytes.
_LONGEST_LINE = 16_384
_LONGEST_TEXT = 500
# Another change is written down by then.
_PATIENCE_SECONDS, _LOOK_SECONDS = 10.0, 0.02

Write = Callable[..., None]


class AuditLog:
    """Appends to a file that several processes may append to, its owner's alone."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @contextlib.contextmanager
    def open(self) -> Iterator[Write]:
        """`write(event, **fields)` for what is done in the block, which nobody else interrupts.

        Raises OSError where the file cannot be had or somebody else has it for ten seconds, as does
        `write` where nothing can be written to it.
        """
        descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        with os.fdopen(descriptor, "a+b") as stream:
            _lock(stream)
            yield lambda event, **fields: _append(stream, event, fields)

    def write(self, event: str, **fields: Any) -> None:
        """Append one event; it is on disk when this returns. Raises OSError."""
        with self.open() as write:
            write(event, **fields)


def _lock(stream: BinaryIO) -> None:
    end = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            return fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                raise
            time.sleep(_LOOK_SECONDS)


def _append(stream: BinaryIO, event: str, fields: dict[str, Any]) -> None:
    told = {name: _cut(value) for name, value in fields.items() if value is not None}
    entry = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event, **told}
    entry[_BEFORE] = _digest(_last_line(stream))
    stream.write(json.dumps(entry).encode() + b"\n")
    stream.flush()
    os.fsync(stream.fileno())


def _cut(value: Any) -> Any:
    return value[:_LONGEST_TEXT] if isinstance(value, str) else value


def _last_line(stream: BinaryIO) -> bytes:
    """Without its end; one that a crash tore is ended, so that the next begins a line."""
    size = stream.seek(0, os.SEEK_END)
    stream.seek(max(0, size - _LONGEST_LINE))
    end = stream.read()
    if end and not end.endswith(b"\n"):
        stream.write(b"\n")
    return end.rstrip(b"\n").rpartition(b"\n")[2]


def _digest(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest() if line else _NOTHING


def check(path: Path) -> str:
    """What is wrong with the file, its first line that does not fit the one before; empty: nothing.

    Raises OSError.
    """
    before = b""
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            entry = json.loads(line)
            fits = entry[_BEFORE] == _digest(before)
        except (ValueError, KeyError, TypeError):
            return f"line {number} is no event"
        if not fits:
            return f"line {number} does not follow the one before, which was changed or taken out"
        before = line
    return ""


def main() -> None:
    """Check the file that is named; exit code 1 where it was changed."""
    if len(sys.argv) != 2:
        sys.exit("error: name one file, such as state/guard/audit.jsonl")
    path = Path(sys.argv[1])
    wrong = check(path)
    if wrong:
        sys.exit(f"{path}: {wrong}")
    lines = path.read_bytes().splitlines()
    print(f"{len(lines)} events, the last with digest {_digest(lines[-1] if lines else b'')}")


if __name__ == "__main__":
    main()
