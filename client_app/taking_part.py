"""The mod with which any Flower ClientApp takes part in a run of Blackthorn's strategies.

    app = ClientApp(mods=[blackthorn.client_app.mod])

It answers who the node is, and carries out, on what the app has trained, whatever the round's rule
does to an update. What a rule does to every step the app does itself, with `Round`.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp.typing import ClientAppCallable

from blackthorn.strategies.array_codec import encode_state
from blackthorn.wire import (
    ARRAYS,
    ASK,
    ATTESTED,
    CLAIM,
    CLIENT_ID,
    CONFIG,
    ENROL,
    METRICS,
    NUM_EXAMPLES,
    PROBLEM,
    RULE,
)

from .disclosure import UNTOLD, PublicRefusal
from .node_data import node_client_id
from .round import OpenRound, Round

_KEPT = "blackthorn-statistics"
# The node config's key of the number of examples, where nobody else says it.
_EXAMPLES = "num-examples"

logger = logging.getLogger("blackthorn")


@dataclass(frozen=True)
class Mod:
    """A Flower mod; `mod` is the one without options.

    `num_examples`: how many examples the node of a context trains on (None: the node config's
    `num-examples`, or it is not said). Which client it is the node config says, by `client-id` or
    `partition-id`.
    """

    num_examples: Callable[[Context], int] | None = None

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Answer the server's question who this is, and train under the round's rule; all other
        messages are the app's.

        Raises PublicRefusal or ValueError, one line, which Flower sends to the server, where the
        rule cannot be carried out.
        """
        if not message.has_content():
            return call_next(message, context)
        config = message.content.config_records.get(CONFIG, ConfigRecord())
        if config.get(ASK) == ENROL:
            return self._enrol(message, context, private=config.get(CLAIM) == "client")
        if message.metadata.message_type.partition(".")[0] == "train" and RULE in message.content:
            return _train(message, context, call_next)
        _put_kept(message, context)
        return call_next(message, context)

    def _enrol(self, message: Message, context: Context, private: bool) -> Message:
        try:
            metrics = MetricRecord({CLIENT_ID: node_client_id(context.node_config)})
        except ValueError as error:
            problem = ConfigRecord({PROBLEM: str(error)})
            return Message(RecordDict({CONFIG: problem}), reply_to=message)
        declared = context.node_config.get(_EXAMPLES)
        if private:
            # One example more or less would show in it.
            metrics[NUM_EXAMPLES] = 1
        elif self.num_examples is not None:
            metrics[NUM_EXAMPLES] = int(self.num_examples(context))
        elif isinstance(declared, int):
            metrics[NUM_EXAMPLES] = declared
        return Message(RecordDict({METRICS: metrics}), reply_to=message)


mod = Mod()


def _train(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    with OpenRound(message) as current:
        _put_kept(message, context)
        try:
            reply = _carried_out(current, call_next(message, context))
            if current.local and reply.has_content():
                kept = {name: np.asarray(value) for name, value in current.kept.items()}
                context.state[_KEPT] = encode_state(kept)
            return reply
        except PublicRefusal:
            raise
        except Exception:
            if current.level == "none":
                raise
            # Its text may tell of an example.
            logger.exception("round %d was not answered", current.server_round)
            raise ValueError(UNTOLD) from None


def _carried_out(current: Round, reply: Message) -> Message:
    """The app's answer with the rule on its update, and the attestation; under a claim made anew,
    of nothing else that the app has put in."""
    claims = current.level != "none"
    if reply.has_error():
        if claims:
            raise ValueError(f"the app answers with an error: {reply.error.reason}")
        return reply
    if not (current.attestation.is_in(reply.content) and (current.is_carried_out or not claims)):
        name, trained = _trained(reply)
        reply.content[name] = current.sent(trained)
        current.check_ties(trained)
        reply.content[ATTESTED] = current.attestation.record
    return current.answer(MetricRecord()) if claims else reply


def _trained(reply: Message) -> tuple[str, dict[str, np.ndarray]]:
    """The reply's one record of arrays. Raises ValueError where there is another number."""
    names = [name for name, one in reply.content.items() if isinstance(one, ArrayRecord)]
    if len(names) != 1:
        raise ValueError(f"the app's reply has {len(names)} records of arrays: 1 is needed")
    record = reply.content.array_records[names[0]]
    return names[0], {name: array.numpy() for name, array in record.items()}


def _put_kept(message: Message, context: Context) -> None:
    """The client's own statistics of the last round in place of the server's."""
    kept = context.state.array_records.get(_KEPT)
    if kept is None or ARRAYS not in message.content:
        return
    arrays = message.content.array_records[ARRAYS].copy()
    for name in kept.keys() & arrays.keys():
        arrays[name] = kept[name]
    message.content[ARRAYS] = arrays
