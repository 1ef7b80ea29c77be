"""A run's learning problem: the task, its model, and who holds which examples."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from tasks.datasets import Examples
from tasks.flat_model import FlatModel
from tasks.models import build_model
from tasks.partitions import partition
from tasks.shards import ExampleShard
from tasks.task import Task, default_model, load_task


class ProblemConfig(Protocol):
    """The keys of the run configuration that name a learning problem."""

    @property
    def task(self) -> str: ...
    @property
    def model(self) -> str: ...
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
    @property
    def num_clients(self) -> int: ...
    @property
    def seed(self) -> int: ...


@dataclass(frozen=True, eq=False)
class Problem:
    """Task and model. `state()` is the initial model as a state_dict."""

    task: Task
    model: FlatModel

    def state(self) -> dict[str, torch.Tensor]:
        """The module's state_dict: the initial model w_1 and the buffers."""
        return dict(self.model.module.state_dict())


def load_problem(config: ProblemConfig) -> Problem:
    """Load the task's data and build the initial model from the seed.

    Raises ValueError (DataUnavailable for absent data) with one line.
    """
    task = load_task(config.task, config.data_dir, config.input_shape, config.num_classes)
    name = default_model(config.task) if config.model == "auto" else config.model
    module = build_model(name, task.input_shape, task.num_classes, config.seed)
    return Problem(task, FlatModel(module, task.example_loss))


def partition_indices(config: ProblemConfig, train: Examples) -> list[np.ndarray]:
    """Indices of every client's training examples: a pure function of (data, clients, seed)."""
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


def partition_shards(config: ProblemConfig, train: Examples) -> list[ExampleShard]:
    """Every client's shard of `train`, in the order of the clients' ids."""
    return [ExampleShard(train, indices) for indices in partition_indices(config, train)]
