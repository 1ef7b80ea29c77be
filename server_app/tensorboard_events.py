"""TensorBoard event files in the run folder: `tensorboard --logdir runs` finds every run."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from server_app.tracking import scalars


class TensorBoardEvents:
    """Writes one scalar event a number and round; a round is on disk before the next begins.

    Without `timed` every event has the time of the start: how long a round took can tell who was
    missing in it.
    """

    def __init__(self, folder: Path, timed: bool = True) -> None:
        self._writer = EventFileWriter(str(folder))
        self._began, self._timed = time.time(), timed

    def round(self, entry: Mapping[str, Any]) -> None:
        """Write the round's numbers."""
        values = [
            Summary.Value(tag=name, simple_value=value) for name, value in scalars(entry).items()
        ]
        now = time.time() if self._timed else self._began
        event = Event(wall_time=now, step=entry["round"], summary=Summary(value=values))
        self._writer.add_event(event)
        self._writer.flush()

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Close the file."""
        del summary
        self._writer.close()
