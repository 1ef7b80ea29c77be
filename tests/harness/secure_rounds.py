"""Whole rounds of secure aggregation in memory, without Flower: who vanishes when, and what is
sent."""

import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from blackthorn.secure_aggregation.client import SecureClient
from blackthorn.secure_aggregation.graph import Terms
from blackthorn.secure_aggregation.masks import Residues
from blackthorn.secure_aggregation.server import SecureServer, Standing

BITS = 16


@dataclass
class Round:
    """A round up to the answers to what was masked. `silent`: by exchange (keys, shares, masked,
    consistency, unmask), who does not answer it and, being gone, nothing after it."""

    terms: Terms
    length: int = 4
    silent: Mapping[str, Collection[int]] = field(default_factory=dict)
    bits: int = BITS
    seed: int = 0
    session: bytes = field(default_factory=lambda: os.urandom(32))
    clients: dict[int, SecureClient] = field(default_factory=dict)
    sent: dict[int, Residues] = field(default_factory=dict)
    standing: dict[int, Standing] = field(default_factory=dict)
    tags: dict[int, dict[int, bytes]] = field(default_factory=dict)
    server: SecureServer = field(init=False)

    def up_to_masked(self, numbers: Mapping[int, np.ndarray]) -> None:
        """Three exchanges, by which every client that answers has sent its `numbers`, masked."""
        generator = np.random.default_rng(self.seed)
        self.server = SecureServer(self.session, self.terms, self.length, self.bits)
        told = {}
        for client in self._there(range(self.terms.clients), "keys"):
            self.clients[client], told[client] = SecureClient.begin(
                client, self.session, os.urandom
            )
        asked, given = self.server.keys(told, generator), {}
        for client in self._there(asked, "shares"):
            self.clients[client], given[client] = self.clients[client].shares(
                self.session, asked[client], self.terms, None, os.urandom
            )
        routed = self.server.shares(given)
        for client in self._there(routed, "masked"):
            # As between two messages of a deployment.
            kept = SecureClient.of_values(self.clients[client].values())
            self.clients[client], self.sent[client] = kept.masked(
                self.session, routed[client], self.terms, numbers[client], self.bits
            )
        self.standing = self.server.masked(self.sent)

    def up_to_told(self) -> None:
        """The fourth exchange, in which all are told the same list, as the server's is."""
        given = {}
        for client in self._there(self.standing, "consistency"):
            told = self.standing[client]
            given[client] = self.told(client, told.alive, told.gone)
        self.tags = self.server.consistency(given)

    def told(self, client: int, alive: Iterable[int], gone: Iterable[int]) -> dict[int, bytes]:
        """The tags of a client that is told so."""
        kept = SecureClient.of_values(self.clients[client].values())
        self.clients[client], tags = kept.consistency(
            self.session, alive, gone, self.terms, os.urandom
        )
        return tags

    def unmask(self, client: int, tags: Mapping[int, bytes]) -> dict[int, bytes]:
        """The shares of a client that is told these tags."""
        kept = SecureClient.of_values(self.clients[client].values())
        self.clients[client], shares = kept.unmask(self.session, tags, self.terms)
        return shares

    def total(self) -> Residues:
        """The last two exchanges, and the sum."""
        self.up_to_told()
        revealed = {c: self.unmask(c, self.tags[c]) for c in self._there(self.tags, "unmask")}
        return self.server.unmasked(revealed)

    def _there(self, clients: Collection[int], exchange: str) -> list[int]:
        return [one for one in clients if one not in self.silent.get(exchange, ())]


def numbers_of(terms: Terms, length: int, seed: int = 1) -> dict[int, np.ndarray]:
    """Some integers [length] of every client, of either sign."""
    generator = np.random.default_rng(seed)
    return {i: generator.integers(-(2**11), 2**11, length) for i in range(terms.clients)}
