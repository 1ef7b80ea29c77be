"""What is learned, apart from the algorithm: what every task can be asked for, one file a task."""

from collections.abc import Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from blackthorn.settings.keys.problem import ProblemKeys
from blackthorn.tasks.flat_model import FlatModel
from blackthorn.tasks.shards import Shard

# What `Task.evaluate` reads beside the model: nothing, or examples of nobody's; held-out examples
# of the people whose other examples the clients hold; what the clients themselves train on.
EvaluationData = Literal["public", "same-people", "clients"]


class Task(Protocol):
    """A learning problem. A task's file has ``load(config) -> Task`` and is named in problem.py."""

    @property
    def name(self) -> str:
        """The key ``task``'s value that it is loaded by."""

    @property
    def num_classes(self) -> int:
        """C; 0 where examples have no class labels."""

    @property
    def on_nodes(self) -> bool:
        """Whether every node brings its own examples, so that there are none to deal."""

    @property
    def server_evaluates(self) -> bool:
        """Whether the server can say how good a model is, so that ``evaluate`` may be called."""

    @property
    def evaluation_data(self) -> EvaluationData:
        """By what it does: under a privacy claim only what is public may be said."""

    def example_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Losses [n] of the module's outputs [n, ...] against y [n, ...], example by example."""

    def module(self, model: str, seed: int) -> nn.Module:
        """The initial model by the run's key ``model``, in float32 or better.

        Raises ValueError for a model that the task cannot be learned with.
        """

    def shards(self, config: ProblemKeys) -> Sequence[Shard]:
        """What every client trains on, in the order of the clients' ids.

        A pure function of data and configuration, so that all processes agree.
        Raises ValueError, one line, where the configuration asks for what there is not.
        """

    def evaluate(self, model: FlatModel, params: Tensor) -> dict[str, float]:
        """Metrics of w = ``params`` [d], among them ``loss``; see ``server_evaluates``."""


def torch_dtype(config: ProblemKeys) -> torch.dtype:
    """The run's precision. Raises ValueError unless it is float32 or float64."""
    if config.dtype not in ("float32", "float64"):
        raise ValueError(f"dtype is {config.dtype!r}: allowed are float32, float64")
    return torch.float64 if config.dtype == "float64" else torch.float32


def leave_alone(config: ProblemKeys, **usual: str | int) -> None:
    """Raises ValueError where a key that means nothing to the task has not its usual value."""
    for name, value in usual.items():
        chosen = getattr(config, name)
        if chosen != value:
            raise ValueError(
                f"{name.replace('_', '-')} is {chosen!r}: task {config.task!r} has no choice, "
                f"leave it {value!r}"
            )
