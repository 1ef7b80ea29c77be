"""The task own-project: data, model, loss and evaluation by functions of the user's own."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor, nn

from blackthorn.randomness import Stream, generator_of
from blackthorn.settings.keys.problem import ProblemKeys
from blackthorn.settings.own_code import (
    OwnCodeFailed,
    guarded_function,
    in_one_line,
    is_own_code,
    offer,
    own_function,
)
from blackthorn.tasks import torch_data
from blackthorn.tasks.flat_model import FlatModel
from blackthorn.tasks.global_generators import global_generators_kept, seed_global_generators
from blackthorn.tasks.labelled import parse_input_shape
from blackthorn.tasks.losses import figures_of, loss_of, mean_of_examples
from blackthorn.tasks.task import EvaluationData
from blackthorn.tasks.torch_data import Batch, Data
from blackthorn.wire import ROUND_FIELDS


@dataclass(frozen=True)
class ClientData:
    """What a client trains on, and what it holds out, if anything."""

    training: Data
    held_out: Data | None


class ProjectShard:
    """A client's examples, loaded anew whenever they are asked for; see blackthorn's Shard.

    What a data set remembers of its use, a generator or a place where it is, would else hang on how
    many other clients were asked in between. `first`: what is loaded already, for the first use.
    """

    def __init__(self, load: Callable[[], ClientData], first: ClientData | None = None) -> None:
        self._load = load
        self._first = first
        # How many it trains on, and whether it holds others out; None: nobody has looked.
        self._known: tuple[int, bool] | None = None if first is None else _facts(first)

    @property
    def data(self) -> ClientData:
        """The client's data as they were loaded."""
        first, self._first = self._first, None
        return self._load() if first is None else first

    @property
    def num_examples(self) -> int:
        """How many it trains on."""
        return self._look()[0]

    @property
    def holds_out(self) -> bool:
        """Whether it has others to evaluate on."""
        return self._look()[1]

    def _look(self) -> tuple[int, bool]:
        if self._known is None:
            self._known = _facts(self._load())
        return self._known

    @property
    def example(self) -> tuple[Tensor, Tensor]:
        """One input and one target."""
        x, y = next(iter(torch_data.in_order(self.data.training, torch.device("cpu"))))
        return x[0], y[0]

    def batch(self, generator: np.random.Generator, size: int) -> Batch:
        """See Shard."""
        (only,) = self.batches(generator, size, 1)
        return only

    def batches(self, generator: np.random.Generator, size: int, steps: int) -> list[Batch]:
        """See Shard."""
        drawn = torch_data.batches(self.data.training, generator, size, steps, torch.device("cpu"))
        return list(drawn)


def _facts(data: ClientData) -> tuple[int, bool]:
    return torch_data.num_examples(data.training), data.held_out is not None


class ProjectShards(Sequence[ProjectShard]):
    """Those of a simulation's clients, of whom none is held in memory."""

    def __init__(self, load: Callable[[int], ClientData], num_clients: int) -> None:
        self._shards = [ProjectShard(partial(load, client)) for client in range(num_clients)]

    def __len__(self) -> int:
        return len(self._shards)

    @overload
    def __getitem__(self, client: int) -> ProjectShard: ...

    @overload
    def __getitem__(self, client: slice) -> list[ProjectShard]: ...

    def __getitem__(self, client: int | slice) -> ProjectShard | list[ProjectShard]:
        return self._shards[client]


@dataclass(frozen=True, eq=False)
class OwnProject:
    """See blackthorn.tasks.task.Task. `test`: the server's own examples, None where it has none."""

    config: ProblemKeys
    test: Data | None
    evaluation_data: EvaluationData = "public"

    @property
    def name(self) -> str:
        """Of the task."""
        return self.config.task

    @property
    def num_classes(self) -> int:
        """As configured; 0 where nobody says."""
        return self.config.num_classes

    @property
    def on_nodes(self) -> bool:
        """Whether only the nodes can load the examples: not in a simulation, see `shards`."""
        return True

    @property
    def server_evaluates(self) -> bool:
        """Whether the server has test examples."""
        return self.test is not None

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The mean loss of a batch."""
        return loss_of(self.config.loss)(outputs, y).mean()

    def example_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Losses [n]."""
        return mean_of_examples(loss_of(self.config.loss)(outputs, y), len(y))

    def module(self, model: str, seed: int) -> nn.Module:
        """What the function FILE.py:NAME builds; it may have the arguments input_shape and
        num_classes. It draws from the global generators, seeded by the run's.

        Raises ValueError where it gives no module.
        """
        shape = self.config.input_shape
        offered: dict[str, Any] = {"num_classes": self.config.num_classes}
        if shape:
            offered["input_shape"] = parse_input_shape(shape)
        module = _given("model", model, seed, **offered)
        if not isinstance(module, nn.Module):
            raise ValueError(
                f"model = {model} is not allowed: it gave {type(module).__name__}, not a "
                "torch.nn.Module"
            )
        if not hasattr(module, "batching"):
            object.__setattr__(module, "batching", "loop")
        return module

    def shards(self, config: ProblemKeys) -> ProjectShards:
        """What the clients 0 .. num-clients - 1 of a simulation have."""
        return ProjectShards(self.of_client, config.num_clients)

    def of_client(self, client_id: int, path: str = "") -> ClientData:
        """What `data` gives for a client. Of the arguments client_id, num_clients, seed and path,
        the place that a node names for its data, the function has those that it wants.

        Raises ValueError where it gives something else than examples.
        """
        config = self.config
        drawn = int(generator_of(Stream.OWN_DATA, config.seed, client_id).integers(2**32))
        offered = {"num_clients": config.num_clients, "seed": config.seed, "path": path}
        given = _given("data", config.data, drawn, client_id, client_id=client_id, **offered)
        whose = f"data = {config.data} gives for client {client_id}"
        pair = isinstance(given, tuple) and len(given) == 2
        training, held_out = given if pair else (given, None)
        torch_data.check_data(training, whose)
        if held_out is not None:
            torch_data.check_data(held_out, f"{whose} to be held out")
        return ClientData(training, held_out)

    def evaluate(self, model: FlatModel, params: Tensor) -> dict[str, float]:
        """Metrics on the server's test examples."""
        if self.test is None:
            raise ValueError("test-data is not set: the server has nothing to evaluate on")
        return self.measure(model, params, self.test)

    def measure(self, model: FlatModel, params: Tensor, data: Data) -> dict[str, float]:
        """Metrics of a model in evaluation mode on examples: what `evaluate` gives, or the usual
        ones. Raises OwnCodeFailed where that is no mapping of names to numbers, or one has a name
        that a round's line has for something else."""
        module = model.at(params)
        with torch.no_grad(), global_generators_kept(model.device):
            seed_global_generators(self.config.seed, model.device)
            torch_data.seed_loader(data, self.config.seed)
            if not is_own_code(self.config.evaluate):
                with in_one_line(f"evaluation of model = {self.config.model}"):
                    return self._usual(module, data, model.device)
            given = guarded_function(self.config.evaluate)(module, data)
        whose = f"evaluate = {self.config.evaluate}"
        metrics = numbers(given, whose)
        taken = [name for name in metrics if name in ROUND_FIELDS]
        if taken:
            raise OwnCodeFailed(
                f"{whose} gave {taken[0]!r}, which metrics.jsonl has for something else: give the "
                "metric another name"
            )
        return metrics

    def _usual(self, module: nn.Module, data: Data, device: torch.device) -> dict[str, float]:
        parts = [(module(x).cpu(), y.cpu()) for x, y in torch_data.in_order(data, device)]
        outputs, targets = (torch.cat(part) for part in zip(*parts, strict=True))
        loss = float(self.example_loss(outputs, targets).double().mean())
        return {"loss": loss, **figures_of(self.config.loss)(outputs, targets)}


def _given(key: str, name: str, drawn: int, client: int | None = None, /, **offered: Any) -> Any:
    """What the function FILE.py:NAME of a key gives, for a client, with the global generators
    seeded by `drawn`; see `offer`. Raises ValueError, one line, for what it raises."""
    with global_generators_kept(), in_one_line(f"{key} = {name}", client):
        seed_global_generators(drawn)
        return offer(own_function(name), **offered)


def numbers(given: Any, whose: str) -> dict[str, float]:
    """Metrics as numbers. Raises OwnCodeFailed for what is no mapping of names to numbers."""
    if given is None:
        given = {}
    if not isinstance(given, Mapping):
        raise OwnCodeFailed(f"{whose} gave {type(given).__name__}, not a dict of metrics")
    found = {}
    for name, value in given.items():
        try:
            found[str(name)] = float(value)
        except (TypeError, ValueError, RuntimeError):
            told = " ".join(f"{name!r} = {value!r}".split())
            raise OwnCodeFailed(f"{whose} gave {told}: not a number") from None
    return found


def load(config: ProblemKeys) -> OwnProject:
    """The task by the run configuration. Raises ValueError where `test-data` gives no examples."""
    test = None
    if is_own_code(config.test_data):
        test = _given("test-data", config.test_data, config.seed, seed=config.seed)
        torch_data.check_data(test, f"test-data = {config.test_data} gives")
    return OwnProject(config, test)
