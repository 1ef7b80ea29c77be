"""A ClientApp that trains honestly and then lies about it.

Over gRPC each corrupt client is a process by itself: a vector attack sees its own update alone
(b = 1). What the colluders have in common is the seed in the round's config, from which the
shared vector of `gradient-shift` comes, so that it is the same on all corrupt nodes.

The train message's ConfigRecord "config" may hold "server-round", "client-id", "num-invited"
(K), "seed" and the local learning rate "local-lr"; without the rate, updates are taken in
parameter units. The environment variable BLACKTHORN_ATTACK_SECONDS says how late `slow` is.
"""

import numpy as np
from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp import ClientApp

from .label_flip import POISON_KEY
from .model_records import ARRAYS, FlatModel
from .randomness import client_generator, round_generator
from .registry import DataAttack, ReplyAttack, VectorAttack, get
from .round_config import number, round_config


class ByzantineApp(ClientApp):
    """The honest app's answers, except that train messages are answered with an attack."""

    def __init__(self, honest_app: ClientApp, attack_name: str) -> None:
        super().__init__()
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
        return _lie(self._attack, message, reply) if reply.has_content() else reply

    def _train_on_poison(self, attack: DataAttack, message: Message, context: Context) -> Message:
        """Train under a node config that names the poison, as the node's operator may."""
        context.node_config[POISON_KEY] = attack.name
        try:
            return self._honest_app(message, context)
        finally:
            del context.node_config[POISON_KEY]


def byzantine_app(honest_app: ClientApp, attack_name: str) -> ByzantineApp:
    """Wrap `honest_app`; ValueError for an attack that `attacks.get` does not know."""
    return ByzantineApp(honest_app, attack_name)


def _lie(attack: VectorAttack, message: Message, reply: Message) -> Message:
    config = round_config(message)
    local_lr = number(config, "local-lr", 1.0)
    model = FlatModel(message.content.array_records[ARRAYS])
    vectors = attack(
        model.update(reply, local_lr).unsqueeze(0),
        num_clients=int(number(config, "num-invited", 1)),
        generator=_generator(attack, config),
    )
    return model.forge(reply, vectors[0], local_lr)


def _generator(attack: VectorAttack, config: ConfigRecord) -> np.random.Generator:
    seed = int(number(config, "seed", 0))
    server_round = int(number(config, "server-round", 0))
    if attack.shared_randomness:
        return round_generator(seed, server_round)
    return client_generator(seed, server_round, int(number(config, "client-id", 0)))
