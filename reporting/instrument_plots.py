"""Plots of a run's instruments, from its metrics.jsonl.

Every line has a colour, and a style or marker of its own.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.axes import Axes

from blackthorn.reporting.figures import (
    BLACK,
    BLUE,
    GREEN,
    ORANGE,
    is_wide,
    new_axes,
    new_figure,
    save_rounds,
)

Rounds = Sequence[tuple[int, Mapping[str, Any]]]


def measured(entries: Iterable[Mapping[str, Any]]) -> Rounds:
    """The rounds of metrics.jsonl that were measured, with what was."""
    return [(entry["round"], entry["instruments"]) for entry in entries if "instruments" in entry]


def plot_norms(rounds: Rounds, path: Path) -> Path | None:
    """Norms of all updates, in both units, with their median and the bound."""
    figure = new_figure(6.0)
    upper, lower = figure.subplots(2, 1, sharex=True)
    if not _clients(upper, rounds, "norm_gradient"):
        return None
    _clients(lower, rounds, "norm_parameter")
    wide = any(is_wide(_values(rounds, key)) for key in ("norm_gradient", "norm_parameter"))
    for axes, unit in ((upper, "gradient"), (lower, "parameter")):
        _line(axes, rounds, f"bound_{unit}", "--", ORANGE, "bound")
        if wide:
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
    upper.set_ylabel("norm of the update $u_i$\n(gradient units)")
    lower.set_ylabel("norm of the update $\\Delta_i$\n(parameter units)")
    return save_rounds(figure, path)


def plot_angles(rounds: Rounds, path: Path) -> Path | None:
    """Angles of all updates to the last global update."""
    figure = new_figure(4.0)
    axes = new_axes(figure)
    if not _clients(axes, rounds, "angle_degrees"):
        return None
    axes.axhline(90, color=ORANGE, linestyle=":", label="right angle")
    axes.set(ylabel="angle to the last\nglobal update (degrees)", ylim=(0, 180))
    axes.set_yticks(range(0, 181, 30))
    return save_rounds(figure, path)


def plot_spread(rounds: Rounds, path: Path) -> Path | None:
    """Concentration of the norms, and where there is a bound, what it takes away."""
    bounded = any(entry["bound_gradient"] is not None for _, entry in rounds)
    figure = new_figure(6.0 if bounded else 4.0)
    panels = figure.subplots(2 if bounded else 1, 1, sharex=True, squeeze=False)[:, 0]
    if not _line(panels[0], rounds, "norm_variation", "-o", BLUE, "standard deviation / mean"):
        return None
    largest = max(entry["norm_variation"] or 0 for _, entry in rounds)
    panels[0].set(ylabel="coefficient of variation\nof the norms (no unit)")
    panels[0].set_ylim(0, 1.1 * largest or 1)
    if bounded:
        _line(panels[1], rounds, "mean_clipping_factor", "-s", BLUE, "mean of c / max(c, norm)")
        _line(panels[1], rounds, "share_at_bound", "--^", ORANGE, "share of updates at the bound")
        panels[1].set(ylabel="clipping on the server\n(no unit)", ylim=(-0.05, 1.05))
    return save_rounds(figure, path)


def plot_tails(rounds: Rounds, path: Path) -> Path | None:
    """Tail index of the noise, a round and pooled."""
    figure = new_figure(4.0)
    axes = new_axes(figure)
    pooled = _line(axes, rounds, "tail_index_window", "-o", BLUE, "pooled over the last rounds")
    single = _line(axes, rounds, "tail_index", "x", GREEN, "one round")
    if not pooled and not single:
        return None
    axes.axhline(2, color=BLACK, linestyle="--", lw=1, label="Gaussian (2)")
    axes.axhline(1, color=ORANGE, linestyle=":", label="Cauchy (1)")
    axes.set(ylabel="tail index α of the\nupdate noise (no unit)", ylim=(0, 3))
    return save_rounds(figure, path)


def _clients(axes: Axes, rounds: Rounds, key: str) -> bool:
    """A point for every client and round, and a line through the medians; False for no points."""
    clouds = [(t, [v for v in entry[key].values() if v is not None]) for t, entry in rounds]
    clouds = [(t, values) for t, values in clouds if values]
    points = [(t, value) for t, values in clouds for value in values]
    if not points:
        return False
    # Few points are large, many are faint: what lies under them must still be seen.
    crowd = max(len(values) for _, values in clouds)
    axes.plot(
        *zip(*points, strict=True),
        "o",
        color=BLUE,
        ms=4 if crowd <= 20 else 2.5,
        alpha=0.5 if crowd <= 20 else 0.25,
        mew=0,
        label="one client",
    )
    medians = [(t, median(values)) for t, values in clouds]
    axes.plot(*zip(*medians, strict=True), "-", color=BLACK, lw=1.5, label="median")
    return True


def _line(axes: Axes, rounds: Rounds, key: str, style: str, color: str, label: str) -> bool:
    """A line of one number a round; False where no round has it."""
    points = [(t, entry[key]) for t, entry in rounds if entry[key] is not None]
    if points:
        axes.plot(*zip(*points, strict=True), style, color=color, ms=4, label=label)
    return bool(points)


def _values(rounds: Rounds, key: str) -> list[float]:
    return [v for _, entry in rounds for v in entry[key].values() if v is not None]
