"""Plots of a run's rounds, from the lines of its metrics.jsonl."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from blackthorn.recording.round_entries import metrics_of
from blackthorn.reporting.figures import (
    BLACK,
    BLUE,
    CYCLE,
    GREEN,
    ORANGE,
    SKY,
    YELLOW,
    is_wide,
    new_axes,
    new_figure,
    save_rounds,
)
from blackthorn.settings.rounding import exact

Entries = Sequence[Mapping[str, Any]]
Point = tuple[int, float]
ACCURACY = "accuracy (%)"
PHASES = ("training", "screening", "aggregation", "server-step", "evaluation")

_STYLES = ("-", "--", ":", "-.")
# More points than this are drawn without markers, which would hide each other.
_FEW = 60
# Metrics of one's own that a figure has room for.
_MOST_METRICS = 6


def plot_accuracies(runs: Mapping[str, Entries], path: Path) -> Path | None:
    """Accuracy against rounds of several runs by label; None where no round was evaluated."""
    curves = {
        label: [(t, 100 * value) for t, value in points]
        for label, entries in runs.items()
        if (points := series(entries, "accuracy"))
    }
    return plot_curves(curves, ACCURACY, path) if curves else None


def plot_curves(
    curves: Mapping[str, Sequence[Point]],
    ylabel: str,
    path: Path,
    bands: Mapping[str, Sequence[tuple[int, float, float]]] = MappingProxyType({}),
) -> Path:
    """Curves of one quantity over each other, each with its label; on a logarithmic axis where they
    fall or rise far. None of them is empty. `bands`: by a curve's label, (round, low, high) of what
    is shaded around it."""
    figure = new_figure()
    axes = new_axes(figure)
    for number, (label, points) in enumerate(curves.items()):
        style, shade = _STYLES[number % len(_STYLES)], CYCLE[number % len(CYCLE)]
        line(axes, points, style, shade, label)
        if band := bands.get(label):
            rounds, low, high = zip(*band, strict=True)
            axes.fill_between(rounds, low, high, color=shade, alpha=0.15, linewidth=0)
    values = [value for points in curves.values() for _, value in points]
    if ylabel == ACCURACY:
        axes.set_ylim(0, 100)
    elif min(values) > 0 and is_wide(values):
        axes.set_yscale("log")
    axes.set_ylabel(ylabel)
    return save_rounds(figure, path)


def plot_accuracy(entries: Entries, path: Path) -> Path | None:
    """Accuracy against rounds; None where no round was evaluated."""
    return plot_accuracies({"": entries}, path)


def plot_loss(entries: Entries, path: Path) -> Path | None:
    """Loss against rounds, on a logarithmic axis where it falls or rises far."""
    points = series(entries, "loss")
    if not points:
        return None
    figure, axes = _one_line(points, "loss (task's own unit)")
    values = [value for _, value in points]
    if min(values) > 0 and is_wide(values):
        axes.set_yscale("log")
    return save_rounds(figure, path)


def plot_metrics(entries: Entries, path: Path) -> Path | None:
    """Every other metric of the evaluations against rounds, one below the other."""
    names = {name: None for entry in entries for name in metrics_of(entry)}
    drawn = {n: p for n in names if n not in ("accuracy", "loss") if (p := series(entries, n))}
    if not drawn:
        return None
    shown = list(drawn.items())[:_MOST_METRICS]
    figure = new_figure(height=1.2 + 1.8 * len(shown))
    column = figure.subplots(len(shown), squeeze=False)[:, 0]
    for axes, (name, points) in zip(column, shown, strict=True):
        line(axes, points, "-", BLUE)
        axes.set_ylabel(name)
    return save_rounds(figure, path)


def plot_clients(entries: Entries, path: Path) -> Path | None:
    """How many clients were invited, counted, rejected and left out by the rule, a round."""
    rounds = [entry for entry in entries if entry.get("invited")]
    if not rounds:
        return None
    figure = new_figure()
    axes = new_axes(figure)
    # Where all who were invited count, their lines lie on each other: the lower one is wider.
    for key, label, style, shade, width in (
        ("invited", "invited", "-", SKY, 4.0),
        ("replied", "accepted", "-", BLUE, 1.5),
        ("filtered", "filtered by the rule", ":", ORANGE, 1.5),
        ("rejected", "rejected", "--", BLACK, 1.5),
    ):
        points = [(entry["round"], _count(entry.get(key))) for entry in rounds]
        line(axes, points, style, shade, label, width)
    axes.set(ylabel="clients")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    return save_rounds(figure, path)


def plot_phases(entries: Entries, path: Path) -> Path | None:
    """Seconds a round, the phases on top of each other."""
    rounds = [entry for entry in entries if entry.get("seconds")]
    if not rounds:
        return None
    figure = new_figure()
    axes = new_axes(figure)
    numbers = [entry["round"] for entry in rounds]
    below = [0.0] * len(rounds)
    shades = (BLUE, YELLOW, ORANGE, BLACK, GREEN)
    for phase, shade in zip(PHASES, shades, strict=True):
        heights = [entry["seconds"].get(phase) or 0.0 for entry in rounds]
        above = [b + h for b, h in zip(below, heights, strict=True)]
        if len(rounds) > _FEW:
            axes.fill_between(
                numbers, below, above, color=shade, lw=0, label=phase.replace("-", " ")
            )
        else:
            axes.bar(numbers, heights, 0.8, below, color=shade, label=phase.replace("-", " "))
        below = above
    axes.set_ylabel("wall time of a round (s)")
    axes.set_ylim(0, 1.02 * max(below) or 1)
    return save_rounds(figure, path)


def plot_epsilon(spent: Sequence[tuple[int, float]], delta: float, path: Path) -> Path:
    """ε after so many rounds of the ledger, by RDP."""
    label = f"spent, δ = {exact(delta)}"
    figure, axes = _one_line(spent, "ε by RDP (an upper bound, no unit)", label)
    axes.set_ylim(bottom=0)
    return save_rounds(figure, path)


def plot_signal(entries: Entries, path: Path) -> Path | None:
    """How long the updates were in what a round released, in lengths of its noise; 0: drowned."""
    points = series(entries, "signal_to_noise")
    if not points:
        return None
    figure, axes = _one_line(points, "signal to noise of a round (no unit)")
    axes.set_ylim(bottom=0)
    return save_rounds(figure, path)


def _one_line(
    points: Sequence[tuple[int, float]], ylabel: str, label: str = ""
) -> tuple[Figure, Axes]:
    figure = new_figure()
    axes = new_axes(figure)
    line(axes, points, "-", BLUE, label)
    axes.set_ylabel(ylabel)
    return figure, axes


def series(entries: Entries, key: str) -> list[tuple[int, float]]:
    """(round, value) of the rounds that have a number under `key`."""
    return [
        (entry["round"], entry[key]) for entry in entries if isinstance(entry.get(key), int | float)
    ]


def line(
    axes: Axes,
    points: Sequence[tuple[int, float]],
    style: str,
    shade: str,
    label: str = "",
    width: float = 1.5,
) -> None:
    """A line through `points`, with markers where they are few."""
    marker = "o" if len(points) <= _FEW else ""
    axes.plot(
        *zip(*points, strict=True),
        color=shade,
        linestyle=style,
        lw=width,
        marker=marker,
        ms=3,
        label=label or None,
    )


def _count(value: Any) -> int:
    return len(value) if isinstance(value, list) else int(value or 0)
