"""Predictions of a run: of its final model, and from its posterior samples where it has them."""

from collections import deque
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file
from torch import Tensor

from blackthorn.recording.posterior_store import read_samples
from blackthorn.settings.config import (
    ConfigError,
    RunConfig,
    make_config,
    read_recipe,
)
from blackthorn.settings.own_code import OWN_CODE_KEYS, kept
from blackthorn.tasks.flat_model import FlatModel
from blackthorn.tasks.labelled import LabelledTask
from blackthorn.tasks.own_arrays import not_finite
from blackthorn.tasks.own_project import OwnProject
from blackthorn.tasks.problem import Problem, load_problem

_BATCH = 4096


@dataclass(frozen=True)
class Predictions:
    """Of n examples and C classes, float64, entropies in nats.

    `probabilities` [n, C]: (1/S) Σ_s p(y | x, θ_s) over the S = `num_samples` stored samples.
    `entropy` [n]: that of `probabilities`, all the uncertainty. `mutual_information` [n]: entropy
    minus the mean entropy of the samples, the part that more data could remove. `point` [n, C]:
    the final model's probabilities, `point_entropy` [n] theirs.

    A run without samples has S = 0: `probabilities` are then `point`, and one model alone has no
    mutual information.
    """

    probabilities: np.ndarray
    entropy: np.ndarray
    mutual_information: np.ndarray
    point: np.ndarray
    num_samples: int

    @property
    def point_entropy(self) -> np.ndarray:
        """Entropy [n] of the point estimate's probabilities."""
        return entropy(self.point)


def entropy(probabilities: np.ndarray) -> np.ndarray:
    """−Σ_c p_c ln p_c [n] of probabilities [n, C]; 0 ln 0 = 0."""
    logs = np.log(probabilities, out=np.zeros_like(probabilities), where=probabilities > 0)
    return -(probabilities * logs).sum(axis=1)


def predict(run: Path, x: np.ndarray | Tensor) -> Predictions:
    """Class probabilities for inputs x [n, *input_shape]: by a run's posterior samples where it has
    some, else by its final model.

    Floating inputs are taken as they are, uint8 is scaled from 0..255 to [0, 1].
    Raises ConfigError for a folder without a run or whose run has left no model, a file of it that
    is torn, a task without classes, or inputs of another shape or type, or that are not finite.
    """
    _, problem = load_run(run)
    return predict_with(run, problem, x)


def load_run(run: Path) -> tuple[RunConfig, Problem]:
    """Configuration and learning problem of a run folder. Raises ConfigError with one line."""
    path = run / "config.toml"
    if not path.exists():
        raise ConfigError(f"{run} is not a run folder: it has no config.toml")
    values = read_recipe(path)
    for key in OWN_CODE_KEYS:
        if isinstance(values.get(key), str):
            values[key] = kept(key, values[key], run)
    config = make_config(values)
    try:
        return config, load_problem(config)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def predict_with(run: Path, problem: Problem, x: np.ndarray | Tensor) -> Predictions:
    """`predict` for a run that is loaded already."""
    inputs = _checked_inputs(problem, x)
    try:
        point = class_probabilities(problem.model, final_state(run), inputs)
        return _over_samples(run, problem.model, inputs, point)
    except ConfigError:
        raise
    except ValueError as error:
        # A torn file, or the samples of another model.
        raise ConfigError(f"{run} cannot be predicted with: {error}") from error


def _over_samples(run: Path, model: FlatModel, inputs: Tensor, point: np.ndarray) -> Predictions:
    total, total_entropy, samples = np.zeros_like(point), np.zeros(len(point)), 0
    for sample in read_samples(run):
        probabilities = class_probabilities(model, sample.state, inputs)
        total += probabilities
        total_entropy += entropy(probabilities)
        samples += 1
    if samples == 0:
        return Predictions(point, entropy(point), np.zeros(len(point)), point, 0)
    mean = total / samples
    of_the_mean = entropy(mean)
    # Mutual information is never negative, but for rounding.
    information = np.maximum(of_the_mean - total_entropy / samples, 0.0)
    return Predictions(mean, of_the_mean, information, point, samples)


def class_probabilities(
    model: FlatModel, state: dict[str, np.ndarray], inputs: Tensor
) -> np.ndarray:
    """softmax of the model's outputs [n, C], float64, at the parameters of a state_dict."""
    tensors = {name: torch.from_numpy(value) for name, value in state.items()}
    params, model = model.flatten(tensors), model.holding(tensors)
    with torch.no_grad():
        logits = torch.cat([model.outputs(params, x) for x in inputs.split(_BATCH)])
    return torch.softmax(logits.double(), dim=1).numpy()


def _checked_inputs(problem: Problem, x: np.ndarray | Tensor) -> Tensor:
    task = problem.task
    if not isinstance(task, LabelledTask):
        raise ConfigError(
            f"task {task.name} has no classes to predict"
            if not isinstance(task, OwnProject)
            else f"predict does not know the inputs of a project of your own: what model = "
            f"{problem.config.model} builds takes the state_dict of "
            'safetensors.torch.load_file(".../checkpoints/final.safetensors")'
        )
    inputs = _as_tensor(x)
    if inputs.ndim == 0 or tuple(inputs.shape[1:]) != task.input_shape or len(inputs) == 0:
        shape = ", ".join(map(str, task.input_shape))
        raise ConfigError(f"x has shape {tuple(inputs.shape)}: allowed is (n, {shape}), n >= 1")
    if inputs.dtype == torch.uint8:
        return inputs.float() / 255
    if task.name != "shakespeare" and not inputs.is_floating_point():
        raise _wrong_dtype(inputs.dtype)
    # What the model computes with: a float64 beyond float32's range is infinite to it.
    dtype = next(problem.model.module.parameters()).dtype
    if inputs.is_floating_point():
        wrong = not_finite(inputs.to(dtype).numpy())
        if wrong:
            raise ConfigError(wrong)
    return inputs


def _as_tensor(x: np.ndarray | Tensor) -> Tensor:
    if isinstance(x, Tensor):
        return x
    array = np.asarray(x)
    if array.dtype.kind not in "biufc":
        raise _wrong_dtype(array.dtype)
    if array.dtype == np.longdouble:
        array = array.astype(np.float64)
    # PyTorch takes this machine's byte order only.
    return torch.from_numpy(np.ascontiguousarray(array, array.dtype.newbyteorder("=")))


def _wrong_dtype(dtype: object) -> ConfigError:
    name = str(dtype).removeprefix("torch.")
    return ConfigError(f"x has dtype {name}: allowed are uint8 and floating")


def final_state(run: Path) -> dict[str, np.ndarray]:
    """The state_dict of a run's last model. Raises ConfigError where it has left none, ValueError
    for a torn file."""
    path = run / "checkpoints" / "final.safetensors"
    if path.exists():
        try:
            return load_file(path)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path} is not a model: {error}") from error
    # A run that was cut off: its last sample is the last model it left.
    last = deque(read_samples(run), maxlen=1)
    if not last:
        raise ConfigError(
            f"{run} has no model yet: checkpoints/final.safetensors is written when the run ends"
        )
    return last[0].state
