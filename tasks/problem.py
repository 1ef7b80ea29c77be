"""A run's learning problem: the task, its model, and who holds which examples."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from blackthorn.settings.derived import chain_seed
from blackthorn.settings.keys import Keys
from blackthorn.settings.keys.problem import ProblemKeys
from blackthorn.settings.own_code import guarded_function, is_own_code
from blackthorn.tasks import (
    bayes_linear,
    labelled,
    least_squares,
    own_project,
    quadratic_noise,
    shakespeare,
)
from blackthorn.tasks.flat_model import FlatModel
from blackthorn.tasks.initial_model import load_weights
from blackthorn.tasks.shards import ExampleShard, Shard, with_flipped_labels
from blackthorn.tasks.task import Task, torch_dtype

_LOADERS: dict[str, Callable[[ProblemKeys], Task]] = {
    **dict.fromkeys(labelled.TASK_NAMES, labelled.load),
    "shakespeare": shakespeare.load,
    "quadratic-noise": quadratic_noise.load,
    "least-squares": least_squares.load,
    "bayes-linear": bayes_linear.load,
    "own-project": own_project.load,
}
TASK_NAMES = tuple(_LOADERS)
_OF_A_TASK = (
    *("name", "num_classes", "on_nodes", "server_evaluates"),
    *("example_loss", "module", "shards", "evaluate"),
)


@dataclass(frozen=True, eq=False)
class Problem:
    """Task and model of a run. `state()` is the initial model as a state_dict."""

    config: ProblemKeys
    task: Task
    model: FlatModel

    def state(self) -> dict[str, torch.Tensor]:
        """The module's state_dict: the initial model w_1 and the buffers."""
        return dict(self.model.module.state_dict())

    def shards(self) -> Sequence[Shard]:
        """What every client trains on, in the order of the clients' ids.

        Raises ValueError where the examples are the nodes' own, or cannot be dealt as configured.
        """
        return self.task.shards(self.config)

    def shard(self, client_id: int) -> Shard:
        """What one client trains on. Raises ValueError for a client that has no share."""
        if not 0 <= client_id < self.config.num_clients:
            raise ValueError(
                f"client {client_id} has no share of the data: num-clients = "
                f"{self.config.num_clients}"
            )
        return self.shards()[client_id]

    def evaluate(self, state: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """The task's metrics of the model in a state_dict, its statistics included."""
        return self.task.evaluate(self.model.holding(state), self.model.flatten(state))

    def measure(self, state: Mapping[str, torch.Tensor], held_out: Any) -> dict[str, float]:
        """Those on a node's own held-out examples."""
        model, params = self.model.holding(state), self.model.flatten(state)
        if isinstance(self.task, own_project.OwnProject):
            return self.task.measure(model, params, held_out)
        return labelled.evaluate(model, params, held_out)

    def poisoned(self, shard: Shard, poison: str) -> Shard:
        """The shard of a client whose operator poisons it; "label-flip" is y -> C - 1 - y, and
        every other word leaves it as it is. Raises ValueError where there are no labels to flip.
        """
        if poison != "label-flip":
            return shard
        if not isinstance(shard, ExampleShard) or self.task.num_classes == 0:
            raise ValueError(f"label-flip is impossible: task {self.task.name!r} has no labels")
        return with_flipped_labels(shard, self.task.num_classes)


def load_problem(config: Keys, *, at_client: bool = False) -> Problem:
    """Load the task's data and build the initial model, in the run's dtype: from the seed, or with
    the weights of `initial-model`, of which a client needs those alone that do not travel.

    Raises ValueError (DataUnavailable for absent data) with one line.
    """
    task = _own_task(config) if is_own_code(config.task) else _task(config)
    module = task.module(config.model, chain_seed(config))
    if config.initial_model:
        load_weights(module, config.initial_model, frozen_alone=at_client)
    module.to(torch_dtype(config))
    return Problem(config, task, FlatModel(module, task.example_loss))


def _task(config: ProblemKeys) -> Task:
    if config.task not in _LOADERS:
        raise ValueError(f"task {config.task!r} is unknown: allowed are {', '.join(TASK_NAMES)}")
    return _LOADERS[config.task](config)


def _own_task(config: ProblemKeys) -> Task:
    """What the function FILE.py:NAME gives for the configuration."""
    try:
        task: Task = guarded_function(config.task)(config)
    except ValueError as error:
        raise ValueError(f"task = {config.task} is not allowed: {error}") from error
    lacks = [name for name in _OF_A_TASK if not hasattr(task, name)]
    if lacks:
        raise ValueError(
            f"task = {config.task} is not allowed: it gave {type(task).__name__}, which lacks "
            f"{', '.join(lacks)}"
        )
    return task
