"""A client in secure aggregation: five messages a round, of which one trains, and no update that
leaves unmasked.

`Masking` stands in front of whatever trains: our ClientApp, the mod in front of anybody's, the
engine. Between the messages the round's secrets lie in the node's Flower context, which never
leaves the SuperNode; a node that is restarted in between has lost them, and is gone from the round.

Flower runs a process for every message, several at once, each with a copy of the context, and keeps
the copy of the one that ends last. So a context alone does not say what has been answered: a
server that asks twice at once would have two vectors under the same masks, or both of somebody's
secrets. How far a round has gone is the name of a file of this machine, which one process alone can
change.
"""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp.typing import ClientAppCallable

from blackthorn.randomness import Stream, generator_of
from blackthorn.secure_aggregation.client import SecureClient
from blackthorn.secure_aggregation.discrete_gaussian import discrete_gaussian
from blackthorn.secure_aggregation.key_agreement import Entropy, Refused, system_bytes
from blackthorn.secure_aggregation.masks import system_stream
from blackthorn.settings.config import RunConfig, make_config
from blackthorn.strategies.array_codec import decode
from blackthorn.strategies.attestation import SentRule
from blackthorn.strategies.global_model import ModelLayout
from blackthorn.strategies.layout import Entries
from blackthorn.strategies.local_rule import rule_of
from blackthorn.strategies.secure_records import (
    CONSISTENCY,
    KEYS,
    MASKED,
    SHARES,
    UNMASK,
    asked,
    by_client_record,
    keys_record,
    masked_arrays,
    read_by_client,
    read_neighbours,
    read_standing,
    shares_record,
)
from blackthorn.strategies.secure_update import SecureUpdate
from blackthorn.wire import (
    ARRAYS,
    ATTESTED,
    CLIENT_ID,
    CONFIG,
    LAYOUT,
    LOCAL_LR,
    METRICS,
    PARAMETERS,
    SECURE,
    SERVER_ROUND,
)

from .configured_rule import check_rule
from .disclosure import PublicRefusal, check_code
from .members import own_key, registered_keys
from .messages import RoundRequest, claims_clients
from .node_data import node_client_id

# The node's context keeps the round's secrets under it.
_KEPT = "blackthorn-secure-aggregation"


@dataclass(frozen=True)
class Masking:
    """A Flower mod. `rule`: what the round's rule is, by what a client knows of it; `entropy`: what
    rounding and noise are drawn from; both of a message and the node's context."""

    rule: Callable[[Message, Context], SecureUpdate]
    entropy: Callable[[Message, Context], Entropy]

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Answer the messages of secure aggregation; all others are the app's.

        Raises PublicRefusal, one line, for a message that would give away more than the sum: a
        train message of this rule without masks too.
        """
        if not message.has_content() or SECURE not in message.content:
            if message.has_content() and _asked_rule(message).name == SecureUpdate.name:
                raise PublicRefusal(
                    f"the round's rule is {SecureUpdate.name}, and the server asks for the update "
                    "without masks"
                )
            return call_next(message, context)
        try:
            return self._answer(message, context, call_next)
        except Refused as refusal:
            raise PublicRefusal(f"secure aggregation: {refusal}") from None

    def _answer(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        exchange, session, told = asked(message.content)
        rule = self.rule(message, context)
        terms, config = rule.terms, context.node_config
        if exchange == KEYS:
            client = _client_of(message, config)
            _forget(context)
            state, own = SecureClient.begin(client, session, system_bytes, own_key(config))
            _begin_once(state)
            return _reply(message, context, state, keys_record(own))
        state = _kept(context)
        if exchange == SHARES:
            neighbours, members = read_neighbours(told), registered_keys(config)
            after, given = state.shares(session, neighbours, terms, members, system_bytes)
            _go_on_once(state, KEYS, SHARES)
            return _reply(message, context, after, shares_record(given))
        if exchange == MASKED:
            sealed = read_by_client(told)
            state.check_masked(session, sealed, terms)
            _go_on_once(state, SHARES, MASKED)
            reply = call_next(message, context)
            if reply.has_error():
                return reply
            update = _update(message, reply)
            numbers, entropy = rule.quantisation(len(update)), self.entropy(message, context)
            integers = numbers.quantised(update, session, entropy)
            integers += discrete_gaussian(numbers.padded, numbers.variance, entropy)
            state, vector = state.masked(session, sealed, terms, integers, numbers.bits)
            _keep(context, state)
            return _masked_reply(message, reply, masked_arrays(vector))
        if exchange == CONSISTENCY:
            standing = read_standing(told)
            after, tags = state.consistency(
                session, standing.alive, standing.gone, terms, system_bytes
            )
            _go_on_once(state, MASKED, CONSISTENCY)
            return _reply(message, context, after, by_client_record(tags))
        after, revealed = state.unmask(session, read_by_client(told), terms)
        _go_on_once(state, CONSISTENCY, UNMASK)
        return _reply(message, context, after, by_client_record(revealed))


def configured_rule(config: RunConfig, message: Message) -> SecureUpdate:
    """The rule by the run's configuration. Raises PublicRefusal where the server's is another."""
    record = message.content.config_records[CONFIG]
    check_code(message)
    request = RoundRequest(
        server_round=int(_number(record[SERVER_ROUND])),
        local_lr=_number(record[LOCAL_LR]),
        arrays=ArrayRecord(),
        rule=_asked_rule(message),
        claimed=claims_clients(message),
    )
    rule = check_rule(config, request)
    if not isinstance(rule, SecureUpdate):
        raise PublicRefusal(
            f"the server asks for secure aggregation, and algorithm = {config.algorithm} has none"
        )
    return rule


def sent_rule(message: Message, context: Context) -> SecureUpdate:
    """The rule by the message alone, for who knows no configuration. Raises PublicRefusal where it
    is none of secure aggregation, or has numbers with which nothing would be secure."""
    del context
    try:
        rule = rule_of(_asked_rule(message))
        rule.check_range(_number(message.content.config_records[CONFIG][LOCAL_LR]))
    except ValueError as error:
        raise PublicRefusal(str(error)) from None
    if not isinstance(rule, SecureUpdate):
        raise PublicRefusal(f"the server masks nothing by the rule {rule.sent}")
    return rule


def noise_entropy(config: RunConfig, message: Message) -> Entropy:
    """The operating system's, or the seed's where the configuration says so."""
    if not config.insecure_seeded_noise:
        return system_stream()
    record = message.content.config_records[CONFIG]
    numbers = (int(_number(record[name])) for name in (SERVER_ROUND, CLIENT_ID))
    return generator_of(Stream.SECURE_NOISE, config.seed, *numbers).bytes


# In front of our own ClientApp, and of anybody's.
masking = Masking(
    lambda message, context: configured_rule(make_config(context.run_config), message),
    lambda message, context: noise_entropy(make_config(context.run_config), message),
)
masking_by_message = Masking(sent_rule, lambda message, context: system_stream())  # noqa: ARG005


def _asked_rule(message: Message) -> SentRule:
    return SentRule.of(message.content)


def _client_of(message: Message, node_config: Mapping[str, Any]) -> int:
    """Which client this is, as the node knows it; where it does not, as the server says."""
    record = message.content.config_records[CONFIG]
    told = int(_number(record[CLIENT_ID]))
    try:
        own = node_client_id(node_config)
    except ValueError:
        return told
    if own != told:
        raise Refused(f"the server takes client {own} for client {told}")
    return own


def _number(value: object) -> float:
    if not isinstance(value, int | float):
        raise Refused("the message has no number where one belongs")
    return value


def _kept(context: Context) -> SecureClient:
    values = context.state.config_records.get(_KEPT)
    if values is None:
        raise Refused("this client has told no keys: it was restarted since, or never asked")
    return SecureClient.of_values(values)


def _at(state: SecureClient, answered: str) -> Path:
    """The file, empty, that is there while `answered` is what this round's secrets have answered
    last. Nobody can tell its name who does not have them."""
    name = sha256(b"answered" + state.session + state.sealing.private).hexdigest()
    return Path(tempfile.gettempdir(), f"blackthorn-{name}-{answered}")


def _begin_once(state: SecureClient) -> None:
    try:
        _at(state, KEYS).touch(0o600, exist_ok=False)
    except OSError:
        raise Refused("this machine's folder of temporary files cannot be written") from None


def _go_on_once(state: SecureClient, before: str, now: str) -> None:
    """Raises Refused in every process but the first: what the context says is a copy's word."""
    try:
        if now == UNMASK:
            _at(state, before).unlink()
        else:
            _at(state, before).rename(_at(state, now))
    except OSError:
        raise Refused(
            f"the exchange {now!r} has been answered, or is being answered, by another process"
        ) from None


def _forget(context: Context) -> None:
    """A round that was not ended: nothing more is answered in it."""
    values = context.state.config_records.get(_KEPT)
    if values is not None and values["sealing"]:
        for answered in (KEYS, SHARES, MASKED, CONSISTENCY):
            _at(SecureClient.of_values(values), answered).unlink(missing_ok=True)


def _keep(context: Context, state: SecureClient) -> None:
    context.state[_KEPT] = ConfigRecord(state.values())


def _reply(message: Message, context: Context, state: SecureClient, told: ConfigRecord) -> Message:
    _keep(context, state)
    return Message(RecordDict({SECURE: told}), reply_to=message)


def _masked_reply(message: Message, reply: Message, masked: ArrayRecord) -> Message:
    """What the app answered with the masked vector in place of all arrays."""
    content = RecordDict({ARRAYS: masked})
    for name in (METRICS, ATTESTED):
        if name in reply.content:
            content[name] = reply.content[name]
    return Message(content, reply_to=message)


def _update(message: Message, reply: Message) -> np.ndarray:
    """u_i [d], gradient units, float64, of the model in the reply. ValueError where it is
    another."""
    records = [one for one in reply.content.values() if isinstance(one, ArrayRecord)]
    if len(records) != 1:
        raise ValueError(f"the reply has {len(records)} records of arrays: 1 is needed")
    start = {name: decode(one) for name, one in message.content.array_records[ARRAYS].items()}
    trained = {name: decode(one) for name, one in records[0].items()}
    named = message.content.config_records[LAYOUT][PARAMETERS]
    names = tuple(str(name) for name in named) if isinstance(named, list) else ()
    layout = ModelLayout.of(start, Entries(names, ()))
    for name in names:
        if name not in trained or trained[name].shape != start[name].shape:
            raise ValueError(f"the trained model has no {name!r} of the server's shape")
    rate = _number(message.content.config_records[CONFIG][LOCAL_LR])
    moved = layout.flatten(start).double() - layout.flatten(trained).double()
    return (moved / rate).numpy()
