"""Plots of a run, from what is in its folder."""

from collections.abc import Mapping
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from server_app.run_folder import read_metrics


def plot_accuracy(folder: Path) -> Path | None:
    """plots/accuracy.png of one run; None where no round was evaluated."""
    return plot_accuracies({"": folder}, folder / "plots" / "accuracy.png")


def plot_accuracies(runs: Mapping[str, Path], path: Path) -> Path | None:
    """Accuracy against rounds of several runs by label, as a PNG at `path`."""
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    styles = ("-", "--", ":", "-.")
    drawn = 0
    for label, folder in runs.items():
        points = [
            (m["round"], 100 * m["accuracy"])
            for m in read_metrics(folder)
            if m.get("accuracy") is not None
        ]
        if points:
            rounds, accuracies = zip(*points, strict=True)
            axes.plot(rounds, accuracies, styles[drawn % 4], marker="o", ms=3, label=label or None)
            drawn += 1
    if not drawn:
        return None
    axes.set(xlabel="communication round", ylabel="accuracy (%)", ylim=(0, 100))
    axes.grid(alpha=0.3)
    if any(runs):
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    return path
