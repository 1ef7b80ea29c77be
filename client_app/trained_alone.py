"""Clients that are trained each on its own: by the recipe's trainer, or by ours over a module.

The round that a trainer is given is the one of `round.py`, which carries the algorithm out, with
what the recipe says of local training beside it.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from blackthorn.settings.config import RunConfig
from blackthorn.settings.derived import chain_seed
from blackthorn.settings.own_code import in_one_line, is_own_code, own_function
from blackthorn.strategies.array_codec import decode
from blackthorn.strategies.local_rule import ClientRound
from blackthorn.tasks import torch_data
from blackthorn.tasks.datasets import Examples
from blackthorn.tasks.global_generators import global_generators_kept, seed_global_generators
from blackthorn.tasks.own_project import ClientData, OwnProject, ProjectShard, numbers
from blackthorn.tasks.problem import Problem
from blackthorn.tasks.shards import ExampleShard, Shard
from blackthorn.tasks.torch_data import Batch, Data
from blackthorn.wire import METRICS, UPDATE_NORM

from .configured_rule import asked_start, check_rule
from .messages import evaluate_reply, read_model, read_round
from .private_update import drawn_noise, rounds_of
from .round import Round
from .taking_part import put_kept, take_part
from .training import client_generator, own_code_seed, training_device

# Returns the metrics of the training, which go with the update where no claim forbids it; no server
# of ours reads them.
Trainer = Callable[[nn.Module, Data, "TrainerRound"], Mapping[str, float] | None]

_MOMENTUM = 0.9


class TrainerRound(Round):
    """A round as a recipe's trainer is given it: `Round`, and local training as configured.

    `client_id`; `local_steps`, `batch_size`, `weight_decay`; `generator`, of the client's batches;
    `seed`, of the global generators; `device`, where the model is; `update_norm`, ‖u_i‖ before the
    client shortened what it sent, for instruments, else None.
    """

    def __init__(
        self, config: RunConfig, problem: Problem, client_id: int, message: Message
    ) -> None:
        request = read_round(message)
        rule = check_rule(config, request)
        drawn_noise(config, request)
        super().__init__(message, rule)
        self.client_id = client_id
        self.local_steps, self.batch_size = config.local_steps, config.batch_size
        self.weight_decay = config.weight_decay
        key = (chain_seed(config), request.server_round, client_id)
        self.generator, self.seed = client_generator(*key), own_code_seed(*key)
        self.device = training_device(config.device)
        self._config, self._task = config, problem.task
        self._of_client = rounds_of(config, [request], [client_id])
        self.update_norm: float | None = None

    def batches(self, data: Data) -> Iterator[Batch]:
        """`local_steps` batches of `batch_size` distinct examples, drawn anew for each (0: all); a
        DataLoader's own, which begins again where it ends."""
        return torch_data.batches(
            data, self.generator, self.batch_size, self.local_steps, self.device
        )

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The recipe's loss of a batch: the mean over its examples."""
        if isinstance(self._task, OwnProject):
            return self._task.loss(outputs, y)
        return self._task.example_loss(outputs, y).mean()

    def local_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The recipe's `local-optimizer` at the round's rate, with its weight decay: SGD is the
        algorithm's own, every other is wrapped.

        Raises ValueError as `optimizer` and `wrap`.
        """
        kind = self._config.local_optimizer
        if kind == "sgd":
            return self.optimizer(model, weight_decay=self.weight_decay)
        made = _OPTIMIZERS[kind]
        trained = [one for one in model.parameters() if one.requires_grad]
        return self.wrap(made(trained, lr=self.local_lr, weight_decay=self.weight_decay))

    def sent(self, trained: Mapping[str, np.ndarray]) -> ArrayRecord:
        """As Round's; what the server's instruments are told is taken before the rule."""
        record = super().sent(trained)
        if self._config.instruments:
            start, moved = (self._layout.flatten(one) for one in (self._state, trained))
            (self.update_norm,) = self.rule.trained_norms(start, moved[None], self.local_lr)
        return record

    def _told(self, generator: np.random.Generator | None = None) -> ClientRound:
        """By the configuration, which may say whence noise is drawn."""
        own = replace(self._of_client(0), kept=self.last_update)
        return own if generator is None else replace(own, generator=lambda: generator)


def _momentum(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, momentum=_MOMENTUM, **options)


_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "momentum": _momentum,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


def train(model: nn.Module, data: Data, current: TrainerRound) -> dict[str, float]:
    """Our own trainer: `local-steps` of `local-optimizer` on the loss, in training mode."""
    model.train()
    optimizer = current.local_optimizer(model)
    total = 0.0
    for x, y in current.batches(data):
        optimizer.zero_grad()
        loss = current.loss(model(x), y)
        loss.backward()
        optimizer.step()
        total += float(loss.detach())
    return {"train-loss": total / current.local_steps}


def data_of(shard: Shard) -> ClientData:
    """A client's examples as PyTorch has them, and nobody else's: a trainer may change them.

    Raises ValueError for a task that has none."""
    if isinstance(shard, ProjectShard):
        return shard.data
    if not isinstance(shard, ExampleShard):
        raise ValueError(f"a trainer needs examples, and {type(shard).__name__} has none")
    own = shard.examples
    if own is shard.data_set:
        own = Examples(own.x.clone(), own.y.clone())
    return ClientData(TensorDataset(own.x, own.y), None)


def train_alone(
    config: RunConfig,
    problem: Problem,
    client_id: int,
    shard: Shard,
    message: Message,
    context: Context,
) -> Message:
    """The client's answer to a train message. In `context` are statistics of its own.

    Raises PublicRefusal where the server's rule or model is not the configuration's; ValueError,
    one line, for what the trainer raises or gives.
    """
    current = TrainerRound(config, problem, client_id, message)
    asked_start(read_model(message), problem.model)
    own = is_own_code(config.trainer)
    trainer: Trainer = own_function(config.trainer) if own else train
    # Where what it raises comes from.
    blamed = f"trainer = {config.trainer}" if own else _ours(config)

    def fit(message: Message, context: Context) -> Message:
        del message, context
        data = data_of(shard).training
        model = copy.deepcopy(problem.model.module).to(current.device)
        current.load(model)
        model.train()
        torch_data.seed_loader(data, current.seed)
        with global_generators_kept(current.device), torch.enable_grad():
            seed_global_generators(current.seed, current.device)
            with in_one_line(blamed):
                given = trainer(model, data, current)
            metrics = numbers(given, f"trainer = {config.trainer}")
        return current.reply(model, metrics, shard.num_examples)

    with _one_thread():
        reply = take_part(message, context, fit, current)
    if current.update_norm is not None:
        reply.content.metric_records[METRICS][UPDATE_NORM] = current.update_norm
    return reply


def evaluate_alone(
    problem: Problem, held_out: Data | None, message: Message, context: Context
) -> Message:
    """The client's answer to an evaluate message: what the task measures on the examples that it
    never trains on, by statistics of its own where it keeps any in `context`.

    Raises ValueError where it has none.
    """
    count = 0 if held_out is None else torch_data.num_examples(held_out)
    if held_out is None or count == 0:
        raise ValueError("this node has no held-out examples to evaluate on")
    put_kept(message, context)
    arrays = read_model(message)
    asked_start(arrays, problem.model)
    state = {name: torch.from_numpy(decode(array)) for name, array in arrays.items()}
    with _one_thread():
        metrics = problem.measure(state, held_out)
    return evaluate_reply(message, count, metrics)


def _ours(config: RunConfig) -> str:
    """What our own trainer puts together."""
    of_data = f" on data = {config.data}" if config.data else ""
    return f"training of model = {config.model}{of_data} by loss = {config.loss}"


@contextmanager
def _one_thread() -> Iterator[None]:
    """As on nodes, which share a machine's cores: how sums are ordered hangs on the number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
