"""TensorBoard event files in the run folder: `tensorboard --logdir runs` finds every run."""

from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from blackthorn.recording.folder_place import EVENTS
from blackthorn.recording.round_entries import is_bound, scalars


class TensorBoardEvents:
    """Writes one event a round, with the time that `clock` says, as has the file's name, and
    TensorBoard's own names would not; a round can be read before the next begins."""

    def __init__(self, folder: Path, clock: Callable[[], float]) -> None:
        self._clock = clock
        names = (f"{EVENTS[:-1]}{clock():010.0f}.{part:03d}" for part in count())
        path = next(path for path in map(folder.joinpath, names) if not path.exists())
        self._stream = path.open("xb")
        self._writer = RecordWriter(self._stream)
        self._write(Event(wall_time=clock(), file_version="brain.Event:2"))

    def _write(self, event: Event) -> None:
        self._writer.write(event.SerializeToString())
        self._writer.flush()

    def round(self, entry: Mapping[str, Any]) -> None:
        """Write the round's numbers."""
        values = [
            Summary.Value(tag=name, simple_value=not_below(value) if is_bound(name) else value)
            for name, value in scalars(entry).items()
        ]
        summary = Summary(value=values)
        self._write(Event(wall_time=self._clock(), step=entry["round"], summary=summary))

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Close the file."""
        del summary
        self._stream.close()


def not_below(value: float) -> float:
    """The smallest float32, in which TensorBoard keeps what it is told, that is not below `value`:
    a bound that is rounded down is none."""
    with np.errstate(over="ignore"):
        near = np.float32(value)
    # As Python's float: NumPy would compare in float32, and find them equal.
    return float(near if float(near) >= value else np.nextafter(near, np.float32(np.inf)))
