"""A Flower Grid that trains a whole cohort at once, in this process.

The same Strategy, the same local training and the same generators as in a deployment; only the
transport and the process per client are gone.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from flwr.app import Context, Error, Message, MessageType, RecordDict
from torch import Tensor

from blackthorn.client_app.clientapp import LocalRound, train_as_configured, trained_norms
from blackthorn.client_app.configured_rule import check_rule
from blackthorn.client_app.disclosure import PublicRefusal, disclosed, told_problem
from blackthorn.client_app.dp_sgd import sample_epsilon, train_clients_privately
from blackthorn.client_app.masking import Masking, configured_rule, noise_entropy
from blackthorn.client_app.messages import (
    enrolment_reply,
    read_rounds,
    start_vector,
    train_reply,
    trained_arrays,
)
from blackthorn.client_app.private_update import noised_models
from blackthorn.client_app.training import training_device
from blackthorn.flower_port.synchronous import CLIENT_APP_RAISED, SynchronousGrid
from blackthorn.settings.config import RunConfig
from blackthorn.settings.derived import chain_seed, trains_alone
from blackthorn.settings.own_code import in_one_line, is_own_code
from blackthorn.simulation.clients_alone import ClientsAlone
from blackthorn.simulation.memory import keep_freed_memory, set_imports_aside
from blackthorn.strategies.array_codec import HeldArray
from blackthorn.tasks.problem import Problem
from blackthorn.tasks.shards import Shard
from blackthorn.wire import ARRAYS, CONFIG, POISON, SECURE

# Node ids only have to differ from Flower's own (0 and 1).
_FIRST_NODE = 1000


class EngineGrid(SynchronousGrid):
    """Grid of `config.num_clients` simulated clients of `problem`.

    `shards`: what they hold, by default as the task deals it. Raises ValueError for a task that has
    none to deal (own-data) without shards, and for a device that this machine does not have.
    """

    def __init__(
        self, config: RunConfig, problem: Problem, shards: Sequence[Shard] | None = None
    ) -> None:
        super().__init__()
        keep_freed_memory()
        set_imports_aside()
        self.config = config
        self.problem = problem
        self.training_model = problem.model.on(training_device(config.device)).compiled()
        # What each client has kept of its last round, by a rule that asks for it.
        self._kept: dict[int, Tensor] = {}
        # In secure aggregation: a round's secrets, by client.
        self._secrets: dict[int, RecordDict] = {}
        self._masking = Masking(
            lambda message, _: configured_rule(config, message),
            lambda message, _: noise_entropy(config, message),
        )
        self._shards = problem.shards() if shards is None else list(shards)
        self._alone = ClientsAlone(config, problem, self._shards) if trains_alone(config) else None

    @property
    def has_held_out(self) -> bool:
        """Whether somebody has examples to evaluate on: the server, or a client."""
        return self.problem.task.server_evaluates or (
            self._alone is None or self._alone.has_held_out
        )

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
        if SECURE in messages[0].content:
            return self._answer_masked(messages)
        kind = messages[0].metadata.message_type
        if kind == MessageType.QUERY:
            return [self._enrol(message) for message in messages]
        if self._alone is not None or kind == MessageType.TRAIN:
            return self._trained(messages)
        # As the ClientApp would: its clients hold nothing out, the server has a test set.
        error = Error(CLIENT_APP_RAISED, f"the simulation does not answer {kind!r} messages")
        return [Message(error, reply_to=message) for message in messages]

    def _answer_masked(self, messages: Sequence[Message]) -> list[Message]:
        """The clients' answers in an exchange of secure aggregation, each with a context of its
        own; those that train are trained together."""
        trained: dict[int, Message] = {}
        if all(ARRAYS in message.content for message in messages):
            replies = self._trained(messages)
            trained = {_client_of(m): reply for m, reply in zip(messages, replies, strict=True)}
        return [self._masked(message, trained) for message in messages]

    def _masked(self, message: Message, trained: Mapping[int, Message]) -> Message:
        client = _client_of(message)
        node: dict[str, bool | float | int | str] = {"partition-id": client}
        context = Context(0, client, node, self._secrets.setdefault(client, RecordDict()), {})
        try:
            return self._masking(message, context, lambda *_: trained[client])
        except PublicRefusal as refusal:
            return Message(Error(CLIENT_APP_RAISED, str(refusal)), reply_to=message)

    def _enrol(self, message: Message) -> Message:
        client = _client_of(message)
        reply = enrolment_reply(message, client, self._shards[client].num_examples)
        return disclosed(self.config, reply)

    def _trained(self, messages: Sequence[Message]) -> list[Message]:
        if self._alone is not None:
            return self._alone.answer([(_client_of(message), message) for message in messages])
        return self._train_cohort(messages)

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
            error = Error(CLIENT_APP_RAISED, reason)
            return [Message(error, reply_to=message) for message in messages]

    def cohort(self, messages: Sequence[Message]) -> LocalRound:
        """What the train `messages` of one round ask for."""
        requests = read_rounds(messages)
        rule = check_rule(self.config, requests[0])
        clients = [_client_of(message) for message in messages]
        if rule.keeps:
            kept = [self._kept.get(client) for client in clients]
            requests = [replace(r, kept=k) for r, k in zip(requests, kept, strict=True)]
        return LocalRound(
            rule,
            start_vector(requests[0].arrays, self.problem.model),
            [self._shard(message) for message in messages],
            requests,
            [(chain_seed(self.config), requests[0].server_round, client) for client in clients],
        )

    def keep(self, clients: Sequence[int], updates: Sequence[Tensor]) -> None:
        """What the clients keep for their next round, if anything."""
        self._kept |= dict(zip(clients, updates, strict=bool(updates)))

    def _shard(self, message: Message) -> Shard:
        """The client's shard; with flipped labels where the simulated attacker poisons them."""
        shard = self._shards[_client_of(message)]
        poison = message.content[CONFIG].get(POISON, "")
        return self.problem.poisoned(shard, str(poison))


def train_together(
    grids: Sequence[EngineGrid], messages: Sequence[Sequence[Message]]
) -> list[list[Message]]:
    """Answer a round's train messages of each grid by one batch of local training.

    Every grid's clients get what they would get alone, to rounding. The grids' runs must agree in
    all that local training depends on but the seed: the first one's configuration rules.
    """
    config, model = grids[0].config, grids[0].problem.model
    cohorts = [grid.cohort(sent) for grid, sent in zip(grids, messages, strict=True)]
    work = _joined(cohorts)
    if config.local_dp_sgd:
        params, losses = train_clients_privately(
            config, model, work.start, work.shards, work.requests[0].local_lr, work.keys
        )
    else:
        params, losses = train_as_configured(config, grids[0].training_model, work)
    norms = iter(trained_norms(config, work, params))
    sizes = [len(cohort.shards) for cohort in cohorts]
    return [
        _replies(grid, sent, cohort, own_params, own_losses, [next(norms) for _ in sent])
        for grid, sent, cohort, own_params, own_losses in zip(
            grids, messages, cohorts, params.split(sizes), losses.split(sizes), strict=True
        )
    ]


def _joined(cohorts: Sequence[LocalRound]) -> LocalRound:
    if len(cohorts) == 1:
        # One vector serves all: a matrix of copies may not fit beside the clients' models.
        return cohorts[0]
    return LocalRound(
        cohorts[0].rule,
        torch.cat([cohort.start.expand(len(cohort.shards), -1) for cohort in cohorts]),
        [shard for cohort in cohorts for shard in cohort.shards],
        [request for cohort in cohorts for request in cohort.requests],
        [key for cohort in cohorts for key in cohort.keys],
    )


def _replies(
    grid: EngineGrid,
    messages: Sequence[Message],
    cohort: LocalRound,
    params: Tensor,
    losses: Tensor,
    norms: list[float | None],
) -> list[Message]:
    config, request = grid.config, cohort.requests[0]
    noised = noised_models(config, cohort.start, params, cohort.requests, cohort.clients)
    grid.keep(cohort.clients, cohort.rule.to_keep(cohort.start, noised, request.local_lr))
    answers = trained_arrays(request.arrays, grid.problem.model, noised, HeldArray)
    spent = sample_epsilon(config, request.rounds_begun)
    return [
        disclosed(
            config,
            train_reply(message, request, arrays, shard.num_examples, loss, norm, spent),
        )
        for message, arrays, shard, loss, norm in zip(
            messages, answers, cohort.shards, losses.tolist(), norms, strict=True
        )
    ]


def _client_of(message: Message) -> int:
    """The client that the node holds: its id is never the server's to tell."""
    return message.metadata.dst_node_id - _FIRST_NODE
