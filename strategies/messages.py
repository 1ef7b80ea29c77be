"""What a round's messages say, one a client."""

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

from blackthorn.wire import (
    ARRAYS,
    AVERAGED,
    CLIENT_ID,
    CONFIG,
    LAYOUT,
    LOCAL,
    NONCE,
    PARAMETERS,
    RULE,
    SERVER_ROUND,
)

from .attestation import SentRule
from .enrolment import ClientRegistry
from .global_model import ModelLayout

Told = Mapping[str, int | float]


@dataclass(frozen=True)
class Asked:
    """A round's messages and the clients they go to, in the same order.

    `began` and `since`, on the monotonic clock: when the round began, and when the time for the
    replies did.
    """

    server_round: int
    clients: list[int]
    messages: list[Message]
    began: float
    since: float

    def left(self, timeout: float) -> float:
        """What is left of `timeout` seconds."""
        return max(0.0, self.since + timeout - time.monotonic())


def content_of_round(
    server_round: int,
    arrays: ArrayRecord,
    config: Mapping[str, Any],
    rule: SentRule | None = None,
    layout: ModelLayout | None = None,
) -> RecordDict:
    """What all messages of a round have in common: the model, its config, the clients' rule, and
    which of the model's entries are its parameters w, and which are statistics that clients send
    back or keep for themselves."""
    content = RecordDict({ARRAYS: arrays, CONFIG: ConfigRecord({**config})})
    cast(ConfigRecord, content[CONFIG])[SERVER_ROUND] = server_round
    if rule is not None:
        content[RULE] = rule.record()
    if layout is not None:
        content[LAYOUT] = ConfigRecord(
            {
                PARAMETERS: list(layout.trainable),
                AVERAGED: list(layout.averaged),
                LOCAL: list(layout.local),
            }
        )
    return content


def new_series() -> str:
    """What tells the rounds of one model from those of another in the same run, at a client that
    keeps something from round to round."""
    return secrets.token_hex(16)


def write_messages(
    kind: str,
    content: RecordDict,
    clients: Sequence[int],
    registry: ClientRegistry,
    ttl: float | None,
    told: Mapping[int, Told] | None = None,
) -> list[Message]:
    """One message a client with `content`; `told`: what a client is told beside.

    A straggler must not spend its time on a round that is over: hence the time to live.
    """
    messages = [
        _message(kind, content, client, registry, ttl, (told or {}).get(client, {}))
        for client in clients
    ]
    for message in messages:
        # When each was written, one after the other, would tell how many lie in between.
        message.metadata.created_at = messages[0].metadata.created_at
    return messages


def _message(
    kind: str,
    content: RecordDict,
    client: int,
    registry: ClientRegistry,
    ttl: float | None,
    told: Told,
) -> Message:
    # Copies: Flower checks every entry that is set, which is most of the work of a message.
    content = content.copy()
    config = cast(ConfigRecord, content[CONFIG]).copy()
    for name, value in told.items():
        config[name] = value
    config[CLIENT_ID] = client
    # On its way a record is known by its digest: nobody may guess that of another's.
    config[NONCE] = secrets.token_hex(16)
    content[CONFIG] = config
    node, group = registry[client].node_id, str(config[SERVER_ROUND])
    return Message(content, node, kind, ttl=ttl, group_id=group)
