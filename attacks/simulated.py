"""Byzantine clients in a simulation: they lie, and see each other, between grid and server.

The corrupt clients of a simulated round train honestly like all others. `AttackingGrid` stands
between the server and the grid that simulates them and exchanges their replies for what the
attack makes of them, all colluders of the round together.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from flwr.app import Error, Message, RecordDict
from flwr.serverapp import Grid

from blackthorn.flower_port.synchronous import CLIENT_APP_RAISED, SynchronousGrid
from blackthorn.flower_port.transports import transport_of
from blackthorn.randomness import Stream, generator_of
from blackthorn.wire import CLIENT_ID, LOCAL_LR, POISON, SERVER_ROUND

from .adaptive import RuleAt
from .model_records import FlatModel
from .registry import DataAttack, ReplyAttack, VectorAttack, get
from .round_config import number, round_config


def fixed_corrupt(num_clients: int, num_byzantine: int) -> Callable[[int], set[int]]:
    """Round -> corrupt client ids: always the last `num_byzantine` of 0 .. num_clients - 1."""
    _check_counts(num_clients, num_byzantine)
    corrupt = set(range(num_clients - num_byzantine, num_clients))
    return lambda _: set(corrupt)


def redrawn_corrupt(num_clients: int, num_byzantine: int, seed: int) -> Callable[[int], set[int]]:
    """Round -> corrupt client ids: `num_byzantine` distinct ones, drawn afresh each round."""
    _check_counts(num_clients, num_byzantine)

    def draw(server_round: int) -> set[int]:
        drawn = generator_of(Stream.REDRAW, seed, server_round)
        return set(drawn.choice(num_clients, num_byzantine, replace=False).tolist())

    return draw


@dataclass(frozen=True)
class _Order:
    """A train message and what its config says."""

    message: Message
    server_round: int
    client_id: int
    local_lr: float


@dataclass(frozen=True)
class _Answer:
    """An order and the reply to it, with the reply's place among all replies."""

    position: int
    order: _Order
    reply: Message


class AttackingGrid(SynchronousGrid):
    """A grid whose corrupt clients answer train messages with an attack.

    `corrupt_clients` maps a round to the ids of its corrupt clients; those of them that are in
    the cohort and answer collude, and K is the number of replies of the round that carry a content.
    Where `collusion` is false each sends what a `ByzantineApp` without accomplices would: its lie
    is made of its own update and nobody else's, and K is the `expected_cohort`. `omniscient`
    attackers also see the honest updates. `rule_at` gives what the server makes of a round's
    updates, for an attack that asks. The train messages' ConfigRecord "config" must hold
    "server-round", "client-id" and the local learning rate (under `local_lr_key`); ValueError if
    it does not.

    A client that an attack silences ("slow", "exit") is missing among the replies, one that
    raises answers with Flower's error; nothing really sleeps or ends. Everything else is the
    inner grid's.

    Colluders need the whole round: a strategy asks for it in one call, also where the inner grid
    (Flower's own simulation) lets it pull one reply at a time.
    """

    def __init__(
        self,
        grid: Grid,
        attack_name: str,
        corrupt_clients: Callable[[int], set[int]],
        seed: int,
        collusion: bool = True,
        omniscient: bool = False,
        local_lr_key: str = LOCAL_LR,
        expected_cohort: int = 1,
        rule_at: RuleAt | None = None,
    ) -> None:
        super().__init__()
        self._rule_at = rule_at
        self._grid = grid
        self._attack = get(attack_name)
        self._corrupt_clients = corrupt_clients
        self._seed = seed
        self._collusion = collusion
        self._omniscient = omniscient
        self._local_lr_key = local_lr_key
        self._expected_cohort = expected_cohort

    @property
    def is_closed(self) -> bool:
        """Whether the inner grid is."""
        return transport_of(self._grid).is_closed

    def guard_report(self) -> dict[str, Any]:
        """What the guard of the inner grid says."""
        return transport_of(self._grid).guard_report()

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Send `messages` through the inner grid and return the replies, lies included."""
        messages = list(messages)
        orders = [self._order(message) for message in messages if _trains(message)]
        corrupt = self._corrupt_clients(orders[0].server_round) if orders else set()
        if isinstance(self._attack, DataAttack):
            for order in orders:
                if order.client_id in corrupt:
                    round_config(order.message)[POISON] = self._attack.name
        replies = list(self._grid.send_and_receive(messages, timeout=timeout))
        answers = _answers(orders, replies)
        attackers = [answer for answer in answers if answer.order.client_id in corrupt]
        lies = self._lies(attackers, answers)
        received = [lies.get(position, reply) for position, reply in enumerate(replies)]
        return [reply for reply in received if reply is not None]

    def _lies(self, attackers: list[_Answer], answers: list[_Answer]) -> dict[int, Message | None]:
        """Position among the replies -> what stands there instead, None for nothing."""
        if not attackers or isinstance(self._attack, DataAttack):
            return {}
        if isinstance(self._attack, ReplyAttack):
            return {attacker.position: _misbehave(self._attack, attacker) for attacker in attackers}
        positions = {attacker.position for attacker in attackers}
        honest = [answer for answer in answers if answer.position not in positions]
        if self._collusion:
            return self._lie(self._attack, attackers, honest, len(answers))
        lies: dict[int, Message | None] = {}
        for attacker in attackers:
            lies |= self._lie(self._attack, [attacker], honest, self._expected_cohort)
        return lies

    def _lie(
        self,
        attack: VectorAttack,
        attackers: list[_Answer],
        honest: list[_Answer],
        num_clients: int,
    ) -> dict[int, Message | None]:
        """What attackers that share their updates send."""
        order = attackers[0].order
        model = FlatModel.of(order.message)
        vectors = attack(
            _updates(model, attackers),
            num_clients=num_clients,
            generator=self._generator(attack, order),
            honest=_updates(model, honest) if self._omniscient and honest else None,
            rule=self._rule_at and self._rule_at(order.server_round, order.local_lr, model.vector),
        )
        return {
            attacker.position: model.forge(attacker.reply, vector, attacker.order.local_lr)
            for attacker, vector in zip(attackers, vectors, strict=True)
        }

    def _generator(self, attack: VectorAttack, order: _Order) -> np.random.Generator:
        if self._collusion or attack.shared_randomness:
            return generator_of(Stream.COLLUDERS, self._seed, order.server_round)
        return generator_of(Stream.COLLUDER, self._seed, order.server_round, order.client_id)

    def _order(self, message: Message) -> _Order:
        config = round_config(message)
        return _Order(
            message,
            int(number(config, SERVER_ROUND)),
            int(number(config, CLIENT_ID)),
            float(number(config, self._local_lr_key)),
        )

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Push messages; ValueError for train messages, whose replies need the whole round."""
        messages = list(messages)
        if any(_trains(message) for message in messages):
            raise ValueError(
                f"attack {self._attack.name!r} needs the whole round at once: "
                "train messages are allowed in send_and_receive only"
            )
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Pull replies from the inner grid."""
        return self._grid.pull_messages(message_ids)

    def get_node_ids(self) -> Iterable[int]:
        """The inner grid's node ids."""
        return self._grid.get_node_ids()

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """A message made by the inner grid."""
        return self._grid.create_message(content, message_type, dst_node_id, group_id, ttl)

    def set_run(self, run: Any) -> None:
        """Set the inner grid's run."""
        self._grid.set_run(run)

    @property
    def run(self) -> Any:
        """The inner grid's run."""
        return self._grid.run


def _trains(message: Message) -> bool:
    return message.metadata.message_type.startswith("train")


def _answers(orders: list[_Order], replies: list[Message]) -> list[_Answer]:
    """Replies that carry a content, with their orders, by client id.

    A reply names its order by the message's id, or else by the node it comes from.
    """
    by_message = {order.message.metadata.message_id: order for order in orders}
    by_node = {order.message.metadata.dst_node_id: order for order in orders}
    answers = []
    for position, reply in enumerate(replies):
        message_id = reply.metadata.reply_to_message_id
        order = (
            by_message.get(message_id) if message_id else by_node.get(reply.metadata.src_node_id)
        )
        if order is not None and reply.has_content():
            answers.append(_Answer(position, order, reply))
    return sorted(answers, key=lambda answer: answer.order.client_id)


def _updates(model: FlatModel, answers: list[_Answer]) -> torch.Tensor:
    return torch.stack([model.update(answer.reply, answer.order.local_lr) for answer in answers])


def _misbehave(attack: ReplyAttack, attacker: _Answer) -> Message | None:
    if attack.absence == "silence":
        return None
    if attack.absence == "error":
        reason = f"client {attacker.order.client_id} refuses to answer"
        return Message(Error(CLIENT_APP_RAISED, reason), reply_to=attacker.order.message)
    return attack(attacker.reply)


def _check_counts(num_clients: int, num_byzantine: int) -> None:
    if not 0 <= num_byzantine <= num_clients:
        raise ValueError(
            f"num_byzantine is {num_byzantine}; allowed are 0 to num_clients = {num_clients}"
        )
