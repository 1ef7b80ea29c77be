"""When a run's state is written: after rounds, so far apart that it costs little, and at a stop."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from blackthorn.recording.run_counts import cohort_of
from blackthorn.recording.state_files import Saved, write_saved
from blackthorn.settings.config import RunConfig, to_mapping
from blackthorn.strategies import RoundReport
from blackthorn.strategies.run_state import RunState

# A state takes some milliseconds: no more often than this where rounds are as quick as that.
STATE_SECONDS = 0.25
# ... and where a large model's state takes longer, at most this share of a run's time.
STATE_SHARE = 0.05

Lines = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class _Ended:
    """What a state holds of its round beside the strategy's: its lines by file, its cohort."""

    server_round: int
    lines: Lines
    cohort: Mapping[str, Any]


class RunStates:
    """Writes the states of the run in `folder`.

    `beside`: what the folder remembers, arrays and JSON values; asked for with every state, when
    all that was written before it has to be on disk.
    """

    def __init__(
        self,
        folder: Path,
        config: RunConfig,
        beside: Callable[[], tuple[Mapping[str, np.ndarray], Mapping[str, Any]]],
    ) -> None:
        self._folder = folder
        self._config = config
        self._beside = beside
        self._state: Callable[[], RunState] | None = None
        self._between_rounds: Callable[[], bool] = lambda: False
        self._last: _Ended | None = None
        self._last_saved = 0
        self._saved_at = time.monotonic()
        self._took = 0.0

    def keep(self, state: Callable[[], RunState], between_rounds: Callable[[], bool]) -> None:
        """Where the run stands, and whether that is whole when no round has just ended."""
        self._state, self._between_rounds = state, between_rounds

    def after_round(self, report: RoundReport, lines: Lines) -> None:
        """The round has ended, and these are its lines: a state, where one is due."""
        self._last = _Ended(report.server_round, lines, cohort_of(report))
        if self._is_due(report.server_round):
            self._write(self._last)

    def at_stop(self) -> None:
        """The state of a run that ends before its last round: what it has done since the last one
        need not be done, and charged, again. None where a round is half done: it would hold the
        model of one round and the ledger of another."""
        last = self._last
        if last is None or self._config.state_every == 0 or last.server_round <= self._last_saved:
            return
        if self._between_rounds():
            self._write(last)

    def _is_due(self, server_round: int) -> bool:
        every = self._config.state_every
        if server_round == 0 or every == 0:
            return False
        if every > 0:
            return server_round % every == 0
        pause = max(STATE_SECONDS, self._took / STATE_SHARE)
        return time.monotonic() - self._saved_at >= pause

    def _write(self, ended: _Ended) -> None:
        if self._state is None:
            return
        began = time.monotonic()
        arrays, values = self._beside()
        values = {**values, "lines": ended.lines, "report": ended.cohort}
        config = to_mapping(self._config.model_copy(update={"resume": ""}))
        write_saved(self._folder, Saved(self._state(), arrays, values, config))
        self._last_saved, self._saved_at = ended.server_round, time.monotonic()
        self._took = self._saved_at - began
