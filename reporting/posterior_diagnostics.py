"""How well a chain of posterior samples has mixed: effective sample size and split-R̂."""

import contextlib
import math
import os
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from blackthorn.randomness import Stream, generator_of
from blackthorn.recording.posterior_store import StoredSample, read_samples
from blackthorn.tasks.labelled import LabelledTask
from blackthorn.tasks.problem import Problem

NUM_COORDINATES = 8
NUM_PREDICTIONS = 8
_FEWEST = 8  # two halves of four draws, the fewest that the estimators take


@dataclass(frozen=True)
class Traces:
    """Scalars followed along the chains: `values` [chains, draws, q] float64, one name each."""

    names: list[str]
    values: np.ndarray


@dataclass(frozen=True)
class Diagnosis:
    """Of one scalar: posterior mean and deviation, effective sample sizes of the bulk and of the
    5 % tails, split-R̂.

    The last three are NaN where there are fewer than 8 draws a chain, or a scalar never moves.
    """

    name: str
    mean: float
    deviation: float
    ess: float
    ess_tail: float
    rhat: float


def collect_traces(runs: Sequence[Path], problem: Problem) -> Traces:
    """Up to 8 coordinates of θ, drawn by the seed, and up to 8 predictions, over stored samples.

    A prediction is the probability of an example's own class, for examples spread evenly over the
    test set; without classes, the first client's outputs. Every run is a chain; all are cut to
    the shortest. Raises ValueError where a run has no samples.
    """
    dimension = problem.model.dimension
    drawn = generator_of(Stream.TRACES, problem.config.seed)
    chosen = drawn.choice(dimension, min(NUM_COORDINATES, dimension), replace=False)
    coordinates = torch.from_numpy(np.sort(chosen))
    probe = _probe(problem)
    chains = []
    for run in runs:
        rows = [_scalars(problem, sample, coordinates, probe) for sample in read_samples(run)]
        if not rows:
            raise ValueError(f"{run} has no posterior samples")
        chains.append(np.stack(rows))
    draws = min(map(len, chains))
    names = [f"theta-{int(i)}" for i in coordinates]
    names += [f"prediction-{i}" for i in range(0 if probe is None else len(probe[0]))]
    return Traces(names, np.stack([chain[:draws] for chain in chains]))


def diagnose(traces: Traces) -> list[Diagnosis]:
    """Effective sample size and split-R̂ of every scalar, by ArviZ (Vehtari et al., 2021)."""
    arviz = import_arviz()
    draws = traces.values.shape[1]
    found = []
    for name, values in zip(traces.names, np.moveaxis(traces.values, 2, 0), strict=True):
        ess = tail = rhat = math.nan
        if draws >= _FEWEST and values.std() > 0:
            ess = float(arviz.ess(values, method="bulk"))
            tail = float(arviz.ess(values, method="tail"))
            # Each half is a chain of its own; ArviZ itself would refuse a single chain.
            halves = np.concatenate([values[:, : draws // 2], values[:, draws - draws // 2 :]])
            rhat = float(arviz.rhat(halves, method="identity"))
        found.append(Diagnosis(name, float(values.mean()), float(values.std()), ess, tail, rhat))
    return found


def import_arviz() -> ModuleType:
    """ArviZ, which takes seconds to import and announces its next version while it does."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"\s*ArviZ is undergoing", category=FutureWarning)
        try:
            import arviz
        except OSError:
            # It notes the day of the announcement in a cache, and a container may have no home.
            with tempfile.TemporaryDirectory() as folder, _variable("XDG_CACHE_HOME", folder):
                import arviz
    return arviz


@contextlib.contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _probe(problem: Problem) -> tuple[Tensor, Tensor] | None:
    """Inputs and targets of the predictions that are followed; None where there are no data."""
    task = problem.task
    if isinstance(task, LabelledTask) and task.test is not None:
        rows = np.linspace(0, len(task.test) - 1, NUM_PREDICTIONS).astype(int)
        examples = task.test.select(np.unique(rows))
        return examples.x, examples.y
    if task.on_nodes:
        return None
    x, y = problem.shards()[0].batch(np.random.default_rng(0), 0)
    return x[:NUM_PREDICTIONS], y[:NUM_PREDICTIONS]


def _scalars(
    problem: Problem,
    sample: StoredSample,
    coordinates: Tensor,
    probe: tuple[Tensor, Tensor] | None,
) -> np.ndarray:
    state = {name: torch.from_numpy(value) for name, value in sample.state.items()}
    params = problem.model.flatten(state)
    parts = [params[coordinates].double()]
    if probe is not None:
        x, y = probe
        with torch.no_grad():
            outputs = problem.model.outputs(params, x).double()
        if problem.task.num_classes:
            outputs = torch.softmax(outputs, dim=1)[torch.arange(len(y)), y]
        parts.append(outputs.reshape(len(y), -1)[:, 0])
    return torch.cat(parts).numpy()


def gaussian_distance(
    mean: Tensor, covariance: Tensor, mean_2: Tensor, covariance_2: Tensor
) -> float:
    """The 2-Wasserstein distance of two Gaussians with means [d] and covariances [d, d], in which
    FA-LD's convergence is stated (Deng et al., section 5):

    W2² = ‖m − m'‖² + tr(C + C' − 2 (C^½ C' C^½)^½)
    """
    root = _square_root(covariance.double())
    cross = _square_root(root @ covariance_2.double() @ root)
    squared = (mean.double() - mean_2.double()).square().sum()
    squared += torch.trace(covariance.double() + covariance_2.double() - 2 * cross)
    return float(squared.clamp(min=0).sqrt())


def _square_root(matrix: Tensor) -> Tensor:
    """The symmetric root of a symmetric positive semidefinite matrix [d, d]."""
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.clamp(min=0).sqrt()) @ vectors.T
