"""Examples that the server knows to be right, and what local training makes of them."""

from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from blackthorn.settings.config import RunConfig
from blackthorn.strategies.aggregation import RoundOfRule
from blackthorn.strategies.local_rule import LocalSGD
from blackthorn.tasks.datasets import Examples
from blackthorn.tasks.labelled import LabelledTask, evaluate
from blackthorn.tasks.own_data import load_own_data
from blackthorn.tasks.problem import Problem, load_problem
from blackthorn.tasks.shards import ExampleShard


@dataclass
class TrustedExamples:
    """The server's own examples, on which it trains in every round as a client does: from w_t, by
    local SGD of the run's configuration, in batches drawn from the rule's generator."""

    config: RunConfig
    problem: Problem
    examples: Examples
    # An attacker who knows the rule asks for the same update a few hundred times.
    _known: tuple[int, float, Tensor, Tensor] | None = field(default=None, init=False)

    def update(self, at: RoundOfRule) -> Tensor:
        """u_0 = (w_t − w_0) / η_l [d], in the model's dtype."""
        if self._known is not None:
            server_round, local_lr, model, update = self._known
            same = (server_round, local_lr) == (at.server_round, at.local_lr)
            if same and torch.equal(model, at.model):
                return update
        update = self._trained(at)
        self._known = (at.server_round, at.local_lr, at.model.clone(), update)
        return update

    def _trained(self, at: RoundOfRule) -> Tensor:
        config, model = self.config, self.problem.model
        sgd = LocalSGD(config.local_steps, config.batch_size, at.local_lr, config.weight_decay)
        shard = ExampleShard(self.examples)
        params = at.model[None].clone()
        batches = shard.batches(at.generator, sgd.batch_size, sgd.steps)
        for step, (x, y) in enumerate(batches):
            weights = torch.full((1, len(y)), 1 / len(y), dtype=params.dtype)
            _, gradients = model.loss_and_gradient(params, x[None], y[None], weights)
            sgd.move(params, gradients, step, [0], at.model)
        return (at.model - params[0]) / at.local_lr

    def losses(self, models: Tensor) -> Tensor:
        """The mean loss of each of the models [B, d], float64 [B]."""
        model = self.problem.model
        found = [evaluate(model, params, self.examples)["loss"] for params in models]
        return torch.tensor(found, dtype=torch.float64)


@lru_cache(maxsize=2)
def trusted_examples(config: RunConfig) -> TrustedExamples:
    """Those of the key trusted-data or trusted-examples.

    Raises ValueError, one line, for a task without class labels, and for what cannot be read.
    """
    problem = load_problem(config)
    task = problem.task
    if not isinstance(task, LabelledTask):
        raise ValueError(
            f"aggregator = {config.aggregator} is not allowed with task {config.task}: it needs a "
            "task of examples with class labels"
        )
    if not config.trusted_data:
        assert task.trusted is not None  # as settings ask for one of the two
        return TrustedExamples(config, problem, task.trusted)
    try:
        found = load_own_data(config.trusted_data, task.input_shape, task.num_classes)
    except ValueError as error:
        raise ValueError(str(error).replace("data-path", "trusted-data", 1)) from None
    return TrustedExamples(config, problem, found)
