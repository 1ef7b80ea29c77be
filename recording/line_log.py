"""A file of JSON objects, one a line and a round, to which one process appends."""

import contextlib
import fcntl
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blackthorn.settings.config import ConfigError
from blackthorn.strategies.durable_file import open_file, sync_folder


class LineLog:
    """Appends to `path` (created where it is missing) until it is closed.

    `alone`: raises ConfigError where another process has it open with `alone` too. `private`: only
    its owner may read it.
    """

    def __init__(self, path: Path, *, alone: bool = False, private: bool = False) -> None:
        self.path = path
        self._named = False
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT
        self._stream = os.fdopen(open_file(path, flags, private=private), "a+b")
        if alone and not _locked(self._stream.fileno()):
            self._stream.close()
            raise ConfigError(f"{path.parent} is in use by a run that has not ended")

    def append(self, entry: Mapping[str, Any]) -> None:
        """Write a line; it survives this process, and after `sync` the machine too.

        Raises OSError, once and for all, where it cannot be written.
        """
        try:
            self._stream.write(json.dumps(finite(dict(entry))).encode() + b"\n")
            self._stream.flush()
        except OSError as error:
            # What is left in the buffer must not be tried again, at the end of the process.
            with contextlib.suppress(OSError):
                self._stream.close()
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def sync(self) -> None:
        """Return when all lines are on disk, and the file's name too."""
        os.fsync(self._stream.fileno())
        if not self._named:
            sync_folder(self.path.parent)
            self._named = True

    def cut_after(self, last_round: int) -> bool:
        """Drop all from the first line on that is torn or of a later round than `last_round`.

        Whether the last line that stays is that round's.
        """
        self._stream.seek(0)
        end, there = 0, -1
        for line in self._stream:
            found = _round_of(line)
            if found is None or found > last_round:
                break
            end, there = end + len(line), found
        self._stream.truncate(end)
        return there == last_round

    def close(self) -> None:
        """Let others have it."""
        self._stream.close()


def in_use(path: Path) -> bool:
    """Whether a process has the file open `alone`."""
    if not path.exists():
        return False
    with path.open("rb") as stream:
        return not _locked(stream.fileno())


def finite(value: Any) -> Any:
    """`value` for JSON, which has no NaN: a number that is not finite becomes None."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _locked(descriptor: int) -> bool:
    """Lock the open file as long as it is open; False where somebody else has. The kernel undoes
    it when the process ends, however it does."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _round_of(line: bytes) -> int | None:
    """None for a line that is not whole."""
    if not line.endswith(b"\n"):
        return None
    try:
        return int(json.loads(line)["round"])
    except (ValueError, KeyError, TypeError):
        return None
