"""What is learned, apart from the algorithm: what every task can be asked for, one file a task."""

from collections.abc import Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from blackthorn.tasks.flat_model import FlatModel
from blackthorn.tasks.shards import Shard

# What `Task.evaluate` reads beside the model: nothing, or examples of nobody's; held-out examples
# of the people whose other examples the clients hold; what the clients themselves train on.
EvaluationData = Literal["public", "same-people", "clients"]


class ProblemConfig(Protocol):
    """The keys of the run configuration that name a learning problem."""

    @property
    def task(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def init_variance(self) -> float: ...
    @property
    def seed(self) -> int: ...
    @property
    def num_clients(self) -> int: ...
    @property
    def batch_size(self) -> int: ...

    # Data sets, and how they are dealt.
    @property
    def input_shape(self) -> str: ...
    @property
    def num_classes(self) -> int: ...
    @property
    def data_dir(self) -> str: ...
    @property
    def partition(self) -> str: ...
    @property
    def shards_per_client(self) -> int: ...
    @property
    def classes_per_client(self) -> int: ...
    @property
    def dirichlet_alpha(self) -> float: ...
    @property
    def examples_per_client(self) -> int: ...

    # Problems in closed form.
    @property
    def initial_point(self) -> float: ...
    @property
    def problem(self) -> str: ...
    @property
    def problem_c(self) -> float: ...
    @property
    def problem_k(self) -> float: ...
    @property
    def problem_dimension(self) -> int: ...
    @property
    def noise_law(self) -> str: ...
    @property
    def noise_alpha(self) -> float: ...
    @property
    def noise_dof(self) -> float: ...
    @property
    def noise_scale(self) -> float: ...
    @property
    def heterogeneity(self) -> float: ...
    @property
    def imbalance(self) -> float: ...


class Task(Protocol):
    """A learning problem. A task's file has ``load(config) -> Task`` and is named in problem.py.

    ``num_classes`` is 0 where examples have no class labels. ``on_nodes``: every node brings its
    own examples, so that there are none to deal. ``server_evaluates``: the server can say how good
    a model is. ``evaluation_data``: by what; under a privacy claim only what is public may be said.
    """

    @property
    def name(self) -> str: ...
    @property
    def num_classes(self) -> int: ...
    @property
    def on_nodes(self) -> bool: ...
    @property
    def server_evaluates(self) -> bool: ...
    @property
    def evaluation_data(self) -> EvaluationData: ...

    def example_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Losses [n] of the module's outputs [n, ...] against y [n, ...], example by example."""

    def module(self, model: str, seed: int) -> nn.Module:
        """The initial model by the run's key ``model``, in float32 or better.

        Raises ValueError for a model that the task cannot be learned with.
        """

    def shards(self, config: ProblemConfig) -> Sequence[Shard]:
        """What every client trains on, in the order of the clients' ids.

        A pure function of data and configuration, so that all processes agree.
        Raises ValueError, one line, where the configuration asks for what there is not.
        """

    def evaluate(self, model: FlatModel, params: Tensor) -> dict[str, float]:
        """Metrics of w = ``params`` [d], among them ``loss``; see ``server_evaluates``."""


def torch_dtype(config: ProblemConfig) -> torch.dtype:
    """The run's precision. Raises ValueError unless it is float32 or float64."""
    if config.dtype not in ("float32", "float64"):
        raise ValueError(f"dtype is {config.dtype!r}: allowed are float32, float64")
    return torch.float64 if config.dtype == "float64" else torch.float32


def leave_alone(config: ProblemConfig, **usual: str | int) -> None:
    """Raises ValueError where a key that means nothing to the task has not its usual value."""
    for name, value in usual.items():
        chosen = getattr(config, name)
        if chosen != value:
            raise ValueError(
                f"{name.replace('_', '-')} is {chosen!r}: task {config.task!r} has no choice, "
                f"leave it {value!r}"
            )
