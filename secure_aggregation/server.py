"""The server's half of a round: who is whose neighbour, what is passed on, and the sum.

Five steps in their order, each with the answers of those that gave one; whoever gives none, or one
that is no answer, is gone. TooFew where the round cannot end: then nothing but uniform numbers has
been learned.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256

import numpy as np

from . import shamir
from .client import Shares
from .graph import Terms, neighbourhoods
from .key_agreement import KEY_BYTES, Advertisement, KeyPair, shared_key
from .masks import Residues, dtype_of, expand, reduced


class TooFew(ValueError):
    """A round is refused: too few of its clients are left; the message is one line."""


@dataclass(frozen=True)
class Standing:
    """What a client is told of those whose vectors have arrived: who of all clients is in the sum,
    it among them, and who of those that it has masked with is gone."""

    alive: list[int]
    gone: list[int]


class SecureServer:
    """One session with `terms`, on vectors [`length`] of residues modulo 2^`bits`."""

    def __init__(self, session: bytes, terms: Terms, length: int, bits: int) -> None:
        self.session, self.terms = session, terms
        self._length, self._bits = length, bits
        self._keys: dict[int, Advertisement] = {}
        self._neighbours: dict[int, list[int]] = {}
        self._shares: dict[int, Shares] = {}
        self._masked: dict[int, Residues] = {}

    def keys(
        self, told: Mapping[int, Advertisement], generator: np.random.Generator
    ) -> dict[int, list[Advertisement]]:
        """For every client that has told its keys those of its neighbours.

        Raises TooFew for fewer than n'.
        """
        seen: set[bytes] = set()
        for client in sorted(told):
            one = told[client]
            keys = {one.sealing, one.masking}
            if one.client == client and len(keys - seen) == 2 and {*map(len, keys)} == {KEY_BYTES}:
                self._keys[client] = one
                seen |= keys
        self._require(self._keys, "told their keys")
        self._neighbours = neighbourhoods([*self._keys], self.terms.degree, generator)
        return {
            client: [self._keys[other] for other in others]
            for client, others in self._neighbours.items()
        }

    def shares(self, given: Mapping[int, Shares]) -> dict[int, dict[int, bytes]]:
        """For every client that has given shares those that its neighbours have given it.

        Raises TooFew for fewer than n'.
        """
        self._shares = {
            client: one
            for client, one in sorted(given.items())
            if client in self._neighbours
            and {*one.sealed} == {*self._neighbours[client]}
            and len(one.commitment) == KEY_BYTES
        }
        self._require(self._shares, "gave shares of their secrets")
        return {
            client: {other: self._shares[other].sealed[client] for other in self._partners(client)}
            for client in self._shares
        }

    def masked(self, sent: Mapping[int, Residues]) -> dict[int, Standing]:
        """For every client whose vector is in the sum, who else is.

        Raises TooFew for fewer than n', or where a neighbourhood has too few left for its shares.
        """
        dtype = dtype_of(self._bits)
        for client, vector in sorted(sent.items()):
            form = vector.dtype == dtype and vector.shape == (self._length,)
            if client in self._shares and form and int(vector.max()) < 2**self._bits:
                self._masked[client] = vector
        self._require(self._masked, "sent their masked update")
        standing = {}
        for client in self._masked:
            around = [client, *self._partners(client)]
            alive = sorted(one for one in around if one in self._masked)
            gone = sorted(one for one in around if one not in self._masked)
            needed = self.terms.fewest_alive(len(self._neighbours[client]) + 1)
            if len(alive) < needed:
                raise TooFew(
                    f"the round is refused: {len(alive)} of a neighbourhood are left, fewer than "
                    f"{needed}"
                )
            standing[client] = Standing(self.alive, gone)
        return standing

    def consistency(self, given: Mapping[int, Mapping[int, bytes]]) -> dict[int, dict[int, bytes]]:
        """For every client that has given tags those that its neighbours have given it.

        Who has given none is in the sum all the same. Raises TooFew where too few have for one of
        their neighbourhood to unmask, or for a secret to be opened.
        """
        there = {
            client: tags
            for client, tags in sorted(given.items())
            if client in self._masked and {*tags} == {*self._beside(client)}
        }
        for client in self._shares:
            beside, neighbourhood = self._beside(client), len(self._neighbours[client]) + 1
            around = [one for one in (client, *beside) if one in there]
            needed = (
                self.terms.agreeing_needed(neighbourhood)
                if client in there
                else self.terms.shares_needed(neighbourhood)
            )
            if beside and len(around) < needed:
                raise TooFew(
                    f"the round is refused: {len(around)} of a neighbourhood have said what they "
                    f"were told, fewer than {needed}"
                )
        return {
            client: {
                other: there[other][client] for other in self._beside(client) if other in there
            }
            for client in there
        }

    def unmasked(self, revealed: Mapping[int, Mapping[int, bytes]]) -> Residues:
        """The sum of all vectors of clients that sent one, modulo 2^k.

        `revealed`: by client, what it has revealed of each of its neighbourhood. Raises TooFew
        where too few have, or what they have does not fit.
        """
        total = np.zeros(self._length, dtype_of(self._bits))
        for client, vector in self._masked.items():
            total += vector
            total -= expand(self._own_seed(client, revealed), self._length, self._bits)
        for client in self._shares.keys() - self._masked.keys():
            beside = self._beside(client)
            if not beside:
                continue
            pair = self._masking_pair(client, revealed)
            for other in beside:
                peer = self._keys[other].masking
                seed = shared_key(pair, peer, "mask", self.session, (client, other))
                mask = expand(seed, self._length, self._bits)
                # The other's sign, taken back.
                if other < client:
                    total -= mask
                else:
                    total += mask
        return reduced(total, self._bits)

    @property
    def alive(self) -> list[int]:
        """Whose vectors are in the sum, ascending."""
        return [*self._masked]

    def _partners(self, client: int) -> list[int]:
        """With whom a client masks: neighbours that gave shares."""
        return [other for other in self._neighbours[client] if other in self._shares]

    def _beside(self, client: int) -> list[int]:
        """Of these, those in the sum."""
        return [other for other in self._partners(client) if other in self._masked]

    def _require(self, there: Iterable[int], did: str) -> None:
        count = len([*there])
        if count < self.terms.survivors:
            raise TooFew(
                f"the round is refused: {count} of {self.terms.clients} clients {did}, fewer than "
                f"{self.terms.survivors}"
            )

    def _own_seed(self, client: int, revealed: Mapping[int, Mapping[int, bytes]]) -> bytes:
        commitment = self._shares[client].commitment
        holders = [client, *self._partners(client)]
        return self._opened(
            client, holders, revealed, lambda seed: sha256(seed).digest() == commitment
        )

    def _masking_pair(self, client: int, revealed: Mapping[int, Mapping[int, bytes]]) -> KeyPair:
        public = self._keys[client].masking
        holders = self._partners(client)
        return KeyPair.of(
            self._opened(client, holders, revealed, lambda key: KeyPair.of(key).public == public)
        )

    def _opened(
        self,
        client: int,
        holders: list[int],
        revealed: Mapping[int, Mapping[int, bytes]],
        fits: Callable[[bytes], bool],
    ) -> bytes:
        """The secret of `client` of which `holders` had shares.

        One wrong share, or some of clients whose ids are next to one another, are got round where
        there are more shares than are needed.
        """
        given = {one: revealed[one][client] for one in holders if client in revealed.get(one, {})}
        needed = self.terms.shares_needed(len(self._neighbours[client]) + 1)
        sound = sorted(one for one, share in given.items() if shamir.is_share(share))
        if len(sound) < needed:
            raise TooFew(
                f"the round is refused: {len(sound)} shares of a client's secret are left, fewer "
                f"than {needed}"
            )
        for first in range(len(sound) if len(sound) > needed else 1):
            chosen = [sound[(first + step) % len(sound)] for step in range(needed)]
            secret = shamir.reconstruct({one: given[one] for one in chosen})
            if secret is not None and fits(secret):
                return secret
        raise TooFew(f"the round is refused: the shares of client {client}'s secret do not fit")
