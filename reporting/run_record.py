"""What is in a run folder, read with patience: a run that was killed leaves half of it.

operator.jsonl is never shown: it is not part of what may be released. The figures of privacy of a
run without a summary are those of its ledger, which may be.
"""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blackthorn.recording.failure_reason import without_places
from blackthorn.recording.privacy import privacy_of_dead_run, sample_privacy_of_dead_run
from blackthorn.recording.run_folder import METRICS, SUMMARY
from blackthorn.recording.told_warnings import told_on_record
from blackthorn.settings.config import ConfigError, RunConfig, make_config

CONFIG = "config.toml"


@dataclass(frozen=True)
class RunRecord:
    """One run: its resolved `values`, its lines of metrics.jsonl, and its `summary` (None: none).

    `config` is None where `values` are not a configuration of this version. `notes` say what is
    missing or damaged, one sentence each. `figures` are the summary's entries `privacy`,
    `sample_privacy` and `warnings`; where there is no summary, as they follow from what else is in
    the folder.
    """

    folder: Path
    values: dict[str, Any]
    config: RunConfig | None
    entries: list[dict[str, Any]]
    summary: dict[str, Any] | None
    notes: list[str] = field(default_factory=list)
    figures: Mapping[str, Any] = field(default_factory=dict)

    @property
    def status(self) -> str:
        """completed, failed, or incomplete where no summary says."""
        return str(self.summary["status"]) if self.summary else "incomplete"


def read_record(folder: Path) -> RunRecord:
    """Everything of the run in `folder`. Raises ConfigError where there is no run in it."""
    if not any((folder / name).is_file() for name in (CONFIG, METRICS)):
        raise ConfigError(
            f"{folder} is not a run folder: it has neither {CONFIG} nor {METRICS} "
            "(name the folder of one run, such as runs/demo/rage)"
        )
    notes: list[str] = []
    values = _read_values(folder / CONFIG, notes)
    entries = _read_entries(folder / METRICS, notes)
    summary = _read_summary(folder / SUMMARY, notes)
    config = None
    if values:
        try:
            config = make_config(values)
        except ConfigError as error:
            notes.append(f"{CONFIG} is not a configuration of this version: {error}.")
    figures = summary
    if figures is None:
        figures = _figures_of_dead_run(config, folder, entries, notes)
    return RunRecord(folder, values, config, entries, summary, notes, figures)


def _figures_of_dead_run(
    config: RunConfig | None,
    folder: Path,
    entries: list[dict[str, Any]],
    notes: list[str],
) -> dict[str, Any]:
    """What the ledger says of a run that left no summary, and what its rounds do."""
    if config is None:
        return {}
    try:
        privacy = privacy_of_dead_run(config, folder)
        sample = sample_privacy_of_dead_run(config, folder)
        told = told_on_record(folder, entries)
    except (OSError, ValueError) as error:
        notes.append(f"What was spent of privacy is not known: {type(error).__name__}.")
        return {}
    return without_places(
        {"privacy": privacy, "sample_privacy": sample, "warnings": told}, folder, config
    )


def _read_values(path: Path, notes: list[str]) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        notes.append(f"{CONFIG} cannot be read: {type(error).__name__}.")
        return {}


def _read_entries(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    try:
        text = path.read_bytes().decode("utf-8", errors="replace")
    except OSError:
        notes.append(f"{METRICS} is missing: no round is known.")
        return []
    lines = text.split("\n")
    if lines.pop():
        notes.append(f"The last line of {METRICS} is torn and was left out.")
    entries = [entry for line in lines if line and (entry := _parse(line)) is not None]
    broken = sum(bool(line) for line in lines) - len(entries)
    if broken:
        notes.append(f"{broken} lines of {METRICS} cannot be read and were left out.")
    return entries


def _parse(line: str) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    is_round = isinstance(entry, dict) and isinstance(entry.get("round"), int)
    return entry if is_round else None


def _read_summary(path: Path, notes: list[str]) -> dict[str, Any] | None:
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(summary, dict) and "status" in summary:
            return summary
        reason = "it has no status"
    except FileNotFoundError:
        notes.append(
            f"There is no {SUMMARY}: the run is still on its way, or it was killed. What follows "
            "is what it had written."
        )
        return None
    except (OSError, ValueError) as error:
        reason = type(error).__name__
    notes.append(f"{SUMMARY} cannot be read: {reason}.")
    return None
