"""Plots of posterior samples and of the predictions that they make."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from blackthorn.reporting.calibration import NUM_BINS, Calibration
from blackthorn.reporting.figures import (
    BLUE,
    CYCLE,
    colour,
    legend_above,
    new_axes,
    new_figure,
    save,
)
from blackthorn.reporting.posterior_diagnostics import Traces, import_arviz

_MOST_ROWS = 6


def plot_traces(traces: Traces, path: Path) -> Path:
    """Values against the samples, a row a scalar and a line a chain; up to six scalars."""
    chosen = _chosen(len(traces.names))
    figure = _rows(len(chosen))
    for row, index in enumerate(chosen):
        axes = figure.add_subplot(len(chosen), 1, row + 1)
        colour(axes)
        for chain in traces.values[:, :, index]:
            axes.plot(chain, lw=0.7)
        axes.set_ylabel(traces.names[index], fontsize=9)
        _small(axes)
    axes.set_xlabel("posterior sample")
    return save(figure, path)


def plot_autocorrelation(traces: Traces, path: Path) -> Path:
    """Autocorrelation against the lag in samples, mean over the chains; up to six scalars."""
    arviz = import_arviz()
    draws = traces.values.shape[1]
    lags = min(100, draws - 1) + 1
    chosen = _chosen(len(traces.names))
    figure = _rows(len(chosen))
    for row, index in enumerate(chosen):
        axes = figure.add_subplot(len(chosen), 1, row + 1)
        chains = [c for c in traces.values[:, :, index] if c.std() > 0]
        if chains:
            mean = np.mean([arviz.autocorr(chain)[:lags] for chain in chains], axis=0)
            axes.vlines(np.arange(lags), 0, mean, color=BLUE, lw=1.2)
        band = 1.96 / np.sqrt(draws * len(traces.values))
        axes.axhspan(-band, band, color=BLUE, alpha=0.15, lw=0)
        axes.set(ylim=(-0.5, 1.05))
        axes.set_ylabel(traces.names[index], fontsize=9)
        _small(axes)
    axes.set_xlabel("lag in posterior samples")
    return save(figure, path)


def plot_reliability(reports: Mapping[str, Calibration], path: Path) -> Path:
    """Accuracy against confidence by bin, one line a report, over the diagonal of a right one."""
    figure = new_figure(5.2)
    upper, lower = figure.subplots(2, 1, height_ratios=(3, 1), sharex=True)
    upper.plot([0, 1], [0, 1], ":", color="grey", lw=1)
    width = 1 / NUM_BINS
    for position, (label, report) in enumerate(reports.items()):
        filled = report.counts > 0
        marker, shade = "os^v"[position % 4], CYCLE[position % len(CYCLE)]
        upper.plot(
            report.confidences[filled],
            report.accuracies[filled],
            marker=marker,
            color=shade,
            ms=4,
            lw=1,
            label=f"{label}: ECE {report.ece:.3f}",
        )
        share = report.counts / report.counts.sum()
        offset = (position + 0.5) * width / len(reports)
        lower.bar(np.arange(NUM_BINS) * width + offset, share, width / len(reports), color=shade)
    upper.set(ylabel="accuracy (share)", ylim=(0, 1), xlim=(0, 1))
    upper.grid(alpha=0.3)
    legend_above(upper)
    lower.set(xlabel="confidence (probability)", ylabel="share of\npredictions")
    return save(figure, path)


def plot_entropy(entropies: Mapping[str, np.ndarray], num_classes: int, path: Path) -> Path:
    """Histogram of the predictive entropy (nats), one outline a set of examples."""
    figure = new_figure()
    axes = new_axes(figure)
    edges = np.linspace(0, np.log(num_classes), 41)
    for position, (label, values) in enumerate(entropies.items()):
        style = ("-", "--", ":", "-.")[position % 4]
        name = f"{label} (mean {values.mean():.2f})"
        shade = CYCLE[position % len(CYCLE)]
        axes.hist(
            values,
            edges.tolist(),
            histtype="step",
            density=True,
            ls=style,
            color=shade,
            label=name,
        )
    axes.set(xlabel="predictive entropy (nats)", ylabel="density (1/nat)", xlim=(0, edges[-1]))
    legend_above(axes)
    return save(figure, path)


def _chosen(count: int) -> list[int]:
    """Up to six of them, spread evenly."""
    return sorted(set(np.linspace(0, count - 1, min(count, _MOST_ROWS)).astype(int).tolist()))


def _rows(rows: int) -> Figure:
    return new_figure(0.8 + 1.2 * rows)


def _small(axes: Axes) -> None:
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
