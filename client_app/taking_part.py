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

from blackthorn.settings.config import ConfigError
from blackthorn.strategies.array_codec import encode_state
from blackthorn.wire import (
    ARRAYS,
    ASK,
    ATTESTED,
    CLIENT_ID,
    CONFIG,
    ENROL,
    METRICS,
    NUM_EXAMPLES,
    PROBLEM,
    RULE,
)

from .client_ledger import ClientLedger, LedgerUnusable, Sent, tell_exactly
from .disclosure import UNTOLD, PublicRefusal, check_code
from .masking import masking_by_message
from .messages import claims_clients, series_of
from .node_data import (
    LEDGER,
    LEDGER_ID,
    POLICY,
    keep_update,
    kept_update,
    named_file,
    node_client_id,
)
from .round import OpenRound, Round

# Before the name of the rounds, one model's, whose statistics a record of the node's state holds.
_KEPT = "blackthorn-statistics-"
# The node config's key of the number of examples, where nobody else says it.
_EXAMPLES = "num-examples"

logger = logging.getLogger("blackthorn.clients")


@dataclass(frozen=True)
class Mod:
    """A Flower mod; `mod` is the one without options.

    `num_examples`: how many examples the node of a context trains on (None: the node config's
    `num-examples`, or it is not said). Which client it is the node config says, by `client-id` or
    `partition-id`. Where that names a `ledger`, all that is answered is counted there first; a
    `policy` speaks of runs of Blackthorn's own ClientApp, and nothing is answered under one.
    """

    num_examples: Callable[[Context], int] | None = None

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Answer the server's question who this is, and train under the round's rule; all other
        messages are the app's, and what they tell is taken for all that the client has.

        Raises PublicRefusal or ValueError, one line, which Flower sends to the server, where the
        rule cannot be carried out.
        """
        if not message.has_content():
            # An error in its place: what the app answers it counts as all else.
            _count(context, tell_exactly)
            return call_next(message, context)
        config = message.content.config_records.get(CONFIG, ConfigRecord())
        if config.get(ASK) == ENROL:
            return self._enrol(message, context, private=claims_clients(message))
        if message.metadata.message_type.partition(".")[0] == "train" and RULE in message.content:
            return masking_by_message(
                message, context, lambda sent, own: take_part(sent, own, call_next)
            )
        _count(context, tell_exactly)
        put_kept(message, context)
        return call_next(message, context)

    def _enrol(self, message: Message, context: Context, private: bool) -> Message:
        try:
            check_code(message)
            metrics = MetricRecord({CLIENT_ID: node_client_id(context.node_config)})
            _count(context, (lambda _: None) if private else tell_exactly)
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


def take_part(
    message: Message,
    context: Context,
    call_next: ClientAppCallable,
    own: Round | None = None,
) -> Message:
    """Answer a train message by what `call_next` trains, with the round's rule on it; `own` is the
    round of a ClientApp of ours, which has counted it, and knows more of it than the message."""
    with OpenRound(message, own) as current:
        if own is None:
            check_code(message)
            cost = current.cost, 1
            _count(context, lambda sent: sent.add(context.run_id, current.server_round, cost, cost))
        put_kept(message, context)
        current.last_update = kept_update(context, series_of(message))
        try:
            reply = _carried_out(current, call_next(message, context))
            if current.local and reply.has_content():
                kept = {name: np.asarray(value) for name, value in current.kept.items()}
                context.state[_KEPT + series_of(message)] = encode_state(kept)
            if reply.has_content():
                keep_update(context, series_of(message), current.next_update)
            return reply
        except PublicRefusal:
            raise
        except Exception:
            if current.level == "none":
                raise
            # Its text may tell of an example.
            logger.exception("round %d was not answered", current.server_round)
            raise ValueError(UNTOLD) from None


def _count(context: Context, change: Callable[[Sent], None]) -> None:
    """On disk, in the client's own ledger, before what is counted is made.

    Raises PublicRefusal where that cannot be, or there is a policy.
    """
    if context.node_config.get(POLICY):
        raise PublicRefusal(
            "this ClientApp keeps no policy: one is for runs of Blackthorn's own ClientApp"
        )
    try:
        path = named_file(context.node_config, LEDGER)
        if path is not None:
            ClientLedger(path, str(context.node_config.get(LEDGER_ID, ""))).change(change)
    except (ConfigError, LedgerUnusable) as error:
        logger.error("nothing is answered in run %d: %s", context.run_id, error)
        raise PublicRefusal("the client's ledger cannot be used") from None


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


def put_kept(message: Message, context: Context) -> None:
    """The client's own statistics of the last of these rounds in place of the server's."""
    kept = context.state.array_records.get(_KEPT + series_of(message))
    if kept is None or ARRAYS not in message.content:
        return
    arrays = message.content.array_records[ARRAYS].copy()
    for name in kept.keys() & arrays.keys():
        if (kept[name].shape, kept[name].dtype) == (arrays[name].shape, arrays[name].dtype):
            arrays[name] = kept[name]
    message.content[ARRAYS] = arrays
