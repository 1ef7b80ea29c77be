"""What all plots of a run have in common: their size, their colours, and how they are saved.

Colours are Okabe and Ito's, which the colour-blind can tell apart. Figures are narrow, so that
their letters stay legible where a phone shows them at a third of their width.
"""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

BLUE, ORANGE, GREEN, BLACK = "#0072B2", "#D55E00", "#009E73", "#000000"
SKY, YELLOW, PINK = "#56B4E9", "#E69F00", "#CC79A7"
CYCLE = (BLUE, ORANGE, GREEN, PINK, YELLOW, SKY, BLACK)

WIDTH = 4.8  # inches
_DOTS_PER_INCH = 180
# Beyond this ratio of the largest value to the smallest a linear axis hides the small ones.
_WIDE_RANGE = 20.0


def new_figure(height: float = 3.2) -> Figure:
    """An empty figure of the usual width, `height` in inches."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def new_axes(figure: Figure) -> Axes:
    """The figure's only axes."""
    axes = figure.add_subplot()
    colour(axes)
    return axes


def colour(axes: Axes) -> None:
    """Lines of `axes` without a colour of their own get those of the palette in turn."""
    axes.set_prop_cycle(color=CYCLE)


def is_wide(values: list[float]) -> bool:
    """Whether the positive `values` call for a logarithmic axis."""
    positive = [value for value in values if value > 0]
    return bool(positive) and max(positive) > _WIDE_RANGE * min(positive)


def legend_above(axes: Axes) -> None:
    """A legend outside of the axes, where it hides nothing; none without labels."""
    labels = axes.get_legend_handles_labels()[1]
    if not labels:
        return
    columns = 2 if max(map(len, labels)) > 20 else 3
    legend = axes.legend(
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
        ncols=min(columns, len(labels)),
        fontsize="small",
        frameon=False,
    )
    # A crowd of faint points has a solid one in the legend.
    for handle in legend.legend_handles:
        if handle is not None:
            handle.set_alpha(1.0)


def save(figure: Figure, path: Path) -> Path:
    """Write the figure as a PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=_DOTS_PER_INCH)
    return path


def save_rounds(figure: Figure, path: Path) -> Path:
    """Write a figure whose axes all share communication rounds as their x-axis."""
    for axes in figure.axes:
        axes.grid(alpha=0.3)
        legend_above(axes)
    figure.axes[-1].set_xlabel("communication round")
    figure.axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    return save(figure, path)
