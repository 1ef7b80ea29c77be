"""Runs from Python: a recipe is simulated, and what a run has left is looked at.

run = blackthorn.simulate("demo", seed=1, aggregator="rage")
run.summary["final"], run.metrics, run.plot(), run.predict(x)
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from torch import Tensor

from blackthorn.launch.commands.recipes import recipe_config
from blackthorn.launch.commands.simulate import simulate as run_here
from blackthorn.launch.commands.sweep import sweep as sweep_here
from blackthorn.launch.commands.sweep_results import Sweep
from blackthorn.recording.folder_place import PLOTS, REPORT, choose_folder
from blackthorn.recording.run_folder import read_metrics, read_summary
from blackthorn.reporting.comparison import compared, write_comparison
from blackthorn.reporting.prediction import Predictions, predict
from blackthorn.reporting.run_plots import draw_plots
from blackthorn.reporting.run_record import read_record
from blackthorn.reporting.run_report import write_report
from blackthorn.settings.config import ConfigError
from blackthorn.settings.declaration import kebab


class Run:
    """What a run has left in its folder, `path`; in a notebook it shows its report."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __repr__(self) -> str:
        status = (self.summary or {}).get("status", "incomplete")
        return f"Run({str(self.path)!r}, {status})"

    def _repr_html_(self) -> str:
        """The report, as a page within the page."""
        from html import escape

        page = escape(self.report().read_text(encoding="utf-8"))
        return f'<iframe srcdoc="{page}" style="width:100%;height:40em;border:0"></iframe>'

    @property
    def summary(self) -> dict[str, Any] | None:
        """What summary.json holds; None while there is none."""
        return read_summary(self.path)

    @property
    def metrics(self) -> Any:
        """The rounds by column: a pandas DataFrame where pandas is installed, else a dict of lists
        with None where a round has no such entry."""
        rounds = read_metrics(self.path)
        names = list(dict.fromkeys(name for entry in rounds for name in entry))
        columns = {name: [entry.get(name) for entry in rounds] for name in names}
        try:
            from pandas import DataFrame
        except ModuleNotFoundError:
            return columns
        return DataFrame(columns)

    def plot(self, name: str | None = None) -> Any:
        """Draw the run's plots: their paths or, with the name of one, such as accuracy, its own.

        Raises ConfigError for a name of which the run has nothing to draw.
        """
        paths = draw_plots(read_record(self.path))
        if name is None:
            return paths
        wanted = self.path / PLOTS / f"{name}.png"
        if wanted not in paths:
            drawn = ", ".join(path.stem for path in paths)
            raise ConfigError(f"{self.path} has no plot {name!r}: there are {drawn}")
        return wanted

    def report(self) -> Path:
        """Where its report.html is, which is written where it is missing."""
        path = self.path / REPORT
        return path if path.exists() else write_report(self.path)

    def predict(self, x: np.ndarray | Tensor) -> Predictions:
        """Class probabilities for inputs x [n, ...]; see blackthorn.reporting.prediction.predict.

        Raises ConfigError as that does.
        """
        return predict(self.path, x)


def open_run(path: str | Path) -> Run:
    """The run in a folder. Raises ConfigError where there is none."""
    folder = Path(path).expanduser()
    read_record(folder)
    return Run(folder)


def simulate(recipe: str | Path, *, quiet: bool = True, **keys: Any) -> Run:
    """Run a recipe, a file or the name of one of Blackthorn's, in this process, with `keys`, such
    as local_lr, in place of its own; not `quiet`: with a line a round.

    Raises ConfigError before anything is written, RunFailed where no round changed the model.
    """
    config = recipe_config(Path(recipe), (), {kebab(key): value for key, value in keys.items()})
    # Known beforehand, so that it can be opened afterwards.
    folder = choose_folder(config)
    run_here(config.model_copy(update={"output_dir": str(folder)}), Console(quiet=quiet))
    return Run(folder)


def sweep(
    recipe: str | Path,
    over: Mapping[str, Sequence[Any]],
    *,
    seeds: int = 1,
    processes: int = 1,
    output_dir: str | Path | None = None,
    quiet: bool = True,
    **keys: Any,
) -> Sweep:
    """Simulate a recipe with every combination of values `over` keys, such as
    {"attack": ["nan", "all-ones"]}, over so many seeds; `keys` as of `simulate`. What has completed
    in the folder is not run again. More than one of `processes` import the calling script anew, so
    that it has to be guarded by `if __name__ == "__main__"`.

    Raises ConfigError before anything is written.
    """
    choices = {**{kebab(key): [value] for key, value in keys.items()}}
    choices |= {kebab(key): list(values) for key, values in over.items()}
    folder = None if output_dir is None else Path(output_dir)
    return sweep_here(Path(recipe), choices, seeds, processes, folder, Console(quiet=quiet))


def compare(*runs: str | Path, out: str | Path = "comparison.html") -> Path:
    """Write a page of what the runs in these folders differ in, their curves over each other, and
    how they ended; where it is. Raises ConfigError with one line."""
    return write_comparison(compared([Path(run).expanduser() for run in runs]), Path(out))
