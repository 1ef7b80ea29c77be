"""A round of secure aggregation over Flower: five exchanges of messages before one deadline."""

import secrets
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict

from blackthorn.flower_port.transports import Delivery, Transport
from blackthorn.secure_aggregation.client import Shares
from blackthorn.secure_aggregation.key_agreement import Advertisement, Refused
from blackthorn.secure_aggregation.masks import Residues
from blackthorn.secure_aggregation.quantisation import Quantisation
from blackthorn.secure_aggregation.server import SecureServer
from blackthorn.wire import CONFIG, NONCE, RULE, SECURE

from .attestation import Attestation
from .messages import Asked
from .screening import RejectedReply, Rejection, content_of, one_line, replied, scalar_metrics
from .secure_records import (
    CONSISTENCY,
    KEYS,
    MASKED,
    SHARES,
    UNMASK,
    asking,
    by_client_record,
    neighbours_record,
    read_by_client,
    read_keys,
    read_masked,
    read_shares,
    standing_record,
)

# By when of the round's time an exchange is over; training has the most of it.
_OVER = {KEYS: 0.15, SHARES: 0.25, MASKED: 0.8, CONSISTENCY: 0.9, UNMASK: 1.0}

T = TypeVar("T")


class SecureExchange:
    """One round: `collect`, and then `total`. `asked` holds the round's train messages, which go
    out in the third exchange, to whoever is still there.

    `rejected`: by client, why it is gone; `metrics`: what those in the sum say beside it.
    """

    def __init__(
        self,
        transport: Transport,
        asked: Asked,
        timeout: float,
        server: SecureServer,
        quantisation: Quantisation,
        attested: Attestation | None,
    ) -> None:
        self._transport, self._asked, self._timeout = transport, asked, timeout
        self._server, self._quantisation, self._attested = server, quantisation, attested
        self._of = dict(zip(asked.clients, asked.messages, strict=True))
        self._tags: Mapping[int, Mapping[int, bytes]] = {}
        self._gone: dict[int, Rejection] = {}
        self.rejected: dict[int, Rejection] = {}
        self.metrics: dict[int, dict[str, float]] = {}

    def collect(self, generator: np.random.Generator) -> None:
        """All exchanges but the last. Raises TooFew where too few are left."""
        server = self._server
        told = self._exchange(KEYS, dict.fromkeys(self._of, ConfigRecord()), self._keys)
        keys = server.keys(told, generator)
        given = self._exchange(SHARES, {c: neighbours_record(n) for c, n in keys.items()}, _shares)
        routed = server.shares(given)
        sealed = {client: by_client_record(words) for client, words in routed.items()}
        standing = server.masked(self._exchange(MASKED, sealed, self._masked))
        # Who answers no more from here on is in the sum all the same.
        self._gone = dict(self.rejected)
        lists = {client: standing_record(one) for client, one in standing.items()}
        self._tags = server.consistency(self._exchange(CONSISTENCY, lists, _by_client))

    def total(self) -> Residues:
        """The last exchange, and the sum [d'] modulo 2^k. Raises TooFew where it cannot be
        opened."""
        tags = {client: by_client_record(words) for client, words in self._tags.items()}
        total = self._server.unmasked(self._exchange(UNMASK, tags, _by_client))
        self.rejected = self._gone
        return total

    def _exchange(
        self,
        exchange: str,
        told: Mapping[int, ConfigRecord],
        read: Callable[[int, RecordDict], T],
    ) -> dict[int, T]:
        """What each client of `told` has answered that answered as it should, by client."""
        if not told:
            return {}
        messages = [self._message(exchange, client, record) for client, record in told.items()]
        over = self._asked.since + _OVER[exchange] * self._timeout
        seconds = max(0.0, over - time.monotonic())
        found: dict[int, T] = {}
        for delivery in self._transport.exchange(messages, [*told], seconds):
            try:
                if delivery.message is None:
                    raise RejectedReply(delivery.problem)
                found[delivery.client] = read(delivery.client, content_of(delivery.message))
            except (RejectedReply, Refused) as problem:
                self._reject(delivery, exchange, problem)
        return found

    def _reject(self, delivery: Delivery, exchange: str, problem: ValueError) -> None:
        reason = one_line(f"in the exchange {exchange!r}: {problem}")
        self.rejected[delivery.client] = Rejection(delivery.client, reason, replied(delivery))

    def _message(self, exchange: str, client: int, told: ConfigRecord) -> Message:
        message = self._of[client]
        content = message.content.copy()
        if exchange != MASKED:
            config = message.content.config_records[CONFIG].copy()
            config[NONCE] = secrets.token_hex(16)
            content = RecordDict({CONFIG: config, RULE: message.content[RULE]})
        content[SECURE] = asking(exchange, self._server.session, told)
        known = message.metadata
        return Message(
            content, known.dst_node_id, known.message_type, ttl=known.ttl, group_id=known.group_id
        )

    def _keys(self, client: int, content: RecordDict) -> Advertisement:
        return read_keys(client, _answer(content))

    def _masked(self, client: int, content: RecordDict) -> Residues:
        if self._attested is not None and not self._attested.is_in(content):
            raise RejectedReply(f"the reply does not attest the round's rule {self._attested.rule}")
        numbers = self._quantisation
        vector = read_masked(content, numbers.padded, numbers.bits)
        self.metrics[client] = scalar_metrics(content)
        return vector


def _shares(client: int, content: RecordDict) -> Shares:
    del client
    return read_shares(_answer(content))


def _by_client(client: int, content: RecordDict) -> dict[int, bytes]:
    del client
    return read_by_client(_answer(content))


def _answer(content: RecordDict) -> ConfigRecord:
    record = content.get(SECURE)
    if not isinstance(record, ConfigRecord):
        raise RejectedReply(
            "the reply holds no answer of secure aggregation: its ClientApp knows nothing of it"
        )
    return record
