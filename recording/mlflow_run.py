"""A run in MLflow, at the tracking server or database that `mlflow-uri` names."""

import logging
import os
import posixpath
import re
from collections.abc import Callable, Mapping
from typing import Any

from blackthorn.recording.round_entries import scalars
from blackthorn.settings.config import RunConfig, as_released

EXPERIMENT = "blackthorn"
# MLflow's own limits would let a run hang for a quarter of an hour on a server that is not there.
_LIMITS = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}
# What MLflow takes on every system: on some it takes colons, too.
_ALLOWED = re.compile(r"[\w\-./ ]{1,250}")

logger = logging.getLogger("blackthorn")


class MlflowRun:
    """One MLflow run: the configuration as parameters, every round's numbers as metrics with the
    time that `clock` says.

    Raises whatever MLflow raises where its server cannot be reached.
    """

    def __init__(self, config: RunConfig, name: str, clock: Callable[[], float]) -> None:
        for variable, limit in _LIMITS.items():
            os.environ.setdefault(variable, limit)
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric, self._clock = Metric, clock
        self._client = MlflowClient(tracking_uri=config.mlflow_uri)
        known = self._client.get_experiment_by_name(EXPERIMENT)
        experiment = known.experiment_id if known else self._client.create_experiment(EXPERIMENT)
        run = self._client.create_run(experiment, start_time=self._now(), run_name=name)
        self._run = run.info.run_id
        parameters = [Param(key, str(value)) for key, value in as_released(config).items()]
        self._client.log_batch(self._run, params=parameters)
        self._left_out: set[str] = set()

    def round(self, entry: Mapping[str, Any]) -> None:
        """Log the round's numbers; one whose name MLflow does not take is told of once."""
        now, found = self._now(), scalars(entry)
        refused = {name for name in found if not is_a_name(name)}
        metrics = [
            self._metric(name, value, now, entry["round"])
            for name, value in found.items()
            if name not in refused
        ]
        self._client.log_batch(self._run, metrics=metrics)
        for name in sorted(refused - self._left_out):
            logger.warning("MLflow is not told of the metric %r: it takes no such name", name)
        self._left_out |= refused

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Log what is said of privacy, and end the run as finished or failed."""
        privacy = summary.get("privacy") or {}
        if privacy.get("epsilon") is not None:
            epsilon = privacy["epsilon"]
            self._client.log_metric(self._run, "epsilon", epsilon, timestamp=self._now())
        if privacy.get("claim"):
            self._client.set_tag(self._run, "privacy", privacy["claim"])
        if summary.get("reason"):
            self._client.set_tag(self._run, "reason", summary["reason"])
        completed = summary["status"] == "completed"
        status = "FINISHED" if completed else "FAILED"
        self._client.set_terminated(self._run, status, end_time=self._now())

    def _now(self) -> int:
        return int(1000 * self._clock())


def is_a_name(name: str) -> bool:
    """Whether MLflow takes it as a metric's: letters, digits, and _-./ and blanks, at most 250, and
    as a path one that stays where it is and is written one way."""
    leaves = name.startswith(("/", "..")) or name == "."
    return bool(_ALLOWED.fullmatch(name)) and posixpath.normpath(name) == name and not leaves
