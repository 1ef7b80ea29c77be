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
    def task(self) -> str:
        """Its name: a row of problem.py."""

    @property
    def model(self) -> str:
        """The model's name, or ``auto`` for the task's usual one."""

    @property
    def dtype(self) -> str:
        """``float32`` or ``float64``: the precision of w and of training."""

    @property
    def init_variance(self) -> float:
        """Variance of mlp's and cnn's first weights, times the inputs of a unit."""

    @property
    def seed(self) -> int:
        """What initial weights, partition and data drawn by a task follow from."""

    @property
    def num_clients(self) -> int:
        """N, in how many parts the examples are dealt."""

    @property
    def batch_size(self) -> int:
        """Examples a local step; 0: the client's whole shard."""

    # Data sets, and how they are dealt.
    @property
    def input_shape(self) -> str:
        """Shape of one example of nodes' own data, such as ``1,28,28``; else empty."""

    @property
    def num_classes(self) -> int:
        """C of nodes' own data; else 0."""

    @property
    def data_dir(self) -> str:
        """Folder of the data sets; empty: as the process environment says."""

    @property
    def partition(self) -> str:
        """The scheme's name, a row of partitions.py or ``natural``."""

    @property
    def shards_per_client(self) -> int:
        """``label-shards``: how many runs of examples sorted by label a client gets."""

    @property
    def classes_per_client(self) -> int:
        """``classes-per-client``: how many labels a client sees."""

    @property
    def dirichlet_alpha(self) -> float:
        """``dirichlet``: concentration, above 0; the smaller, the fewer labels a client."""

    @property
    def examples_per_client(self) -> int:
        """Examples a client where scheme or task can choose; 0: their own number."""

    # Problems in closed form.
    @property
    def initial_point(self) -> float:
        """Every coordinate of w_1."""

    @property
    def problem(self) -> str:
        """Which of the two problems ``least-squares`` is."""

    @property
    def problem_c(self) -> float:
        """c of Claim 2.1, above 0."""

    @property
    def problem_k(self) -> float:
        """k of Claim 2.1."""

    @property
    def problem_dimension(self) -> int:
        """d, at least 1."""

    @property
    def noise_law(self) -> str:
        """Law of the gradient noise, one of NOISE_LAWS."""

    @property
    def noise_alpha(self) -> float:
        """α of the stable law, in (0, 2]."""

    @property
    def noise_dof(self) -> float:
        """Degrees of freedom of Student's t, above 0."""

    @property
    def noise_scale(self) -> float:
        """Factor on the noise; ``bayes-linear``: σ, above 0."""

    @property
    def heterogeneity(self) -> float:
        """``bayes-linear``: h, at least 0; see heterogeneous_clients."""

    @property
    def imbalance(self) -> float:
        """``bayes-linear``: in [0, 1), how unequal the clients' numbers of examples are."""


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
