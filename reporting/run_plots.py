"""All plots of one run, written as PNGs into its folder; one that fails costs nothing else."""

import logging
from collections.abc import Callable
from pathlib import Path

from blackthorn.recording.client_history import read_history
from blackthorn.recording.folder_place import PLOTS
from blackthorn.reporting.client_history_plot import plot_client_history
from blackthorn.reporting.instrument_plots import (
    measured,
    plot_angles,
    plot_norms,
    plot_spread,
    plot_tails,
)
from blackthorn.reporting.plots import (
    plot_accuracy,
    plot_clients,
    plot_epsilon,
    plot_loss,
    plot_metrics,
    plot_phases,
    plot_signal,
)
from blackthorn.reporting.report_privacy import spent_by_round
from blackthorn.reporting.run_record import RunRecord

logger = logging.getLogger("blackthorn")

Draw = Callable[[RunRecord, Path], Path | None]


def _epsilon(record: RunRecord, path: Path) -> Path | None:
    spent = spent_by_round(record)
    if spent is None:
        return None
    return plot_epsilon(spent.points, spent.delta, path)


DRAWINGS: dict[str, Draw] = {
    "accuracy": lambda record, path: plot_accuracy(record.entries, path),
    "loss": lambda record, path: plot_loss(record.entries, path),
    "metrics": lambda record, path: plot_metrics(record.entries, path),
    "clients": lambda record, path: plot_clients(record.entries, path),
    "client-history": lambda record, path: plot_client_history(read_history(record.folder), path),
    "update-norms": lambda record, path: plot_norms(measured(record.entries), path),
    "update-angles": lambda record, path: plot_angles(measured(record.entries), path),
    "update-spread": lambda record, path: plot_spread(measured(record.entries), path),
    "tail-index": lambda record, path: plot_tails(measured(record.entries), path),
    "epsilon": _epsilon,
    "signal-to-noise": lambda record, path: plot_signal(record.entries, path),
    "phases": lambda record, path: plot_phases(record.entries, path),
}


def draw_plots(record: RunRecord) -> list[Path]:
    """Draw plots/NAME.png for every name of DRAWINGS that the run has something for."""
    drawn = []
    for name, draw in DRAWINGS.items():
        path = record.folder / PLOTS / f"{name}.png"
        try:
            # One that was drawn before shows less.
            path.unlink(missing_ok=True)
            if draw(record, path) is not None:
                drawn.append(path)
        except Exception as error:
            logger.error("plot %s could not be drawn: %s: %s", name, type(error).__name__, error)
    return drawn
