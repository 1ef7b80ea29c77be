"""The client's half of a round: it gives nothing away that it should not, whatever the server says.

A client answers five messages, in their order and each once; between them its secrets are
`SecureClient.values`, which whoever carries the messages keeps for it. What is Refused is not
answered, and the round goes on without the client or not at all.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

from . import shamir
from .graph import Terms
from .key_agreement import (
    KEY_BYTES,
    Advertisement,
    Entropy,
    KeyPair,
    NodeKey,
    Refused,
    seal,
    shared_key,
    unseal,
)
from .masks import Residues, expand, reduced

SESSION_BYTES = 32
# Stages, each the answer that was given last.
_KEYS, _SHARES, _MASKED, _CONSISTENT, _UNMASKED = (
    "keys",
    "shares",
    "masked",
    "consistency",
    "unmask",
)


@dataclass(frozen=True)
class Shares:
    """What a client gives its neighbours by way of the server: for each, sealed, its shares of the
    own mask's seed and of the masking key; and the SHA-256 of that seed, by which the server knows
    when shares do not fit."""

    sealed: Mapping[int, bytes]
    commitment: bytes


@dataclass(frozen=True)
class SecureClient:
    """One client in one round. `stage`: what it has answered last."""

    client: int
    session: bytes
    sealing: KeyPair = field(repr=False)
    masking: KeyPair = field(repr=False)
    stage: str = _KEYS
    neighbours: tuple[Advertisement, ...] = ()
    # The own mask's seed and the own share of it; what neighbours have given, by neighbour.
    seed: bytes = field(default=b"", repr=False)
    own_share: bytes = field(default=b"", repr=False)
    held: Mapping[int, bytes] = field(default_factory=dict, repr=False)
    # Who is in the sum, as it was told: of all clients, itself among them, ascending.
    alive: tuple[int, ...] = ()

    @classmethod
    def begin(
        cls,
        client: int,
        session: bytes,
        entropy: Entropy,
        key: EllipticCurvePrivateKey | None = None,
    ) -> tuple["SecureClient", Advertisement]:
        """New keys for a session, signed by the client's registered `key` where it is at hand.

        Raises Refused for a session's name of another length.
        """
        if len(session) != SESSION_BYTES:
            raise Refused(f"the session has {len(session)} bytes: {SESSION_BYTES} are needed")
        one = cls(client, session, KeyPair.generate(entropy), KeyPair.generate(entropy))
        told = Advertisement(client, one.sealing.public, one.masking.public)
        return one, told if key is None else told.signed(session, key)

    def shares(
        self,
        session: bytes,
        neighbours: Sequence[Advertisement],
        terms: Terms,
        registered: Mapping[int, NodeKey] | None,
        entropy: Entropy,
    ) -> tuple["SecureClient", Shares]:
        """The shares for its `neighbours`. `registered`: the members' keys by client, by which
        theirs have to be signed; None: the server's word is all there is.

        Raises Refused for too few neighbours, keys that are not theirs alone, and keys that are not
        signed by the one registered.
        """
        self._check(session, _KEYS)
        if len(neighbours) < terms.fewest_neighbours or len(neighbours) >= terms.clients:
            raise Refused(
                f"{len(neighbours)} neighbours: at least {terms.fewest_neighbours} are needed of "
                f"{terms.clients} clients"
            )
        self._check_keys(neighbours, registered)
        needed = terms.shares_needed(len(neighbours) + 1)
        seed = entropy(KEY_BYTES)
        holders = [one.client for one in neighbours]
        *of_seed, own = shamir.share(seed, needed, [*holders, self.client], entropy)
        # Of three clients t is three, and a client's own share is none of its masking key's. Where
        # all have to be in the sum nobody's masking key is ever asked for.
        of_key = shamir.share(self.masking.private, min(needed, len(holders)), holders, entropy)
        sealed = {
            one.client: seal(
                self._sealing_key(one),
                first + second,
                self._bound(self.client, one.client),
                entropy,
            )
            for one, first, second in zip(neighbours, of_seed, of_key, strict=True)
        }
        state = replace(self, stage=_SHARES, neighbours=tuple(neighbours), seed=seed, own_share=own)
        return state, Shares(sealed, sha256(seed).digest())

    def check_masked(self, session: bytes, sealed: Mapping[int, bytes], terms: Terms) -> None:
        """Raises Refused where `masked` would for the sake of who is left: to be asked before there
        is anything to mask."""
        self._check(session, _SHARES)
        alive, needed = len(sealed) + 1, terms.fewest_alive(len(self.neighbours) + 1)
        if not sealed.keys() <= {one.client for one in self.neighbours} or alive < needed:
            raise Refused(f"{alive} of a neighbourhood are left: {needed} of it are needed")

    def masked(
        self,
        session: bytes,
        sealed: Mapping[int, bytes],
        terms: Terms,
        numbers: np.ndarray,
        bits: int,
    ) -> tuple["SecureClient", Residues]:
        """`numbers` [d'], int64, under all masks, modulo 2^`bits`; `sealed`: the shares from those
        of its neighbours that are still there, with whom it masks.

        Raises Refused where too few are, or shares do not open.
        """
        self.check_masked(session, sealed, terms)
        known, held = {one.client: one for one in self.neighbours}, {}
        for other, words in sealed.items():
            opened = unseal(self._sealing_key(known[other]), words, self._bound(other, self.client))
            if len(opened) != 2 * shamir.SHARE_BYTES:
                raise Refused(f"the shares of client {other} are none")
            held[other] = opened
        total = reduced(numbers, bits).copy()
        total += expand(self.seed, len(total), bits)
        for other in sorted(held):
            mask = expand(self._mask_seed(known[other]), len(total), bits)
            if self.client < other:
                total += mask
            else:
                total -= mask
        return replace(self, stage=_MASKED, held=held), reduced(total, bits)

    def consistency(
        self,
        session: bytes,
        alive: Iterable[int],
        gone: Iterable[int],
        terms: Terms,
        entropy: Entropy,
    ) -> tuple["SecureClient", dict[int, bytes]]:
        """For each neighbour in the sum, sealed, the digest of whom the server says to be in it:
        the `alive`, of the whole round and this client among them. `gone`: of those that it has
        masked with, who is not.

        Raises Refused for a client that is said to be both, one that it does not know of, too few
        that are alive, and whenever it has been asked before: it is told one list a round.
        """
        self._check(session, _MASKED)
        alive_here, gone_here = {*alive}, {*gone}
        if alive_here & gone_here:
            raise Refused("a client cannot be in the sum and gone")
        if self.client not in alive_here:
            raise Refused("its own vector is not in the sum: there is nothing to open for it")
        known = {one.client: one for one in self.neighbours}
        # In a sparse graph most of those in the sum are nobody that it knows.
        around = (alive_here if terms.is_complete else alive_here & known.keys()) - {self.client}
        if around | gone_here != self.held.keys():
            raise Refused("those alive and gone are not those with whom it has masked")
        needed = terms.fewest_alive(len(self.neighbours) + 1)
        if len(around) + 1 < needed or len(alive_here) < terms.survivors:
            raise Refused(
                f"{len(around) + 1} of a neighbourhood are in the sum, and {len(alive_here)} of "
                f"all: {needed} and {terms.survivors} are needed"
            )
        state = replace(self, stage=_CONSISTENT, alive=tuple(sorted(alive_here)))
        digest = state._digest()
        return state, {
            other: seal(
                self._tag_key(known[other]), digest, self._bound(self.client, other), entropy
            )
            for other in sorted(around)
        }

    def unmask(
        self, session: bytes, tags: Mapping[int, bytes], terms: Terms
    ) -> tuple["SecureClient", dict[int, bytes]]:
        """For each neighbour that is in the sum, and for itself, the share of the own mask's seed;
        for each that is gone the share of the masking key. `tags`: what neighbours in the sum have
        sealed for it of the lists that they were told.

        Raises Refused where one was told another list, a tag is not its sender's for this client in
        this session, too few agree, and whenever it has been asked before: it answers once a round.
        """
        self._check(session, _CONSISTENT)
        alive = {*self.alive}
        if not tags.keys() <= self.held.keys() & alive:
            raise Refused("a tag is of a client that is no neighbour in the sum")
        known, digest = {one.client: one for one in self.neighbours}, self._digest()
        for other, tag in tags.items():
            if unseal(self._tag_key(known[other]), tag, self._bound(other, self.client)) != digest:
                raise Refused(
                    "the server told different lists of who is in the sum: client "
                    f"{other}'s is not client {self.client}'s"
                )
        agreeing = len(tags) + 1
        needed = terms.agreeing_needed(len(self.neighbours) + 1)
        if agreeing < needed:
            raise Refused(
                f"{agreeing} of a neighbourhood were told one list of who is in the sum: {needed} "
                "are needed"
            )
        size = shamir.SHARE_BYTES
        told = {
            other: words[:size] if other in alive else words[size:]
            for other, words in self.held.items()
        }
        told[self.client] = self.own_share
        nothing = KeyPair(b"", b"")
        ended = SecureClient(self.client, self.session, nothing, nothing, _UNMASKED)
        return ended, told

    # Between messages.

    def values(self) -> dict[str, Any]:
        """All of it, in types that Flower's records hold: secrets, to be kept on the client
        alone."""
        return {
            "client": self.client,
            "session": self.session,
            "stage": self.stage,
            "sealing": self.sealing.private,
            "masking": self.masking.private,
            "seed": self.seed,
            "own-share": self.own_share,
            "neighbours": [one.client for one in self.neighbours],
            "sealing-keys": b"".join(one.sealing for one in self.neighbours),
            "masking-keys": b"".join(one.masking for one in self.neighbours),
            "held-of": list(self.held),
            "held": b"".join(self.held.values()),
            "alive": list(self.alive),
        }

    @classmethod
    def of_values(cls, values: Mapping[str, Any]) -> "SecureClient":
        """What `values` were of."""
        private = values["sealing"], values["masking"]
        sealing, masking = (KeyPair.of(key) if key else KeyPair(b"", b"") for key in private)
        keys = (_split(values[name], KEY_BYTES) for name in ("sealing-keys", "masking-keys"))
        neighbours = [Advertisement(*one) for one in zip(values["neighbours"], *keys, strict=True)]
        pieces = _split(values["held"], 2 * shamir.SHARE_BYTES)
        return cls(
            values["client"],
            values["session"],
            sealing,
            masking,
            values["stage"],
            tuple(neighbours),
            values["seed"],
            values["own-share"],
            dict(zip(values["held-of"], pieces, strict=True)),
            tuple(values["alive"]),
        )

    def _check(self, session: bytes, stage: str) -> None:
        if session != self.session:
            raise Refused("the message is of another session than the keys")
        if self.stage != stage:
            raise Refused(f"the message is out of turn: the last answer was {self.stage!r}")

    def _check_keys(
        self, neighbours: Sequence[Advertisement], registered: Mapping[int, NodeKey] | None
    ) -> None:
        everybody = [self.client, *(one.client for one in neighbours)]
        keys = [self.sealing.public, self.masking.public]
        keys += [key for one in neighbours for key in (one.sealing, one.masking)]
        if len({*everybody}) < len(everybody):
            raise Refused("a client is its own neighbour, or one of them twice")
        if len({*keys}) < len(keys) or any(len(key) != KEY_BYTES for key in keys):
            raise Refused("a public key is used twice, or is none")
        if registered is None:
            return
        for one in neighbours:
            key = registered.get(one.client)
            if key is None:
                raise Refused(f"client {one.client} is not on this client's list of members")
            if not one.is_signed_by(self.session, key):
                raise Refused(
                    f"the keys of client {one.client} are not signed by its registered key"
                )

    def _sealing_key(self, other: Advertisement) -> bytes:
        return shared_key(
            self.sealing, other.sealing, "shares", self.session, (self.client, other.client)
        )

    def _tag_key(self, other: Advertisement) -> bytes:
        return shared_key(
            self.sealing, other.sealing, "consistency", self.session, (self.client, other.client)
        )

    def _digest(self) -> bytes:
        return sha256(b"".join(one.to_bytes(8, "big", signed=True) for one in self.alive)).digest()

    def _mask_seed(self, other: Advertisement) -> bytes:
        return shared_key(
            self.masking, other.masking, "mask", self.session, (self.client, other.client)
        )

    def _bound(self, giver: int, receiver: int) -> bytes:
        return self.session + giver.to_bytes(8, "big") + receiver.to_bytes(8, "big")


def _split(words: bytes, size: int) -> list[bytes]:
    return [words[i : i + size] for i in range(0, len(words), size)]
