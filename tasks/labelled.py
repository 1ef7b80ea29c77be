"""Tasks that are a data set with class labels: digits, MNIST, ..., and every node's own data."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from blackthorn.settings.keys.problem import ProblemKeys
from blackthorn.tasks.datasets import (
    DATASET_NAMES,
    INPUT_SHAPES,
    NUM_CLASSES,
    Examples,
    load_dataset,
)
from blackthorn.tasks.features import FEATURES, load_features
from blackthorn.tasks.flat_model import FlatModel
from blackthorn.tasks.losses import cross_entropy
from blackthorn.tasks.models import build_model
from blackthorn.tasks.partitions import partition
from blackthorn.tasks.shards import ExampleShard
from blackthorn.tasks.task import EvaluationData

OWN_DATA = "own-data"
NATURAL = "natural"
TASK_NAMES = (*DATASET_NAMES, FEATURES, OWN_DATA)
_DEFAULT_MODELS = {
    "digits": "mlp-32",
    "mnist": "mlp-25",
    "fashion-mnist": "logistic",
    "emnist": "mlp-25",
    "cifar10": "cnn",
    FEATURES: "logistic",
    OWN_DATA: "mlp-32",
}

ModuleBuilder = Callable[[str, tuple[int, ...], int, int], nn.Module]


def evaluate(
    model: FlatModel, params: Tensor, examples: Examples, batch_size: int = 4096
) -> dict[str, float]:
    """Mean loss and share of right labels of a model at w = ``params`` [d] over all the examples.

    The largest of outputs [n, C] is the answer. Memory is that of one batch; sums are float64.

    Raises ValueError where there are no examples.
    """
    if len(examples) == 0:
        raise ValueError("there are 0 examples to evaluate on: at least 1 is needed")
    correct, loss = 0, 0.0
    with torch.no_grad():
        for x, y in zip(examples.x.split(batch_size), examples.y.split(batch_size), strict=True):
            outputs = model.outputs(params, x)
            correct += int((outputs.argmax(dim=1) == y).sum())
            loss += float(model.example_loss(outputs, y).sum(dtype=torch.float64))
    return {"accuracy": correct / len(examples), "loss": loss / len(examples)}


@dataclass(frozen=True, eq=False)
class LabelledTask:
    """Classification of examples with labels 0 .. num_classes - 1; see blackthorn.tasks.task.Task.

    ``train`` is None where every node brings its own examples, ``test`` where the server has
    nothing to evaluate on. ``natural`` are the clients that the data set itself knows: indices
    into ``train``, one array a client. ``builder`` makes the module from a name, the shape of an
    example, the number of classes and a seed.
    """

    name: str
    train: Examples | None
    test: Examples | None
    input_shape: tuple[int, ...]
    num_classes: int
    usual_model: str
    natural: Sequence[np.ndarray] = ()
    trusted: Examples | None = None
    builder: ModuleBuilder = build_model
    evaluation_batch: int = 4096
    evaluation_data: EvaluationData = "public"

    @property
    def on_nodes(self) -> bool:
        """Whether the examples are the nodes' own."""
        return self.train is None

    @property
    def server_evaluates(self) -> bool:
        """Whether there is a test set."""
        return self.test is not None

    def example_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Cross-entropy [n]."""
        return cross_entropy(outputs, y)

    def module(self, model: str, seed: int) -> nn.Module:
        """The initial model by name; "auto" is the task's usual one."""
        name = self.usual_model if model == "auto" else model
        return self.builder(name, self.input_shape, self.num_classes, seed)

    def shards(self, config: ProblemKeys) -> list[ExampleShard]:
        """Every client's share of the training examples: a pure function of data and config.

        Raises ValueError for what the examples cannot give.
        """
        if self.train is None:
            raise ValueError(
                f"task = {self.name} is not allowed in a simulation: the examples are on the "
                "nodes; use blackthorn cluster"
            )
        if config.partition == NATURAL:
            indices = self._natural_clients(config.num_clients)
        else:
            indices = _partition(config, self.train)
        return [ExampleShard(self.train, own) for own in indices]

    def evaluate(self, model: FlatModel, params: Tensor) -> dict[str, float]:
        """Accuracy and mean loss at w = ``params`` [d] on the test set."""
        if self.test is None:
            raise ValueError(f"task {self.name!r} has no test set")
        return evaluate(model, params, self.test, self.evaluation_batch)

    def _natural_clients(self, num_clients: int) -> Sequence[np.ndarray]:
        if not self.natural:
            raise ValueError(f"partition 'natural': task {self.name!r} knows no clients of its own")
        if num_clients > len(self.natural):
            raise ValueError(
                f"num-clients is {num_clients}: task {self.name!r} has {len(self.natural)} "
                "natural clients"
            )
        return self.natural[:num_clients]


def _partition(config: ProblemKeys, train: Examples) -> list[np.ndarray]:
    return partition(
        train.y,
        config.partition,
        config.num_clients,
        config.seed,
        shards_per_client=config.shards_per_client,
        classes_per_client=config.classes_per_client,
        dirichlet_alpha=config.dirichlet_alpha,
        examples_per_client=config.examples_per_client,
    )


def load(config: ProblemKeys) -> LabelledTask:
    """The task that the run configuration names; see load_task."""
    task = load_task(config.task, config.data_dir, config.input_shape, config.num_classes)
    task = _with_trusted(task, config.trusted_examples)
    return replace(task, builder=partial(build_model, variance=config.init_variance))


def _with_trusted(task: LabelledTask, count: int) -> LabelledTask:
    """``count`` of the test examples, evenly spaced, for the server to train on: it evaluates on
    the others. Raises ValueError where there are not as many."""
    if count == 0:
        return task
    total = 0 if task.test is None else len(task.test)
    if task.test is None or count >= total:
        raise ValueError(
            f"trusted-examples is {count}: task {task.name!r} has {total} test examples, and needs "
            "one to evaluate on"
        )
    chosen = np.arange(count) * total // count
    others = np.setdiff1d(np.arange(total), chosen)
    return replace(task, trusted=task.test.select(chosen), test=task.test.select(others))


def load_task(
    name: str, data_dir: str = "", input_shape: str = "", num_classes: int = 0
) -> LabelledTask:
    """The task of a data set (see load_dataset), ``features`` (see load_features) or ``own-data``.

    ``own-data`` needs ``input_shape`` such as "1,28,28" or "64", and ``num_classes`` >= 2; the
    others know theirs and accept no different value.

    Raises ValueError for a wrong name, shape or number, DataUnavailable for absent data.
    """
    usual_model = default_model(name)
    if name == OWN_DATA:
        if num_classes < 2:
            raise ValueError(f"num-classes is {num_classes}: task 'own-data' needs at least 2")
        shape = parse_input_shape(input_shape)
        return LabelledTask(name, None, None, shape, num_classes, usual_model)
    dataset = load_features(data_dir) if name == FEATURES else load_dataset(name, data_dir)
    if input_shape and parse_input_shape(input_shape) != dataset.input_shape:
        raise ValueError(
            f"input-shape is {input_shape!r}: task {name!r} has "
            f"{','.join(map(str, dataset.input_shape))!r}{_instead(name, 'leave it empty')}"
        )
    if num_classes not in (0, dataset.num_classes):
        raise ValueError(
            f"num-classes is {num_classes}: task {name!r} has {dataset.num_classes}"
            f"{_instead(name, 'leave it 0')}"
        )
    return LabelledTask(
        name, dataset.train, dataset.test, dataset.input_shape, dataset.num_classes, usual_model
    )


def _instead(name: str, otherwise: str) -> str:
    """What to set: of features it has to be said, since clients are told without a look at them."""
    return " in its files" if name == FEATURES else f", {otherwise}"


def example_form(config: ProblemKeys) -> tuple[tuple[int, ...], int] | None:
    """The shape of an example and the number of classes that the run's task has, without a look at
    any; None where it is no task of this file. Raises ValueError as parse_input_shape.
    """
    if config.task in DATASET_NAMES:
        return INPUT_SHAPES[config.task], NUM_CLASSES
    if config.task in (FEATURES, OWN_DATA):
        return parse_input_shape(config.input_shape), config.num_classes
    return None


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
