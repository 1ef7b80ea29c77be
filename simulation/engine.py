"""A Flower Grid that trains a whole cohort at once, in this process.

The same Strategy, the same local training and the same generators as in a deployment; only the
transport and the process per client are gone.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from flwr.app import Error, Message, MessageType
from torch import Tensor

from blackthorn.client_app.clientapp import train_as_configured, trained_norms
from blackthorn.client_app.configured_rule import check_rule
from blackthorn.client_app.disclosure import disclosed, told_problem
from blackthorn.client_app.dp_sgd import sample_epsilon, train_clients_privately
from blackthorn.client_app.messages import (
    RoundRequest,
    enrolment_reply,
    read_rounds,
    start_vector,
    train_reply,
    trained_arrays,
)
from blackthorn.client_app.private_update import noised_models
from blackthorn.client_app.training import training_device
from blackthorn.flower_port.synchronous import SynchronousGrid
from blackthorn.settings.config import RunConfig
from blackthorn.settings.own_code import in_one_line, is_own_code
from blackthorn.simulation.memory import keep_freed_memory, set_imports_aside
from blackthorn.strategies.array_codec import HeldArray
from blackthorn.strategies.local_rule import LocalRule
from blackthorn.tasks.problem import Problem
from blackthorn.tasks.shards import Shard
from blackthorn.wire import CONFIG, POISON

# Node ids only have to differ from Flower's own (0 and 1).
_FIRST_NODE = 1000
_CLIENT_APP_RAISED = 2  # Flower's code for a ClientApp that raised an exception


class EngineGrid(SynchronousGrid):
    """Grid of `config.num_clients` simulated clients of `problem`.

    `shards`: what they hold, by default as the task deals it. Raises ValueError for a task whose
    examples are on the nodes (own-data) without shards, and for a device that this machine does not
    have.
    """

    def __init__(
        self, config: RunConfig, problem: Problem, shards: Sequence[Shard] | None = None
    ) -> None:
        if problem.task.on_nodes and shards is None:
            raise ValueError(
                f"task = {config.task} is not allowed in a simulation: the examples are on the "
                "nodes; use blackthorn cluster"
            )
        super().__init__()
        keep_freed_memory()
        set_imports_aside()
        self.config = config
        self.problem = problem
        self.training_model = problem.model.on(training_device(config.device)).compiled()
        self._shards = problem.shards() if shards is None else list(shards)

    @property
    def is_closed(self) -> bool:
        """The clients are simulated here."""
        return True

    def get_node_ids(self) -> Iterable[int]:
        """All simulated nodes: they never go away."""
        return range(_FIRST_NODE, _FIRST_NODE + self.config.num_clients)

    def send_and_receive(
        self,
        messages: Iterable[Message],
        *,
        timeout: float | None = None,  # noqa: ARG002 (nothing here waits)
    ) -> Iterable[Message]:
        """The replies to `messages`, in their order."""
        return self._answer(list(messages))

    def _answer(self, messages: Sequence[Message]) -> list[Message]:
        if not messages:
            return []
        kind = messages[0].metadata.message_type
        if kind == MessageType.QUERY:
            return [self._enrol(message) for message in messages]
        if kind == MessageType.TRAIN:
            return self._train_cohort(messages)
        # As the ClientApp would: its clients hold nothing out, the server has a test set.
        error = Error(_CLIENT_APP_RAISED, f"the simulation does not answer {kind!r} messages")
        return [Message(error, reply_to=message) for message in messages]

    def _enrol(self, message: Message) -> Message:
        client = _client_of(message)
        reply = enrolment_reply(message, client, self._shards[client].num_examples)
        return disclosed(self.config, reply)

    def _train_cohort(self, messages: Sequence[Message]) -> list[Message]:
        name = self.config.algorithm
        if not is_own_code(name):
            return train_together([self], [messages])[0]
        try:
            with in_one_line(name):
                return train_together([self], [messages])[0]
        except ValueError as failed:
            # As from clients whose ClientApp raises: the rule is the user's own.
            reason = told_problem(self.config, str(failed))
            error = Error(_CLIENT_APP_RAISED, reason)
            return [Message(error, reply_to=message) for message in messages]

    def cohort(self, messages: Sequence[Message]) -> "Cohort":
        """What the train `messages` of one round ask for."""
        requests = read_rounds(messages)
        rule = check_rule(self.config, requests[0])
        clients = [_client_of(message) for message in messages]
        return Cohort(
            messages,
            rule,
            requests,
            clients,
            start_vector(requests[0].arrays, self.problem.model),
            [self._shard(message) for message in messages],
            [(self.config.seed, requests[0].server_round, client) for client in clients],
        )

    def _shard(self, message: Message) -> Shard:
        """The client's shard; with flipped labels where the simulated attacker poisons them."""
        shard = self._shards[_client_of(message)]
        poison = message.content[CONFIG].get(POISON, "")
        return self.problem.poisoned(shard, str(poison))


@dataclass(frozen=True)
class Cohort:
    """A round's local training: `start` w_t [d], the clients' shards, and the seed, round and
    client of their generators."""

    messages: Sequence[Message]
    rule: LocalRule
    requests: list[RoundRequest]
    clients: list[int]
    start: Tensor
    shards: list[Shard]
    generator_keys: list[tuple[int, int, int]]


def train_together(
    grids: Sequence[EngineGrid], messages: Sequence[Sequence[Message]]
) -> list[list[Message]]:
    """Answer a round's train messages of each grid by one batch of local training.

    Every grid's clients get what they would get alone, to rounding. The grids' runs must agree in
    all that local training depends on but the seed: the first one's configuration rules.
    """
    config, model = grids[0].config, grids[0].problem.model
    cohorts = [grid.cohort(sent) for grid, sent in zip(grids, messages, strict=True)]
    requests = [request for cohort in cohorts for request in cohort.requests]
    rule, local_lr = cohorts[0].rule, requests[0].local_lr
    if len(cohorts) == 1:
        # One vector serves all: a matrix of copies may not fit beside the clients' models.
        starts = cohorts[0].start
    else:
        starts = torch.cat([cohort.start.expand(len(cohort.shards), -1) for cohort in cohorts])
    shards = [shard for cohort in cohorts for shard in cohort.shards]
    keys = [key for cohort in cohorts for key in cohort.generator_keys]
    if config.local_dp_sgd:
        params, losses = train_clients_privately(config, model, starts, shards, local_lr, keys)
    else:
        params, losses = train_as_configured(
            config, grids[0].training_model, starts, shards, rule, requests, keys
        )
    norms = iter(trained_norms(config, rule, starts, params, local_lr))
    sizes = [len(cohort.shards) for cohort in cohorts]
    return [
        _replies(grid, cohort, own_params, own_losses, [next(norms) for _ in cohort.shards])
        for grid, cohort, own_params, own_losses in zip(
            grids, cohorts, params.split(sizes), losses.split(sizes), strict=True
        )
    ]


def _replies(
    grid: EngineGrid, cohort: Cohort, params: Tensor, losses: Tensor, norms: list[float | None]
) -> list[Message]:
    config, request = grid.config, cohort.requests[0]
    noised = noised_models(config, cohort.start, params, cohort.requests, cohort.clients)
    answers = trained_arrays(request.arrays, grid.problem.model, noised, HeldArray)
    spent = sample_epsilon(config, request.rounds_begun)
    return [
        disclosed(
            config,
            train_reply(message, request, arrays, shard.num_examples, loss, norm, spent),
        )
        for message, arrays, shard, loss, norm in zip(
            cohort.messages, answers, cohort.shards, losses.tolist(), norms, strict=True
        )
    ]


def _client_of(message: Message) -> int:
    """The client that the node holds: its id is never the server's to tell."""
    return message.metadata.dst_node_id - _FIRST_NODE
