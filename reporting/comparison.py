"""Several runs beside each other: what they differ in, how they ended, and their curves."""

import base64
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from blackthorn.recording.round_entries import metrics_of
from blackthorn.reporting.plots import ACCURACY, plot_curves, series
from blackthorn.reporting.prediction import final_state
from blackthorn.reporting.report_facts import Table, is_number
from blackthorn.reporting.report_page import page_of
from blackthorn.reporting.run_record import RunRecord, read_record
from blackthorn.reporting.run_report import Picture, Section
from blackthorn.settings.config import ConfigError, RunConfig, to_mapping
from blackthorn.settings.key_facts import place_keys
from blackthorn.settings.privacy_checks import claims_anything
from blackthorn.settings.rounding import upward
from blackthorn.strategies.durable_file import replace_file

RUNS_COMPOSE = (
    "Each figure of privacy is of that run alone, by its own ledger. Runs on the same clients' "
    "data compose: what several of them release, or the choice of the best, costs more than any "
    "one's figure says."
)
_UNITS = {"accuracy": ACCURACY, "loss": "loss (task's own unit)"}
_MOST_METRICS = 6


@dataclass(frozen=True)
class Comparison:
    """Runs by label; tables of the keys in which they differ, and of how they ended."""

    records: Mapping[str, RunRecord]
    differing: Table
    ends: Table
    notes: Sequence[str]


def compared(runs: Sequence[Path]) -> Comparison:
    """What is in the folders of two or more runs. Raises ConfigError, one line, for fewer, for one
    that is named twice, and for a folder without a run."""
    if len(runs) < 2:
        raise ConfigError("compare needs two runs or more: blackthorn compare RUN RUN ...")
    for number, run in enumerate(runs):
        if run.resolve() in [other.resolve() for other in runs[:number]]:
            raise ConfigError(f"{run} is named twice")
    names = [run.resolve().name for run in runs]
    labels = [n if names.count(n) == 1 else str(r) for n, r in zip(names, runs, strict=True)]
    records = dict(zip(labels, map(read_record, runs), strict=True))
    claims = [r for r in records.values() if r.config is not None and claims_anything(r.config)]
    notes = [f"{label}: {note}" for label, record in records.items() for note in record.notes]
    if claims:
        notes.insert(0, RUNS_COMPOSE)
    return Comparison(records, _differing(records), _ends(records), notes)


def write_comparison(found: Comparison, path: Path) -> Path:
    """The page: what differs, then the curves over each other, then the ends."""
    names = dict.fromkeys(
        name for record in found.records.values() for e in record.entries for name in metrics_of(e)
    )
    names = dict.fromkeys(["accuracy", "loss", *names])
    curves = []
    for name in list(names)[:_MOST_METRICS]:
        by_run = {label: series(record.entries, name) for label, record in found.records.items()}
        picture = overlaid(by_run, name)
        curves += [] if picture is None else [picture]
    sections = [
        Section("What differs", tables=[found.differing]),
        Section("Curves", figures=curves),
        Section("How they ended", tables=[found.ends]),
    ]
    title = " and ".join(found.records) if len(found.records) < 4 else f"{len(found.records)} runs"
    foot = "Each run's own report says more."
    return write_page(path, title, "comparison of runs", found.notes, sections, foot)


def write_page(
    path: Path,
    title: str,
    kind: str,
    notes: Sequence[str],
    sections: Sequence[Section],
    foot: str,
) -> Path:
    """A page in the report's style, one file that needs nothing else. Raises ConfigError where it
    cannot be written."""
    shown = [section for section in sections if not section.is_empty]
    page = page_of(title=title, kind=kind, notes=notes, sections=shown, foot=foot)
    try:
        replace_file(path, page.encode())
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
    return path


def overlaid(
    curves: Mapping[str, Sequence[tuple[int, float]]],
    name: str,
    deviations: Mapping[str, Sequence[float | None]] = MappingProxyType({}),
) -> Picture | None:
    """The metric's curves over each other, by label; None where there is not one point.
    `deviations`: of a curve's points, by its label, shaded to both sides of them."""
    scale = 100 if name == "accuracy" else 1
    drawn = {label: [(t, scale * v) for t, v in own] for label, own in curves.items() if own}
    if not drawn:
        return None
    bands = {
        label: [
            (t, v - scale * d, v + scale * d)
            for (t, v), d in zip(drawn[label], own, strict=True)
            if d is not None
        ]
        for label, own in deviations.items()
        if label in drawn
    }
    with tempfile.TemporaryDirectory(prefix="blackthorn-") as folder:
        path = plot_curves(drawn, _UNITS.get(name, name), Path(folder) / "curve.png", bands)
        data = base64.b64encode(path.read_bytes()).decode()
    return Picture(data, f"{name[:1].upper()}{name[1:]} of the global model after each round.")


def apart(one: Path, other: Path) -> float:
    """Largest difference between entries of two runs' final models, relative to the largest
    absolute entry of `other`'s; computed in float64. 0: they are equal bit for bit, in dtype too.

    Infinity where the models have other entries or shapes, or one holds what is not finite.
    Raises ConfigError where a run has left no model, ValueError where its file is torn.
    """
    first, second = final_state(one), final_state(other)
    if _shapes(first) != _shapes(second):
        return float("inf")
    if all(first[name].tobytes() == second[name].tobytes() for name in first):
        return 0.0
    pairs = [(first[name].astype(np.float64), second[name].astype(np.float64)) for name in first]
    difference = max(float(np.abs(a - b).max(initial=0.0)) for a, b in pairs)
    largest = max(float(np.abs(b).max(initial=0.0)) for _, b in pairs)
    return difference / largest if np.isfinite(difference) and largest > 0 else float("inf")


def _shapes(state: dict[str, np.ndarray]) -> dict[str, tuple[tuple[int, ...], str]]:
    return {name: (array.shape, array.dtype.str) for name, array in state.items()}


def _differing(records: Mapping[str, RunRecord]) -> Table:
    defaults: dict[str, Any] = dict(to_mapping(RunConfig()))
    values = [{**defaults, **record.values} for record in records.values()]
    keys = dict.fromkeys(key for own in values for key in own)
    rows = []
    for key in keys:
        told = [_text(own.get(key)) for own in values]
        if key not in place_keys() and len(set(told)) > 1:
            rows.append((key, *told))
    title = "Keys that differ" if rows else "No key differs"
    return Table(title, ("key", *records), rows)


def _ends(records: Mapping[str, RunRecord]) -> Table:
    finals = [_final(record) for record in records.values()]
    names = list(dict.fromkeys(name for final in finals for name in final))[:_MOST_METRICS]
    first = next(iter(records.values())).folder
    rows = []
    for (label, record), final in zip(records.items(), finals, strict=True):
        summary = record.summary or {}
        privacy = record.figures.get("privacy") or {}
        epsilon: Any = privacy.get("epsilon")
        seconds = summary.get("wall_seconds")
        rows.append(
            (
                label,
                record.status,
                str(summary.get("rounds_completed", max(0, len(record.entries) - 1))),
                *(_metric(name, final.get(name)) for name in names),
                upward(float(epsilon)) if is_number(epsilon) else "-",
                f"{seconds:.1f}" if is_number(seconds) else "-",
                "-" if record.folder == first else _distance(record.folder, first),
            )
        )
    ends = ("epsilon", "seconds", f"model against {next(iter(records))}")
    return Table("Final models", ("run", "status", "rounds", *names, *ends), rows)


def _final(record: RunRecord) -> Mapping[str, Any]:
    """Metrics of the model that the run handed out, or else of the last round that has some."""
    if record.summary and record.summary.get("final"):
        return dict(record.summary["final"])
    return next((found for e in reversed(record.entries) if (found := metrics_of(e))), {})


def _metric(name: str, value: Any) -> str:
    if not is_number(value):
        return "-"
    return f"{100 * value:.1f} %" if name == "accuracy" else f"{value:.4g}"


def _distance(run: Path, first: Path) -> str:
    try:
        distance = apart(run, first)
    except (ConfigError, ValueError):
        return "no model"
    if distance == 0:
        return "the same"
    return f"apart by {distance:.1e}" if np.isfinite(distance) else "another"


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
