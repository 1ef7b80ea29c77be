"""report.html of a run: one self-contained page, written when the run ends, however it ends."""

import base64
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from blackthorn.recording.folder_place import PLOTS, REPORT, hide_times
from blackthorn.recording.posterior_store import FOLDER as POSTERIOR
from blackthorn.reporting import report_facts as facts
from blackthorn.reporting.report_page import page_of
from blackthorn.reporting.run_plots import draw_plots
from blackthorn.reporting.run_record import RunRecord, read_record
from blackthorn.strategies.durable_file import replace_file

logger = logging.getLogger("blackthorn")

_FOOT = Markup(
    "The plots are also in <code>plots/</code>, the numbers in <code>metrics.jsonl</code> and "
    "<code>summary.json</code>."
)

_CAPTIONS = {
    "accuracy": "Accuracy of the global model after each round.",
    "loss": "Loss of the global model after each round.",
    "metrics": "The other metrics of the global model after each round.",
    "clients": "Clients invited, accepted, filtered by the rule and rejected in each round.",
    "client-history": "Who was filtered or rejected, and when: a row is a client, a column a round "
    "(clients.jsonl holds the reasons and the rule's weights).",
    "update-norms": "Length of every client's update, before the server bounds it: once per unit "
    "of the local gradients, once as the difference of the models.",
    "update-angles": "Angle between every client's update and the last global update: 0 is the "
    "same direction, above 90 degrees points back.",
    "update-spread": "How much the lengths differ from client to client, and what the bound takes "
    "away.",
    "tail-index": "Tail index of the noise in the updates: 2 is Gaussian, the smaller the fatter "
    "the tails.",
    "epsilon": "Privacy spent after each round, by RDP, that of other runs on the same ledger "
    "included. Another accountant's figure, where one was asked for, is smaller and in the table.",
    "signal-to-noise": "Length of the mean update in each round's release, in lengths of its "
    "noise, by what was released alone. 0: it cannot be told from chance. Over many rounds noise "
    "cancels and updates add up, so that a run may learn well below 1.",
    "reliability": "Reliability: accuracy against confidence, bin by bin, and the share of the "
    "predictions in each bin. On the diagonal the model is as sure as it is right.",
    "trace": "Values of single coordinates and predictions over the posterior samples.",
    "autocorrelation": "Autocorrelation of the same, against the lag in samples; the band is what "
    "independent samples would show.",
    "phases": "Wall time of each round by phase. The first round also pays for what is done once.",
}


@dataclass(frozen=True)
class Picture:
    """A plot as it is put into the page."""

    base64: str
    caption: str


@dataclass(frozen=True)
class Section:
    """A part of the page: text, a table of names and values, plots, then tables."""

    title: str
    texts: Sequence[str] = ()
    told: Sequence[tuple[str, str]] = ()
    figures: Sequence[Picture] = ()
    tables: Sequence[facts.Table] = ()

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing in it to show."""
        return not (self.texts or self.told or self.figures or self.tables)


def publish(folder: Path) -> Path | None:
    """Plots and report of a run that has ended; whatever fails is logged and costs nothing."""
    try:
        return write_report(folder)
    except Exception as error:
        logger.error("no report of %s: %s: %s", folder, type(error).__name__, error)
        return None


def write_report(folder: Path) -> Path:
    """Draw the plots of the run in `folder` and write its report.html, as a whole or not at all.

    Reads what may be released and nothing else. Raises ConfigError where there is no run.
    """
    record = read_record(folder)
    draw_plots(record)
    path = folder / REPORT
    replace_file(path, render(record).encode())
    if facts.is_confidential(record):
        hide_times(folder)
    return path


def render(record: RunRecord) -> str:
    """The page as text. Everything that came from a file is escaped."""
    values = record.values
    title = f"{values.get('algorithm', 'a run')} on {values.get('task', 'an unknown task')}"
    return page_of(
        title=f"{title} ({record.folder.name})",
        kind="run report",
        notes=[*record.notes, *record.figures.get("warnings", ())],
        sections=[section for section in _sections(record) if not section.is_empty],
        foot=_FOOT,
        of_a_run={
            "status": record.status if record.status in ("completed", "failed") else "incomplete",
            "reason": (record.summary or {}).get("reason"),
            "tiles": facts.headline(record),
            "settings": facts.settings(record),
        },
    )


def _sections(record: RunRecord) -> list[Section]:
    return [
        Section("Learning", figures=_pictures(record, "accuracy", "loss", "metrics")),
        _clients(record),
        Section(
            "Updates",
            figures=_pictures(
                record, "update-norms", "update-angles", "update-spread", "tail-index"
            ),
        ),
        _privacy(record),
        _posterior(record),
        Section(
            "Time", figures=_pictures(record, "phases"), tables=_known(facts.phase_rows(record))
        ),
    ]


def _clients(record: RunRecord) -> Section:
    if facts.is_confidential(record):
        text = (
            "Who took part, who was rejected and how long a round took is not part of what this "
            "run releases: it would tell of single clients. The operator finds it in "
            "operator.jsonl, which belongs to nobody else."
        )
        return Section("Clients", texts=[text])
    tables = _known(
        facts.suspects(record),
        facts.filtered(record),
        facts.rejections(record),
        facts.refusals(record),
        facts.skips(record),
    )
    return Section("Clients", figures=_pictures(record, "clients", "client-history"), tables=tables)


def _privacy(record: RunRecord) -> Section:
    told = facts.privacy_facts(record)
    adversary = (
        "docs/privacy.md of Blackthorn says of each figure who may be the adversary, and what is "
        "assumed."
    )
    texts = [adversary] if told else []
    told += facts.signal_facts(record)
    return Section(
        "Privacy", texts, told, _pictures(record, "epsilon", "signal-to-noise") if told else ()
    )


def _posterior(record: RunRecord) -> Section:
    posterior: Mapping[str, Any] = (record.summary or {}).get("posterior") or {}
    if not posterior:
        return Section("Posterior")
    known = {
        "samples": "posterior samples kept",
        "samples_rescaled": "of these with more noise, as a client was missing in their round",
        "ess_min": "smallest effective sample size",
        "ess_tail_min": "smallest effective sample size of the tails",
        "rhat_max": "largest split-R̂ (1 when mixed)",
        "w2": "2-Wasserstein distance to the exact posterior",
    }
    told = [
        (label, f"{posterior[key]:.5g}")
        for key, label in known.items()
        if facts.is_number(posterior.get(key))
    ]
    return Section(
        "Posterior",
        [str(posterior["mixing"])] if "mixing" in posterior else [],
        told,
        figures=_pictures(record, "reliability", "trace", "autocorrelation"),
        tables=[
            *facts.calibration_tables(posterior),
            *_known(facts.diagnosis_rows(_diagnoses(record.folder))),
        ],
    )


def _known(*tables: facts.Table | None) -> list[facts.Table]:
    return [table for table in tables if table is not None]


def _diagnoses(folder: Path) -> list[dict[str, Any]]:
    try:
        found = json.loads((folder / POSTERIOR / "diagnostics.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return list(found) if isinstance(found, list) else []


def _pictures(record: RunRecord, *names: str) -> list[Picture]:
    """Those of the plots that are there."""
    pictures = []
    for name in names:
        path = record.folder / PLOTS / f"{name}.png"
        if path.is_file():
            data = base64.b64encode(path.read_bytes()).decode()
            pictures.append(Picture(data, _CAPTIONS[name]))
    return pictures
