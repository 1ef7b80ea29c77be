"""TensorBoard event files in the run folder: `tensorboard --logdir runs` finds every run."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from blackthorn.recording.scalars import scalars


class TensorBoardEvents:
    """Writes one scalar event a number and round, with the time that `clock` says; a round is on
    disk before the next begins."""

    def __init__(self, folder: Path, clock: Callable[[], float]) -> None:
        self._writer = EventFileWriter(str(folder))
        self._clock = clock

    def round(self, entry: Mapping[str, Any]) -> None:
        """Write the round's numbers."""
        values = [
            Summary.Value(tag=name, simple_value=value) for name, value in scalars(entry).items()
        ]
        summary = Summary(value=values)
        event = Event(wall_time=self._clock(), step=entry["round"], summary=summary)
        self._writer.add_event(event)
        self._writer.flush()

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Close the file."""
        del summary
        self._writer.close()
