"""What a run tells its operator while it is under way: lines of JSON in the ServerApp's output.

Flower hands that output to whoever asks the Control API for it, wherever the ServerApp runs.
A line is PREFIX and an object with one key, which says what it is:

    {"run": {"folder", "rounds", "longest-seconds", "resumable"}}     the run begins
    {"notes": ["...", ...]}                               what there is to know before it starts
    {"round": {...}}                                      the round's line of metrics.jsonl
    {"operator": {...}}                                   under a claim: its line of operator.jsonl
    {"spent": {"rounds", "epsilon_rdp", "delta"}}  under a central claim: what its ledger holds
    {"summary": {...}}                                    the content of summary.json
    {"failed": {"reason", "configuration"}}               why it ended
A run that was interrupted, and goes on, begins again and tells its rounds again.
"""

import json
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blackthorn.settings.config import RunConfig

if TYPE_CHECKING:
    from blackthorn.strategies.reports import RoundReport

PREFIX = "blackthorn-run: "
# What a round may take beyond its deadline: evaluation, aggregation, nodes that come back.
_ROUND_SLACK_SECONDS = 60.0


def tell(kind: str, content: Mapping[str, Any] | list[str]) -> None:
    """Write one line."""
    print(PREFIX + json.dumps({kind: content}), flush=True)


def tell_start(config: RunConfig, folder: Path) -> None:
    """Where the run's results are, and how long it can take."""
    longest = longest_run(config)
    rounds = config.num_server_rounds
    content = {"folder": str(folder.resolve()), "rounds": rounds, "longest-seconds": longest}
    tell("run", {**content, "resumable": config.state_every != 0})


def tell_operator(report: "RoundReport") -> None:
    """Observer: what a claim leaves to the operator of a round."""
    # Imports torch, for which whoever reads these lines need not wait.
    from blackthorn.recording.round_entries import operator_entry

    if report.confidential:
        tell("operator", operator_entry(report))


class RoundTold:
    """Tracker: the round, and before it under a central claim what the ledger holds after it."""

    def __init__(self, config: RunConfig) -> None:
        self._delta = config.delta

    def round(self, entry: Mapping[str, Any]) -> None:
        """Tell the line of metrics.jsonl, which whoever reads that may see."""
        if "rounds_charged" in entry:
            spent = {"rounds": entry["rounds_charged"], "epsilon_rdp": entry.get("epsilon_rdp")}
            tell("spent", {**spent, "delta": self._delta})
        tell("round", entry)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Nothing: the summary is told apart."""


def tell_again(folder: Path, last_round: int) -> None:
    """The rounds that are on record up to that one: some may have been told to nobody."""
    from blackthorn.recording.client_history import read_lines
    from blackthorn.recording.folder_place import METRICS, OPERATOR

    for kind, name in (("round", METRICS), ("operator", OPERATOR)):
        for entry in read_lines(folder / name):
            if entry["round"] <= last_round:
                tell(kind, entry)


def longest_run(config: RunConfig) -> float:
    """Seconds after which a run cannot still be on its way: the sum of all its deadlines."""
    one_round = 2 * config.round_timeout + _ROUND_SLACK_SECONDS
    return config.start_timeout + config.num_server_rounds * one_round


def show_log() -> None:
    """Let the strategies' own log, who enrolled and who was refused, be part of the output."""
    logger = logging.getLogger("blackthorn")
    logger.setLevel(logging.INFO)
    if not logger.handlers:
        logger.addHandler(_CurrentOutput())


class _CurrentOutput(logging.Handler):
    """Writes to what is standard output at the moment: Flower replaces it when a run begins."""

    def emit(self, record: logging.LogRecord) -> None:
        print(record.getMessage(), file=sys.stdout, flush=True)
