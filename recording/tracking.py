"""Trackers: who is told of every round beside metrics.jsonl, and of nothing more.

A tracker sees the lines of metrics.jsonl and summary.json, not the rounds themselves: what a
privacy claim keeps out of those files cannot reach it.
"""

import importlib.util
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from blackthorn.recording.folder_place import began
from blackthorn.settings.config import ConfigError, RunConfig
from blackthorn.settings.privacy_checks import claims_privacy

logger = logging.getLogger("blackthorn")


class Tracker(Protocol):
    """Follows one run."""

    def round(self, entry: Mapping[str, Any]) -> None:
        """See a line of metrics.jsonl."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """See summary.json's content; the last call."""


def check_tracking(config: RunConfig) -> None:
    """Raises ConfigError, one line, where `mlflow-uri` is set and MLflow is not installed."""
    if config.mlflow_uri and importlib.util.find_spec("mlflow") is None:
        raise ConfigError(
            f"mlflow-uri = {config.mlflow_uri} is not allowed: MLflow is not installed here "
            "(pip install 'blackthorn[mlflow]'); or set mlflow-uri to nothing"
        )


def make_trackers(config: RunConfig, folder: Path) -> list[Tracker]:
    """The trackers that `config` asks for; one that cannot start is left out with a warning."""
    # Imported where they are wanted: both libraries take their time.
    trackers: list[Tracker] = []
    clock = _clock(config, folder)
    try:
        if config.tensorboard:
            from blackthorn.recording.tensorboard_events import TensorBoardEvents

            trackers.append(Guarded("TensorBoard", TensorBoardEvents(folder, clock)))
    except Exception as error:
        _warn("TensorBoard", error)
    try:
        if config.mlflow_uri:
            from blackthorn.recording.mlflow_run import MlflowRun

            trackers.append(Guarded("MLflow", MlflowRun(config, folder.name, clock)))
    except Exception as error:
        _warn("MLflow", error)
    return trackers


def _clock(config: RunConfig, folder: Path) -> Callable[[], float]:
    """What a tracker puts beside a round, in seconds since 1970: under a privacy claim always the
    start of the run, also after a resume, as how long a round took can tell that somebody was
    missing in it."""
    start = began(folder) / 1e9
    return (lambda: start) if claims_privacy(config) else time.time


class Guarded:
    """A tracker that, whatever goes wrong with it, is told of no further round and costs the run
    nothing else. Of the end it is told all the same: what it has begun must not look as if it ran.
    """

    def __init__(self, name: str, tracker: Tracker) -> None:
        self._name = name
        self._tracker = tracker
        self._failed = False

    def round(self, entry: Mapping[str, Any]) -> None:
        """Pass the line on."""
        if not self._failed:
            self._call(self._tracker.round, entry)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Pass the summary on."""
        self._call(self._tracker.finish, summary)

    def _call(self, told: Callable[[Mapping[str, Any]], None], what: Mapping[str, Any]) -> None:
        try:
            told(what)
        except Exception as error:
            if not self._failed:
                _warn(self._name, error)
            self._failed = True


def _warn(name: str, error: Exception) -> None:
    reason = str(error).strip().partition("\n")[0]
    logger.error("%s is not told of this run: %s: %s", name, type(error).__name__, reason)
