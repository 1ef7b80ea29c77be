"""Plots of a run's instruments, from its metrics.jsonl.

Colours are Okabe and Ito's, which the colour-blind can tell apart; every line also has a style or
marker of its own.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from server_app.run_folder import read_metrics

_BLUE, _ORANGE, _GREEN, _BLACK = "#0072B2", "#D55E00", "#009E73", "#000000"
# Beyond this ratio of the largest value to the smallest a linear axis hides the small ones.
_WIDE_RANGE = 20.0

Rounds = Sequence[tuple[int, Mapping[str, Any]]]


def plot_instruments(folder: Path) -> list[Path]:
    """The plots of one run as PNGs under plots/; those without anything to show are left out."""
    rounds = [(m["round"], m["instruments"]) for m in read_metrics(folder) if "instruments" in m]
    plots = folder / "plots"
    drawn = [
        _norms(rounds, plots / "update-norms.png"),
        _angles(rounds, plots / "update-angles.png"),
        _spread(rounds, plots / "update-spread.png"),
        _tails(rounds, plots / "tail-index.png"),
    ]
    return [path for path in drawn if path is not None]


def _norms(rounds: Rounds, path: Path) -> Path | None:
    """Norms of all updates, in both units, with their median and the bound."""
    figure = _figure(6.0)
    upper, lower = figure.subplots(2, 1, sharex=True)
    if not _clients(upper, rounds, "norm_gradient"):
        return None
    _clients(lower, rounds, "norm_parameter")
    wide = _is_wide(rounds, "norm_gradient") or _is_wide(rounds, "norm_parameter")
    for axes, unit in ((upper, "gradient"), (lower, "parameter")):
        _line(axes, rounds, f"bound_{unit}", "--", _ORANGE, "bound")
        if wide:
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
    upper.set_ylabel("norm of the update $u_i$\n(gradient units)")
    lower.set_ylabel("norm of the update $\\Delta_i$\n(parameter units)")
    return _save(figure, path)


def _angles(rounds: Rounds, path: Path) -> Path | None:
    """Angles of all updates to the last global update."""
    figure = _figure(4.0)
    axes = figure.add_subplot()
    if not _clients(axes, rounds, "angle_degrees"):
        return None
    axes.axhline(90, color=_ORANGE, linestyle=":", label="right angle")
    axes.set(ylabel="angle to the last global update (degrees)", ylim=(0, 180))
    axes.set_yticks(range(0, 181, 30))
    return _save(figure, path)


def _spread(rounds: Rounds, path: Path) -> Path | None:
    """Concentration of the norms, and where there is a bound, what it takes away."""
    bounded = any(entry["bound_gradient"] is not None for _, entry in rounds)
    figure = _figure(6.0 if bounded else 4.0)
    panels = figure.subplots(2 if bounded else 1, 1, sharex=True, squeeze=False)[:, 0]
    if not _line(panels[0], rounds, "norm_variation", "-o", _BLUE, "standard deviation / mean"):
        return None
    largest = max(entry["norm_variation"] or 0 for _, entry in rounds)
    panels[0].set(ylabel="coefficient of variation\nof the norms (no unit)")
    panels[0].set_ylim(0, 1.1 * largest or 1)
    if bounded:
        _line(panels[1], rounds, "mean_clipping_factor", "-s", _BLUE, "mean of c / max(c, norm)")
        _line(panels[1], rounds, "share_at_bound", "--^", _ORANGE, "share of updates at the bound")
        panels[1].set(ylabel="clipping on the server\n(no unit)", ylim=(-0.05, 1.05))
    return _save(figure, path)


def _tails(rounds: Rounds, path: Path) -> Path | None:
    """Tail index of the noise, a round and pooled."""
    figure = _figure(4.0)
    axes = figure.add_subplot()
    pooled = _line(axes, rounds, "tail_index_window", "-o", _BLUE, "pooled over the last rounds")
    single = _line(axes, rounds, "tail_index", "x", _GREEN, "one round")
    if not pooled and not single:
        return None
    axes.axhline(2, color=_BLACK, linestyle="--", lw=1, label="Gaussian (2)")
    axes.axhline(1, color=_ORANGE, linestyle=":", label="Cauchy (1)")
    axes.set(ylabel="tail index α of the update noise (no unit)", ylim=(0, 3))
    return _save(figure, path)


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
        color=_BLUE,
        ms=4 if crowd <= 20 else 2.5,
        alpha=0.5 if crowd <= 20 else 0.25,
        mew=0,
        label="one client",
    )
    medians = [(t, median(values)) for t, values in clouds]
    axes.plot(*zip(*medians, strict=True), "-", color=_BLACK, lw=1.5, label="median")
    return True


def _line(axes: Axes, rounds: Rounds, key: str, style: str, color: str, label: str) -> bool:
    """A line of one number a round; False where no round has it."""
    points = [(t, entry[key]) for t, entry in rounds if entry[key] is not None]
    if points:
        axes.plot(*zip(*points, strict=True), style, color=color, ms=4, label=label)
    return bool(points)


def _is_wide(rounds: Rounds, key: str) -> bool:
    """Whether the positive values call for a logarithmic axis."""
    positive = [v for _, entry in rounds for v in entry[key].values() if v is not None and v > 0]
    return bool(positive) and max(positive) > _WIDE_RANGE * min(positive)


def _figure(height: float) -> Figure:
    figure = Figure(figsize=(6.4, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Figure, path: Path) -> Path:
    for axes in figure.axes:
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.axes[-1].set_xlabel("communication round")
    figure.axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    return path
