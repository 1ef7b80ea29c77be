"""What is learned: examples, the shape of a model's input and output, and the loss."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tasks.datasets import DATASET_NAMES, Examples, load_dataset
from tasks.flat_model import ExampleLoss

OWN_DATA = "own-data"
TASK_NAMES = (*DATASET_NAMES, OWN_DATA)
_DEFAULT_MODELS = {
    "digits": "mlp-32",
    "mnist": "mlp-25",
    "fashion-mnist": "logistic",
    "cifar10": "cnn",
    OWN_DATA: "mlp-32",
}


def cross_entropy(outputs: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy of logits [n, C] against labels int64 [n], example by example: [n]."""
    return torch.nn.functional.cross_entropy(outputs, y, reduction="none")


@dataclass(frozen=True, eq=False)
class Task:
    """A learning problem, apart from model and algorithm.

    ``train`` is None where every node brings its own examples, ``test`` where the server has
    nothing to evaluate on. ``example_loss(outputs [n, ...], y [n, ...]) -> [n]``.
    """

    name: str
    train: Examples | None
    test: Examples | None
    input_shape: tuple[int, ...]
    num_classes: int
    example_loss: ExampleLoss = cross_entropy


def load_task(name: str, data_dir: str = "", input_shape: str = "", num_classes: int = 0) -> Task:
    """The task of a data set (see load_dataset), or ``own-data``.

    ``own-data`` needs ``input_shape`` such as "1,28,28" or "64", and ``num_classes`` >= 2; the
    others know theirs and accept no different value.

    Raises ValueError for a wrong name, shape or number, DataUnavailable for absent data.
    """
    if name not in TASK_NAMES:
        raise ValueError(f"task {name!r} is unknown: allowed are {', '.join(TASK_NAMES)}")
    if name == OWN_DATA:
        if num_classes < 2:
            raise ValueError(f"num-classes is {num_classes}: task 'own-data' needs at least 2")
        return Task(name, None, None, parse_input_shape(input_shape), num_classes)
    dataset = load_dataset(name, data_dir)
    if input_shape and parse_input_shape(input_shape) != dataset.input_shape:
        raise ValueError(
            f"input-shape is {input_shape!r}: task {name!r} has "
            f"{','.join(map(str, dataset.input_shape))!r}, leave it empty"
        )
    if num_classes not in (0, dataset.num_classes):
        raise ValueError(
            f"num-classes is {num_classes}: task {name!r} has {dataset.num_classes}, leave it 0"
        )
    return Task(name, dataset.train, dataset.test, dataset.input_shape, dataset.num_classes)


def parse_input_shape(text: str) -> tuple[int, ...]:
    """(1, 28, 28) from "1,28,28". Raises ValueError for anything but positive integers."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise ValueError(
            f"input-shape is {text!r}: allowed are positive integers such as '64' or '1,28,28'"
        )
    return tuple(int(part) for part in parts)


def default_model(task_name: str) -> str:
    """The name of the model that a task is learned with when the run config names none."""
    if task_name not in _DEFAULT_MODELS:
        raise ValueError(f"task {task_name!r} is unknown: allowed are {', '.join(TASK_NAMES)}")
    return _DEFAULT_MODELS[task_name]
