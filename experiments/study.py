"""The shape of every experiment: cells to measure, and a pure function from their numbers to a
section of the report."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from matplotlib.figure import Figure

from blackthorn.experiments.estimate import Estimate
from blackthorn.experiments.finding import Claim
from blackthorn.tasks.datasets import DataUnavailable, load_dataset

Label = tuple[str | float | int, ...]
Value = dict[str, Any]
Numbers = Mapping[Label, Value]


@dataclass(frozen=True)
class Scale:
    """How much is measured: `quick` is for three minutes on two cores; `seeds` and `draws` (of the
    initial weights, with all else the seed's) None leave their number to each experiment;
    `data_dir` as the key data-dir."""

    quick: bool = False
    seeds: int | None = None
    data_dir: str = ""
    draws: int | None = None

    def num_seeds(self, full: int, quick: int) -> int:
        """The number of seeds of an experiment that has `full` or `quick` of its own."""
        return self.seeds or (quick if self.quick else full)

    def num_draws(self, full: int, quick: int) -> int:
        """The number of draws of the initial weights, likewise."""
        return self.draws or (quick if self.quick else full)

    def choose(self, full: Any, quick: Any) -> Any:
        """One of the two."""
        return quick if self.quick else full

    def data_set(self, name: str) -> str:
        """`name`, or for a quick run without its files "digits".

        Raises DataUnavailable where a full run lacks the files.
        """
        try:
            load_dataset(name, self.data_dir)
        except DataUnavailable:
            if not self.quick:
                raise
            return "digits"
        return name


@dataclass(frozen=True)
class Context:
    """What a cell's work may use beside its settings, without being measured by it.

    `before` is the value of the cell that this one comes after.
    """

    data_dir: str = ""
    before: Value | None = None


@dataclass(frozen=True)
class Cell:
    """One measurement: `work(settings, context)` gives numbers that JSON can hold.

    `label` is what the section finds it by, `after` the label of a cell of the same experiment
    whose value the work needs, `cost` a guess of its seconds. `settings` is everything that
    decides the value.
    """

    label: Label
    work: Callable[[Mapping[str, Any], Context], Value]
    settings: Mapping[str, Any]
    after: Label | None = None
    cost: float = 1.0

    def key(self, before: str = "") -> str:
        """Digest of the full configuration, of the package's version, and of the key `before` of
        the cell it comes after."""
        work = f"{self.work.__module__}.{self.work.__qualname__}"
        parts = [_version(), work, before, self.label, self.settings]
        text = json.dumps(parts, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:24]


def _version() -> str:
    try:
        return version("blackthorn")
    except PackageNotFoundError:
        return "a checkout"


@dataclass(frozen=True)
class Table:
    """A table as the report shows it; the first column names the row."""

    caption: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Plot:
    """A figure, the name of its file, and a caption that says what is to be seen."""

    name: str
    caption: str
    figure: Figure


@dataclass(frozen=True)
class Section:
    """What an experiment tells the reader. `setting` are the hyper-parameters."""

    claims: Sequence[Claim]
    tables: Sequence[Table] = ()
    plots: Sequence[Plot] = ()
    texts: Sequence[str] = ()
    setting: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Experiment:
    """A table or figure of a paper: what it measures in one line, its cells at a scale, and what
    their numbers say."""

    name: str
    title: str
    about: str
    cells: Callable[[Scale], Sequence[Cell]]
    section: Callable[[Numbers, Scale], Section]


@dataclass(frozen=True)
class Paper:
    """A paper and its experiments, in the order of the report."""

    name: str
    title: str
    authors: str
    experiments: Sequence[Experiment]
    texts: Sequence[str] = ()


def series(numbers: Numbers, *label: str | float) -> list[Value]:
    """The values of all cells whose label is `label` and then a seed, by ascending seed."""
    found = {key[-1]: value for key, value in numbers.items() if key[:-1] == label}
    return [found[seed] for seed in sorted(found)]


def spread(values: Sequence[float], digits: int = 1) -> str:
    """The mean; where there are several, its standard error and their range, too: "83.1 ± 0.1
    (82.9 to 83.4)"."""
    found = Estimate.of(values)
    if found.count == 1:
        return f"{found.mean:.{digits}f}"
    low, high = min(values), max(values)
    # Two digits of the error: fewer would be a rounding of it to nothing.
    return f"{found.mean:.{digits}f} ± {found.error:.2g} ({low:.{digits}f} to {high:.{digits}f})"


def signed(one: Sequence[float], other: Sequence[float], digits: int = 2) -> str:
    """The mean of one − other, seed by seed, with its sign, and its standard error where there are
    several: "+2.68 ± 0.13"."""
    found = Estimate.of_difference(one, other)
    error = f" ± {found.error:.2g}" if found.count > 1 else ""
    return f"{found.mean:+.{digits}f}{error}"


def blocks(num_seeds: int, size: int) -> list[tuple[int, int]]:
    """The seeds 0 .. num_seeds − 1 in blocks (first, past the last) of at most `size`."""
    return [(start, min(start + size, num_seeds)) for start in range(0, num_seeds, size)]
