"""The numbers that have been measured, on disk: what is there is not measured again."""

import fcntl
import json
import os
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from blackthorn.experiments.study import Value


class StoreInUse(ValueError):
    """Another process writes the same file; the message is one line."""


class Store:
    """Values by key in a file of JSON lines, each on disk before `put` returns.

    A line that a killed process left unfinished is passed over, and the next one starts afresh.
    Used as a context manager; the file is this process's alone meanwhile.
    Raises StoreInUse on entry where it is another's.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._values: dict[str, Value] = {}
        self._seconds: dict[str, float] = {}
        self._file: IO[str] | None = None

    def __enter__(self) -> Self:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = self._path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise StoreInUse(
                f"output-dir = {self._path.parent} is in use: another reproduce writes "
                f"{self._path.name} there"
            ) from None
        file.seek(0)
        text = file.read()
        if text and not text.endswith("\n"):
            file.write("\n")
        for key, value, seconds in _entries(text):
            self._values[key], self._seconds[key] = value, seconds
        self._file = file
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def get(self, key: str) -> Value | None:
        """The value of a cell that was measured, else None."""
        return self._values.get(key)

    def seconds(self, key: str) -> float:
        """How long the cell took."""
        return self._seconds[key]

    def put(self, key: str, value: Value, seconds: float, experiment: str, label: Any) -> None:
        """Keep a value, and how long it took; `experiment` and `label` are for people who read the
        file."""
        assert self._file is not None, "a store is written inside its with block"
        entry = {"key": key, "experiment": experiment, "label": label}
        entry |= {"seconds": round(seconds, 2), "value": value}
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._values[key], self._seconds[key] = value, seconds


def _entries(text: str) -> list[tuple[str, Value, float]]:
    entries = []
    for line in text.splitlines():
        try:
            entry = json.loads(line)
            entries.append((str(entry["key"]), dict(entry["value"]), float(entry["seconds"])))
        except (ValueError, KeyError, TypeError):
            continue  # a line that was not finished
    return entries
