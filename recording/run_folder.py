"""The run folder: config.toml, what every round did, checkpoints, plots and summary.json."""

import contextlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import tomli_w
from safetensors.numpy import save

from blackthorn.recording.client_history import CLIENTS, history_entry, read_lines
from blackthorn.recording.failure_reason import without_places
from blackthorn.recording.folder_place import (
    CHECKPOINTS,
    CONFIG,
    EVENTS,
    METRICS,
    OPERATOR,
    PLOTS,
    REPORT,
    SUMMARY,
    began,
    create_folder,
    forget_begun,
    forget_end,
    hide_times,
)
from blackthorn.recording.line_log import LineLog, finite
from blackthorn.recording.round_entries import metrics_of, operator_entry, round_entry
from blackthorn.recording.run_counts import Counts, failures_in
from blackthorn.recording.run_states import RunStates
from blackthorn.recording.state_files import (
    Saved,
    forget_after,
    forget_all,
    read_saved,
    write_saved,
)
from blackthorn.recording.told_warnings import TOLD, each_once, told_before, told_on_record
from blackthorn.recording.tracking import Tracker
from blackthorn.settings.config import RunConfig, as_released, to_mapping
from blackthorn.settings.key_facts import place_keys
from blackthorn.settings.own_code import OWN_CODE_KEYS, keep
from blackthorn.settings.privacy_checks import (
    claims_anything,
    claims_privacy,
    claims_sample_privacy,
)
from blackthorn.strategies import RoundReport
from blackthorn.strategies.durable_file import replace_file
from blackthorn.strategies.run_state import RunState

_PLACES_LEFT_OUT = f"# Without {', '.join(place_keys())}: they are places on a machine.\n"


class ExtraFields(Protocol):
    """What somebody else adds to the run folder's files."""

    def of_round(self, report: RoundReport) -> Mapping[str, Any]:
        """Fields of the round's line in metrics.jsonl; called once a round, in order."""

    def of_run(self) -> Mapping[str, Any]:
        """Fields of summary.json."""

    def state(self) -> tuple[Mapping[str, np.ndarray], Mapping[str, Any]]:
        """Arrays and JSON values that `restore` needs in another process."""

    def restore(self, arrays: Mapping[str, np.ndarray], values: Mapping[str, Any]) -> None:
        """Go on from another's `state`."""


class RunFolder:
    """Writes what a run leaves behind. It is an observer: call it with each RoundReport.

    `saved`: the run goes on from there, in the folder that it had. `own`: what the strategy is to
    remember of what was before its next round. `told`: the warnings with which it starts, which
    the run remembers. Raises ConfigError where a run that has not ended uses the folder.
    """

    def __init__(
        self,
        path: Path,
        config: RunConfig,
        extra: ExtraFields,
        trackers: Sequence[Tracker] = (),
        saved: Saved | None = None,
        own: Mapping[str, Any] = MappingProxyType({}),
        told: Sequence[str] = (),
    ) -> None:
        self.path = path
        self._config = config
        self._extra = extra
        self._trackers = trackers
        self._began = time.monotonic()
        self._counts = Counts()
        self._output_round: int | None = None
        # What summary.json says of posterior samples; None for runs without.
        self.posterior: dict[str, Any] | None = None
        self._told = each_once([*(told_before(saved) if saved else ()), *told])
        # What this start foresees of the end, or the end tells: of another one it may not be so.
        self.outlook: list[str] = []
        self._confidential = False
        self._privacy: Callable[[], dict[str, Any] | None] = lambda: None
        self._sample_privacy: Callable[[], dict[str, Any] | None] = lambda: None
        self._spent: Callable[[], Mapping[str, Any]] = dict
        # What the summary says of suspects; None where clients are not scored.
        self.suspects: Callable[[], dict[str, Any]] | None = None
        self._states = RunStates(path, config, self._beside_state)
        create_folder(path, config)
        self._logs: dict[str, LineLog] = {}
        try:
            self._begin(saved, own)
        except OSError:
            if saved is None:
                forget_begun(path)
            raise

    def _begin(self, saved: Saved | None, own: Mapping[str, Any]) -> None:
        """Open the files, and write what is there before the first round."""
        path, config = self.path, self._config
        # Also the lock: two runs must not write one folder.
        self._logs[METRICS] = LineLog(path / METRICS, alone=True)
        beside = OPERATOR if claims_privacy(config) else CLIENTS
        self._logs[beside] = LineLog(path / beside, private=beside == OPERATOR)
        fresh = config.model_copy(update={"resume": ""})
        settings = to_mapping(fresh)
        self._write_config(fresh)
        for key in OWN_CODE_KEYS:
            keep(key, str(settings[key]), path)
        if saved is not None:
            self._go_on(saved, own)
        elif config.state_every:
            state = RunState(0, {}, {"own": dict(own)})
            write_saved(path, Saved(state, {}, {TOLD: self._told}, settings))

    def __call__(self, report: RoundReport) -> None:
        """Append the round to metrics.jsonl, at once on disk."""
        self._confidential = report.confidential
        entry = {**round_entry(report), **self._extra.of_round(report)}
        entry |= self._spent()
        self._counts.add(report)
        self._told = each_once([*self._told, *report.warnings])
        lines = {METRICS: entry, **_beside(report)}
        # First the state, which holds the lines: what is missing after it can be made up for.
        self._states.after_round(report, lines)
        self._append(lines)
        for tracker in self._trackers:
            tracker.round(entry)
        self._hide_times(self.path / METRICS, *self.path.glob(EVENTS))

    def _hide_times(self, *written: Path) -> None:
        if claims_privacy(self._config):
            hide_times(self.path, *written)

    def _write_config(self, config: RunConfig) -> None:
        path, start = self.path / CONFIG, began(self.path)
        left_out = _PLACES_LEFT_OUT if claims_anything(self._config) else ""
        replace_file(path, (left_out + tomli_w.dumps(as_released(config))).encode())
        os.utime(path, ns=(start, start))

    def _append(self, lines: Mapping[str, Mapping[str, Any]]) -> None:
        for name, line in lines.items():
            self._logs[name].append(line)
        if claims_privacy(self._config) or claims_sample_privacy(self._config):
            # What clients have told the server is counted by these lines, where power fails too.
            self._sync_lines()

    def _sync_lines(self) -> None:
        for log in self._logs.values():
            log.sync()

    def keep_states(
        self, state: Callable[[], RunState], between_rounds: Callable[[], bool]
    ) -> None:
        """Where the run stands; asked for after every round of which a state is written, and when
        the run is stopped, if it is between two rounds then."""
        self._states.keep(state, between_rounds)

    def _beside_state(self) -> tuple[Mapping[str, np.ndarray], Mapping[str, Any]]:
        """What a state holds of this object."""
        self._sync_lines()
        arrays, extra = self._extra.state()
        seconds = time.monotonic() - self._began
        counts = self._counts.values()
        return arrays, {"counts": counts, "seconds": seconds, "extra": extra, TOLD: self._told}

    def _go_on(self, saved: Saved, own: Mapping[str, Any]) -> None:
        """Bring the files to where the run stood after the state's round."""
        server_round = saved.state.server_round
        # Before the lines of later rounds go: nothing else shows that those rounds were charged.
        # It says where the run is now, so that no later start can tell that it was elsewhere.
        known = {**saved.state.values.get("own", {}), **own}
        state = replace(saved.state, values={**saved.state.values, "own": known})
        values = {**saved.values, TOLD: self._told}
        write_saved(self.path, replace(saved, state=state, values=values))
        forget_end(self.path)
        forget_after(self.path, server_round)
        if server_round == 0:
            # Round 0's line comes again.
            server_round = -1
        lines = saved.values.get("lines", {})
        there = {name for name, log in self._logs.items() if log.cut_after(server_round)}
        self._append({name: line for name, line in lines.items() if name not in there})
        if "counts" in saved.values:
            self._confidential = saved.values["report"]["confidential"]
            self._began -= saved.values["seconds"]
            self._counts.restore(saved.values["counts"])
            self._extra.restore(saved.arrays, saved.values["extra"])
        self._counts.resumed_after.append(saved.state.server_round)

    @property
    def rounds_skipped(self) -> int:
        """Rounds that left the model as it was."""
        return self._counts.rounds_skipped

    @property
    def last_skip(self) -> str:
        """Why the last of them did."""
        return self._counts.last_skip

    def set_privacy(
        self,
        entry: Callable[[], dict[str, Any] | None],
        sample: Callable[[], dict[str, Any] | None],
    ) -> None:
        """What the summary says of clients' privacy and of that of their examples; asked for when
        the run ends, however it ends."""
        self._privacy, self._sample_privacy = entry, sample

    def set_spent(self, spent: Callable[[], Mapping[str, Any]]) -> None:
        """What a round's line says of the privacy spent so far, and what that takes to be
        public; asked for in every round."""
        self._spent = spent

    def set_output(self, server_round: int, metrics: Mapping[str, float]) -> None:
        """The iterate that the run hands out: after how many rounds it arose, and its metrics."""
        self._output_round = server_round
        self._counts.final.update(metrics)

    def save_model(self, state: Mapping[str, np.ndarray], name: str) -> None:
        """Write checkpoints/NAME.safetensors as a whole or not at all."""
        path = self.path / CHECKPOINTS / f"{name}.safetensors"
        replace_file(path, save({key: np.asarray(a, order="C") for key, a in state.items()}))
        self._hide_times(path)

    def finish(self, status: str, reason: str = "") -> dict[str, Any]:
        """Write summary.json and return what it holds; `status` is completed or failed: then first
        a last state, where the run can go on."""
        if status != "completed":
            # On a full disk the summary is what matters.
            with contextlib.suppress(OSError):
                self._states.at_stop()
        sample = self._sample_privacy()
        summary: dict[str, Any] = {
            **_what_ran(self._config),
            "rounds_completed": self._counts.rounds,
            "rounds_skipped": None if self._confidential else self._counts.rounds_skipped,
            "final": self._counts.final,
            "output_round": self._output_round,
            **self._extra.of_run(),
            **({} if self.suspects is None else {"suspects": self.suspects()}),
            **({} if self.posterior is None else {"posterior": self.posterior}),
            "privacy": self._privacy(),
            **({} if sample is None else {"sample_privacy": sample}),
            "warnings": each_once([*self._told, *self.outlook]),
            "clients": None if self._confidential else self._counts.clients,
            "failures": None if self._confidential else self._counts.failures,
            "resumed_after": self._counts.resumed_after,
            "wall_seconds": self._wall_seconds(),
            "status": status,
        }
        if reason:
            summary["reason"] = reason
        summary = without_places(summary, self.path, self._config)
        _write_summary(self.path, self._config, summary)
        if status == "completed":
            forget_all(self.path)
        for log in self._logs.values():
            log.close()
        for tracker in self._trackers:
            tracker.finish(summary)
        self._hide_times()
        return summary

    def _wall_seconds(self) -> float | None:
        """None under a claim: of a run of one round it is the time that its slowest client took."""
        if claims_privacy(self._config):
            return None
        return round(time.monotonic() - self._began, 3)


def _beside(report: RoundReport) -> dict[str, dict[str, Any]]:
    """The round's line in the file of single clients, which a claim keeps for the operator."""
    if report.confidential:
        return {OPERATOR: operator_entry(report)}
    return {CLIENTS: history_entry(report)} if report.server_round > 0 else {}


def _what_ran(config: RunConfig) -> dict[str, Any]:
    values = as_released(config)
    return {key: values[key] for key in ("algorithm", "task", "aggregator", "attack")}


def _write_summary(folder: Path, config: RunConfig, summary: Mapping[str, Any]) -> None:
    # A report that was asked for while the run was on its way; its own one comes after this.
    forget_end(folder, [REPORT] if config.report else [REPORT, PLOTS])
    text = json.dumps(finite(dict(summary)), indent=2) + "\n"
    replace_file(folder / SUMMARY, text.encode())


def read_summary(folder: Path) -> dict[str, Any] | None:
    """What summary.json holds; None where there is none."""
    path = folder / SUMMARY
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def write_failure(
    folder: Path,
    config: RunConfig,
    reason: str,
    privacy: Mapping[str, Any] | None = None,
    warnings: Sequence[str] = (),
    sample_privacy: Mapping[str, Any] | None = None,
) -> bool:
    """summary.json of a run whose server ended without writing one, from its metrics.

    `privacy` is what its ledger says, `sample_privacy` what its rounds do, `warnings` what its
    start told, beside what is on record. False where there was one already, which is left alone.
    """
    if (folder / SUMMARY).exists():
        return False
    entries = read_metrics(folder)
    evaluated = [entry for entry in entries if entry.get("evaluated_by")]
    last = evaluated[-1] if evaluated else {}
    summary = {
        **_what_ran(config),
        "rounds_completed": entries[-1]["round"] if entries else 0,
        "rounds_skipped": sum("skipped" in entry for entry in entries),
        "final": metrics_of(last),
        "output_round": None,
        "catastrophic_failure": entries[-1].get("catastrophic_failure") if entries else None,
        "privacy": privacy,
        **({} if sample_privacy is None else {"sample_privacy": sample_privacy}),
        "clients": None if claims_privacy(config) else _count_clients(entries),
        "failures": None if claims_privacy(config) else failures_in(entries),
        "resumed_after": _resumed_after(folder),
        "wall_seconds": None,
        "warnings": each_once([*told_on_record(folder, entries), *warnings]),
        "status": "failed",
        "reason": reason,
    }
    _write_summary(folder, config, without_places(summary, folder, config))
    if claims_privacy(config) and (folder / CONFIG).exists():
        hide_times(folder)
    return True


def _resumed_after(folder: Path) -> list[int]:
    try:
        saved = read_saved(folder)
    except ValueError:
        return []
    counts = saved.values.get("counts", {}) if saved else {}
    return list(counts.get("resumed_after", ()))


def _count_clients(entries: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    surplus = sum(len(e.get("surplus", ())) for e in entries)
    return {
        "invited": sum(e["invited"] for e in entries),
        "replied": sum(e["replied"] for e in entries),
        "rejected": sum(len(e["rejected"]) for e in entries),
        **({"surplus": surplus} if surplus else {}),
    }


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """What metrics.jsonl says of the rounds."""
    return read_lines(folder / METRICS)
