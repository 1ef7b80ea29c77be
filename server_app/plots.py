"""Plots of a run's rounds, from the lines of its metrics.jsonl."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from server_app.figures import (
    BLUE,
    CYCLE,
    GREEN,
    ORANGE,
    PINK,
    YELLOW,
    is_wide,
    new_axes,
    new_figure,
    save_rounds,
)

Entries = Sequence[Mapping[str, Any]]
PHASES = ("training", "screening", "aggregation", "server-step", "evaluation")

_STYLES = ("-", "--", ":", "-.")
# More points than this are drawn without markers, which would hide each other.
_FEW = 60


def plot_accuracies(runs: Mapping[str, Entries], path: Path) -> Path | None:
    """Accuracy against rounds of several runs by label; None where no round was evaluated."""
    figure = new_figure()
    axes = new_axes(figure)
    drawn = 0
    for label, entries in runs.items():
        points = series(entries, "accuracy")
        if points:
            percent = [(t, 100 * value) for t, value in points]
            line(axes, percent, _STYLES[drawn % 4], CYCLE[drawn % len(CYCLE)], label)
            drawn += 1
    if not drawn:
        return None
    axes.set(ylabel="accuracy (%)", ylim=(0, 100))
    return save_rounds(figure, path)


def plot_accuracy(entries: Entries, path: Path) -> Path | None:
    """Accuracy against rounds; None where no round was evaluated."""
    return plot_accuracies({"": entries}, path)


def plot_loss(entries: Entries, path: Path) -> Path | None:
    """Loss against rounds, on a logarithmic axis where it falls or rises far."""
    points = series(entries, "loss")
    if not points:
        return None
    figure = new_figure()
    axes = new_axes(figure)
    line(axes, points, "-", BLUE)
    values = [value for _, value in points]
    if min(values) > 0 and is_wide(values):
        axes.set_yscale("log")
    axes.set_ylabel("loss (task's own unit)")
    return save_rounds(figure, path)


def plot_clients(entries: Entries, path: Path) -> Path | None:
    """How many clients were invited, counted, rejected and left out by the rule, a round."""
    rounds = [entry for entry in entries if entry.get("invited")]
    if not rounds:
        return None
    figure = new_figure()
    axes = new_axes(figure)
    counts: tuple[tuple[str, str, str, str], ...] = (
        ("invited", "invited", "-", BLUE),
        ("replied", "accepted", "--", GREEN),
        ("filtered", "filtered by the rule", ":", ORANGE),
        ("rejected", "rejected", "-.", PINK),
    )
    for key, label, style, shade in counts:
        line(
            axes,
            [(entry["round"], _count(entry.get(key))) for entry in rounds],
            style,
            shade,
            label,
        )
    axes.set(ylabel="clients")
    axes.set_ylim(bottom=0)
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
    shades = (BLUE, YELLOW, ORANGE, "#000000", GREEN)
    for phase, shade in zip(PHASES, shades, strict=True):
        heights = [entry["seconds"].get(phase) or 0.0 for entry in rounds]
        above = [b + h for b, h in zip(below, heights, strict=True)]
        if len(rounds) > _FEW:
            axes.fill_between(numbers, below, above, color=shade, lw=0, label=_in_words(phase))
        else:
            axes.bar(numbers, heights, 0.8, below, color=shade, label=_in_words(phase))
        below = above
    axes.set_ylabel("wall time of a round (s)")
    axes.set_ylim(0, 1.02 * max(below) or 1)
    return save_rounds(figure, path)


def plot_epsilon(spent: Sequence[tuple[int, float]], delta: float, before: int, path: Path) -> Path:
    """ε after so many rounds of the ledger, by RDP; `before` of them were earlier runs'."""
    figure = new_figure()
    axes = new_axes(figure)
    line(axes, spent, "-", BLUE, f"spent, δ = {delta:g}")
    if before:
        axes.axvline(before, color=ORANGE, linestyle="--", label="this run begins")
    axes.set_ylabel("ε by RDP (an upper bound, no unit)")
    axes.set_ylim(bottom=0)
    return save_rounds(figure, path)


def series(entries: Entries, key: str) -> list[tuple[int, float]]:
    """(round, value) of the rounds that have a number under `key`."""
    return [
        (entry["round"], entry[key]) for entry in entries if isinstance(entry.get(key), int | float)
    ]


def line(
    axes: Axes, points: Sequence[tuple[int, float]], style: str, shade: str, label: str = ""
) -> None:
    """A line through `points`, with markers where they are few."""
    marker = "o" if len(points) <= _FEW else ""
    axes.plot(
        *zip(*points, strict=True),
        color=shade,
        linestyle=style,
        marker=marker,
        ms=3,
        label=label or None,
    )


def _count(value: Any) -> int:
    return len(value) if isinstance(value, list) else int(value or 0)


def _in_words(phase: str) -> str:
    return {"training": "broadcast and local training", "server-step": "server step"}.get(
        phase, phase
    )
