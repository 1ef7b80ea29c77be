"""A ClientApp that trains honestly and then lies about it.

Over gRPC each corrupt client is a process by itself. With `accomplices` the corrupt clients of a
round have each other's updates through a service of their own, and each sends its row of what the
same colluders send in a simulation. Without them, or while the service is away, a vector attack
sees its own update alone (b = 1). What all then still have in common is the seed in the round's
config, from which the shared vector of `gradient-shift` comes.

An attack that asks what the server would make of its vectors computes that from the run's
configuration, which every client is sent.

The train message's ConfigRecord "config" may hold "server-round", "client-id", "seed" and the
local learning rate "local-lr"; without the rate, updates are taken in parameter units. K, how many
clients answer in the round, is what the run's configuration leads to expect. The environment
variable BLACKTHORN_ATTACK_SECONDS says how late `slow` is.
"""

import logging

import numpy as np
from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from torch import Tensor

from blackthorn.randomness import Stream, generator_of
from blackthorn.settings.catalogue import SERVER_RULE, load
from blackthorn.settings.config import make_config
from blackthorn.wire import CLIENT_ID, LOCAL_LR, POISON, SEED, SERVER_ROUND

from .adaptive import RuleAt, ServerRule
from .collusion import Accomplices, CollusionFailed
from .model_records import FlatModel
from .registry import DataAttack, ReplyAttack, VectorAttack, get
from .round_config import expected_cohort, number, round_config

logger = logging.getLogger("blackthorn")


class ByzantineApp(ClientApp):
    """The honest app's answers, except that train messages are answered with an attack."""

    def __init__(
        self, honest_app: ClientApp, attack_name: str, accomplices: Accomplices | None = None
    ) -> None:
        super().__init__()
        self._accomplices = accomplices
        self._honest_app = honest_app
        self._attack = get(attack_name)

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer `message`; what the honest app raises is raised."""
        if not message.metadata.message_type.startswith("train"):
            return self._honest_app(message, context)
        if isinstance(self._attack, DataAttack):
            return self._train_on_poison(self._attack, message, context)
        reply = self._honest_app(message, context)
        if isinstance(self._attack, ReplyAttack):
            return self._attack(reply)
        if not reply.has_content():
            return reply
        return _lie(self._attack, message, context, reply, self._accomplices)

    def _train_on_poison(self, attack: DataAttack, message: Message, context: Context) -> Message:
        """Train under a node config that names the poison, as the node's operator may."""
        context.node_config[POISON] = attack.name
        try:
            return self._honest_app(message, context)
        finally:
            del context.node_config[POISON]


def byzantine_app(
    honest_app: ClientApp, attack_name: str, accomplices: Accomplices | None = None
) -> ByzantineApp:
    """Wrap `honest_app`; ValueError for an attack that `attacks.get` does not know."""
    return ByzantineApp(honest_app, attack_name, accomplices)


def _lie(
    attack: VectorAttack,
    message: Message,
    context: Context,
    reply: Message,
    accomplices: Accomplices | None,
) -> Message:
    config = round_config(message)
    local_lr = number(config, LOCAL_LR, 1.0)
    model = FlatModel.of(message)
    own = model.update(reply, local_lr)
    together = None if accomplices is None else _shared(accomplices, message, own)
    updates, row = (own.unsqueeze(0), 0) if together is None else together
    rule: ServerRule | None = None
    if attack.asks_the_rule:
        rule_at: RuleAt = load(SERVER_RULE)(make_config(context.run_config))
        rule = rule_at(int(number(config, SERVER_ROUND, 0)), local_lr, model.vector)
    vectors = attack(
        updates,
        num_clients=expected_cohort(context),
        generator=_generator(attack, config, together is not None),
        rule=rule,
    )
    return model.forge(reply, vectors[row], local_lr)


def _shared(accomplices: Accomplices, message: Message, own: Tensor) -> tuple[Tensor, int] | None:
    """The colluders' updates [b, d] and the own row; None, with a warning, if nobody answers."""
    config = round_config(message)
    server_round = int(number(config, SERVER_ROUND, 0))
    client_id = int(number(config, CLIENT_ID, 0))
    try:
        return accomplices.share(str(message.metadata.run_id), server_round, client_id, own)
    except CollusionFailed as failure:
        logger.warning("round %d: client %d attacks alone: %s", server_round, client_id, failure)
        return None


def _generator(attack: VectorAttack, config: ConfigRecord, together: bool) -> np.random.Generator:
    seed = int(number(config, SEED, 0))
    server_round = int(number(config, SERVER_ROUND, 0))
    if together or attack.shared_randomness:
        return generator_of(Stream.COLLUDERS, seed, server_round)
    client = int(number(config, CLIENT_ID, 0))
    return generator_of(Stream.COLLUDER, seed, server_round, client)
