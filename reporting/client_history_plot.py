"""Who was filtered, when: a heat map of clients against rounds."""

import math
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from blackthorn.recording.client_history import STATES, ClientHistory
from blackthorn.reporting.figures import BLACK, ORANGE, new_axes, new_figure, save

# Apart for the colour-blind, and in lightness too: what is worth knowing is dark.
COLOURS = {
    "not invited": "#FFFFFF",
    "surplus": "#DCEFFA",
    "kept": "#8CC8EA",
    "skipped": "#999999",
    "no reply": "#F0E442",
    "filtered": ORANGE,
    "rejected": BLACK,
}
# Beyond so many, several clients or rounds share a row or column of the plot: a cell must have a
# few pixels, or what is rare would vanish between them.
_MOST_ROWS, _MOST_COLUMNS = 250, 250
# Up to so many, lines between the cells help the eye.
_MOST_LINES = 40


def plot_client_history(history: ClientHistory | None, path: Path) -> Path | None:
    """Rows are clients, columns rounds; None where every invited client was always kept.

    Where several clients or rounds share a cell, the last of STATES that occurs in it shows.
    """
    if history is None or not history.is_eventful():
        return None
    clients_a_row = math.ceil(len(history.clients) / _MOST_ROWS)
    rounds_a_column = math.ceil(len(history.rounds) / _MOST_COLUMNS)
    cells = merged(history.states, clients_a_row, rounds_a_column)
    figure = new_figure(min(max(1.4 + 0.18 * len(cells), 2.4), 6.5))
    axes = new_axes(figure)
    axes.imshow(
        cells,
        cmap=ListedColormap([COLOURS[state] for state in STATES]),
        vmin=-0.5,
        vmax=len(STATES) - 0.5,
        aspect="auto",
        interpolation="nearest",
    )
    if max(cells.shape) <= _MOST_LINES:
        _separate(axes, *cells.shape)
    _label(axes.xaxis, "communication round", history.rounds, rounds_a_column)
    _label(axes.yaxis, "client", history.clients, clients_a_row)
    shown = [state for i, state in enumerate(STATES) if (history.states == i).any()]
    figure.legend(
        handles=[Patch(fc=COLOURS[s], ec="#666666", lw=0.5, label=s) for s in shown],
        loc="outside upper center",
        ncols=3,
        fontsize="small",
        frameon=False,
    )
    return save(figure, path)


def merged(states: np.ndarray, clients_a_row: int, rounds_a_column: int) -> np.ndarray:
    """The largest state of each block of `states` [N, T]; the last blocks may be smaller."""
    by_row = np.maximum.reduceat(states, range(0, len(states), clients_a_row), axis=0)
    return np.maximum.reduceat(by_row, range(0, states.shape[1], rounds_a_column), axis=1)


def _separate(axes: Axes, rows: int, columns: int) -> None:
    axes.set_xticks(np.arange(columns + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(rows + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=1)
    axes.tick_params(which="minor", length=0)


def _label(axis: Axis, what: str, numbers: list[int], a_cell: int) -> None:
    """Ticks are the ids of clients or numbers of rounds, the first in a shared cell."""

    def name(position: float, _tick: int | None) -> str:
        index = round(position) * a_cell
        return str(numbers[index]) if 0 <= index < len(numbers) else ""

    axis.set_major_locator(MaxNLocator(nbins=10, integer=True, min_n_ticks=1))
    axis.set_major_formatter(FuncFormatter(name))
    axis.set_label_text(what if a_cell == 1 else f"{what} ({a_cell} in a cell)")
