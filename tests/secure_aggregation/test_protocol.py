"""A round between clients and a server: exact sums, clean refusals, and what a lying server
gets."""

import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from scipy.stats import chisquare
from secure_rounds import BITS, Round, numbers_of

from blackthorn.secure_aggregation.client import SecureClient
from blackthorn.secure_aggregation.graph import Terms
from blackthorn.secure_aggregation.key_agreement import (
    Advertisement,
    KeyPair,
    Refused,
    shared_key,
)
from blackthorn.secure_aggregation.masks import Residues, centred, expand
from blackthorn.secure_aggregation.server import TooFew

HALF = 0.5
EXCHANGES = ["keys", "shares", "masked", "consistency", "unmask"]
# Who vanishes in these is in the sum all the same.
AFTER_MASKED = ("consistency", "unmask")


def exact(numbers: dict[int, np.ndarray], clients: Sequence[int]) -> list[int]:
    return sum(numbers[client] for client in clients).tolist()  # type: ignore[union-attr]


def total_of(round_: Round) -> list[int]:
    return centred(round_.total(), round_.bits).tolist()


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize(
    ("clients", "survivors", "threshold"),
    [(3, 3, 2 / 3), (4, 3, 2 / 3), (5, 4, 2 / 3), (3, 3, HALF), (4, 3, HALF), (5, 3, HALF)],
)
def test_whoever_vanishes_the_sum_of_the_others_is_exact_or_the_round_is_refused(
    exchange: str, clients: int, survivors: int, threshold: float
) -> None:
    """Every set of the clients, in every exchange; of three that are left all have to stay."""
    terms = Terms(clients, survivors, threshold)
    numbers = numbers_of(terms, 4)
    for size in range(clients + 1):
        for silent in combinations(range(clients), size):
            one = Round(terms, silent={exchange: silent})
            left = [i for i in range(clients) if i not in silent]
            enough = len(left) >= (
                terms.shares_needed(clients) if exchange in AFTER_MASKED else terms.survivors
            )
            if not enough:
                with pytest.raises(TooFew, match="the round is refused"):
                    one.up_to_masked(numbers)
                    one.total()
                continue
            one.up_to_masked(numbers)
            summed = range(clients) if exchange in AFTER_MASKED else left
            assert total_of(one) == exact(numbers, [*summed])
            assert one.server.alive == [*summed]


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_third_may_vanish_in_any_exchange(exchange: str) -> None:
    terms = Terms(12, 8, HALF)
    numbers, silent = numbers_of(terms, 9), (0, 3, 7, 11)
    one = Round(terms, 9, silent={exchange: silent})
    one.up_to_masked(numbers)
    summed = [i for i in range(12) if exchange in AFTER_MASKED or i not in silent]
    assert total_of(one) == exact(numbers, summed)


def test_some_may_vanish_in_every_exchange() -> None:
    terms = Terms(15, 8, HALF)
    numbers = numbers_of(terms, 5)
    silent = {"keys": [1], "shares": [2], "masked": [0, 12], "consistency": [4], "unmask": [6]}
    one = Round(terms, 5, silent=silent)
    one.up_to_masked(numbers)
    assert total_of(one) == exact(numbers, [3, 4, 5, 6, 7, 8, 9, 10, 11, 13, 14])


def test_a_sparse_graph_gives_the_same_sum() -> None:
    terms = Terms(200, 160, HALF)
    assert terms.degree < 150
    silent = range(0, 200, 9)
    numbers = numbers_of(terms, 3)
    one = Round(terms, 3, silent={"masked": silent, "consistency": [1], "unmask": [2]})
    one.up_to_masked(numbers)
    assert total_of(one) == exact(numbers, [i for i in range(200) if i not in silent])


@pytest.mark.parametrize("bits", [8, 13, 16, 24, 32])
def test_the_sum_is_that_of_the_residues_whatever_the_modulus(bits: int) -> None:
    terms = Terms(4, 3, HALF)
    numbers = {i: np.full(3, 2 ** (bits - 1) - 1 - i) for i in range(4)}
    one = Round(terms, 3, bits=bits)
    one.up_to_masked(numbers)
    wrapped = (np.array(exact(numbers, range(4))) + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)
    assert total_of(one) == wrapped.tolist()


def test_one_masked_message_is_uniform_and_no_two_rounds_are_alike() -> None:
    terms, length = Terms(3, 3, HALF), 2**15
    numbers = {i: np.full(length, 5) for i in range(3)}
    first, second = Round(terms, length), Round(terms, length)
    for one in (first, second):
        one.up_to_masked(numbers)
    messages = [*first.sent.values(), *second.sent.values()]
    for at, message in enumerate(messages):
        assert chisquare(np.bincount(message >> 8, minlength=256)).pvalue > 1e-6
        assert chisquare(np.bincount(message & 255, minlength=256)).pvalue > 1e-6
        for other in messages[:at]:
            # The difference of two is uniform as well: no mask, and no pad, is used twice.
            apart = (message - other) & 0xFFFF
            assert chisquare(np.bincount(apart >> 8, minlength=256)).pvalue > 1e-6


def test_what_the_server_sees_of_all_but_one_client_says_nothing_of_its_mask() -> None:
    """Two messages of three: what is left of the third's mask is uniform."""
    terms, length = Terms(3, 3, HALF), 2**15
    one = Round(terms, length)
    one.up_to_masked({i: np.zeros(length, np.int64) for i in range(3)})
    two = (one.sent[0] + one.sent[1]) & 0xFFFF
    assert chisquare(np.bincount(two >> 8, minlength=256)).pvalue > 1e-6


def masks_of(one: Round, client: int) -> tuple[Residues, Residues]:
    """What hides the numbers of `client`: its own mask, the sum of those with its neighbours."""
    state = one.clients[client]
    own, pairs = expand(state.seed, one.length, BITS), np.zeros(one.length, np.uint16)
    for other in state.neighbours:
        key = (state.client, other.client)
        seed = shared_key(state.masking, other.masking, "mask", one.session, key)
        mask = expand(seed, one.length, BITS)
        pairs = pairs + mask if state.client < other.client else pairs - mask
    return own, pairs


def is_uniform(numbers: Residues) -> bool:
    return bool(chisquare(np.bincount(numbers >> 8, minlength=256)).pvalue > 1e-6)


def test_either_mask_alone_hides_an_update_and_none_is_used_twice() -> None:
    """A server that opens the one still faces the other: in every client, over two rounds."""
    terms, length = Terms(3, 3, HALF), 2**15
    left: list[Residues] = []
    for _ in range(2):
        one = Round(terms, length)
        one.up_to_masked({i: np.full(length, 5) for i in range(3)})
        for client in range(3):
            for mask in masks_of(one, client):
                left.append(one.sent[client] - mask)
    for at, numbers in enumerate(left):
        assert is_uniform(numbers)
        assert all(is_uniform(numbers - other) for other in left[:at])


# A server that lies.


def masked_round() -> Round:
    terms = Terms(7, 6)
    one = Round(terms)
    one.up_to_masked(numbers_of(terms, one.length))
    return one


def answer(one: Round, client: int, alive: Sequence[int], gone: Sequence[int]) -> dict[int, bytes]:
    return one.clients[client].consistency(one.session, alive, gone, one.terms, os.urandom)[1]


def test_nobody_opens_both_secrets_of_one_client() -> None:
    one = masked_round()
    with pytest.raises(Refused, match="in the sum and gone"):
        answer(one, 0, range(7), [3])
    one.up_to_told()
    # Told once, and unmasks once.
    for then in (lambda: None, lambda: one.unmask(0, one.tags[0])):
        then()
        for alive, gone in ((range(7), []), ([0, 1, 2, 4, 5, 6], [3])):
            with pytest.raises(Refused, match="out of turn"):
                answer(one, 0, alive, gone)
    with pytest.raises(Refused, match="out of turn"):
        one.unmask(0, one.tags[0])


def test_a_server_that_says_all_but_one_vanished_is_refused() -> None:
    one = masked_round()
    for alive in ([0], [0, 1], range(5)):
        gone = [i for i in range(7) if i not in alive]
        with pytest.raises(Refused, match="of a neighbourhood are in the sum"):
            answer(one, 0, alive, gone)


def test_a_server_that_leaves_neighbours_out_or_invents_some_is_refused() -> None:
    one = masked_round()
    with pytest.raises(Refused, match="not those with whom"):
        answer(one, 0, range(6), [])
    with pytest.raises(Refused, match="not those with whom"):
        answer(one, 0, range(8), [])
    with pytest.raises(Refused, match="its own vector is not in the sum"):
        answer(one, 0, range(1, 7), [])


def test_nobody_masks_twice_nor_in_another_session_nor_with_too_few() -> None:
    terms = Terms(5, 4)
    one = Round(terms, silent={"masked": range(5)})
    with pytest.raises(TooFew):
        one.up_to_masked(numbers_of(terms, 4))
    client, others = one.clients[0], one.server._shares
    routed = {i: others[i].sealed[0] for i in range(1, 5)}
    numbers = np.zeros(4, np.int64)
    with pytest.raises(Refused, match="another session"):
        client.masked(os.urandom(32), routed, terms, numbers, BITS)
    with pytest.raises(Refused, match="are left"):
        client.masked(one.session, {1: routed[1], 2: routed[2]}, terms, numbers, BITS)
    with pytest.raises(Refused, match="does not open"):
        client.masked(one.session, {**routed, 1: routed[2]}, terms, numbers, BITS)
    masked, _ = client.masked(one.session, routed, terms, numbers, BITS)
    with pytest.raises(Refused, match="out of turn"):
        masked.masked(one.session, routed, terms, numbers, BITS)


def keys_of(client: int, session: bytes) -> Advertisement:
    return SecureClient.begin(client, session, os.urandom)[1]


def test_keys_that_are_used_twice_or_of_too_few_are_refused() -> None:
    session, terms = os.urandom(32), Terms(5, 4)
    own, told = SecureClient.begin(0, session, os.urandom)
    others = [keys_of(i, session) for i in range(1, 5)]
    twice = replace(others[0], client=4)
    for neighbours, why in (
        (others[:2], "at least 3 are needed"),
        ([*others[:3], others[0]], "one of them twice"),
        ([*others[:3], twice], "used twice"),
        ([*others[:3], replace(told, client=4)], "used twice"),
        ([*others[:3], replace(others[3], masking=b"short")], "is none"),
        ([*others, keys_of(5, session)], "of 5 clients"),
    ):
        with pytest.raises(Refused, match=why):
            own.shares(session, neighbours, terms, None, os.urandom)


def test_with_a_list_of_members_the_server_cannot_put_its_own_keys_in_their_place() -> None:
    session, terms = os.urandom(32), Terms(4, 3, HALF)
    registered = {i: ec.generate_private_key(ec.SECP384R1()) for i in range(4)}
    public = {i: key.public_key() for i, key in registered.items()}
    told = {i: SecureClient.begin(i, session, os.urandom, registered[i])[1] for i in range(1, 4)}
    own, _ = SecureClient.begin(0, session, os.urandom, registered[0])
    own.shares(session, [*told.values()], terms, public, os.urandom)
    forged = replace(told[2], masking=KeyPair.generate(os.urandom).public)
    of_another = SecureClient.begin(2, session, os.urandom, registered[3])[1]
    earlier = SecureClient.begin(2, os.urandom(32), os.urandom, registered[2])[1]
    for instead in (forged, of_another, earlier, replace(told[2], signature=b"")):
        with pytest.raises(Refused, match="keys of client 2 are not signed"):
            own.shares(session, [told[1], instead, told[3]], terms, public, os.urandom)
    del public[2]
    with pytest.raises(Refused, match="client 2 is not on"):
        own.shares(session, [*told.values()], terms, public, os.urandom)


# Clients that lie.


def revealed_of(one: Round) -> dict[int, dict[int, bytes]]:
    one.up_to_told()
    return {i: one.unmask(i, tags) for i, tags in one.tags.items()}


def test_a_wrong_share_is_got_round_or_the_round_is_refused_and_never_a_wrong_sum() -> None:
    terms = Terms(7, 6, HALF)
    numbers = numbers_of(terms, 4)
    one = Round(terms, silent={"masked": [5]})
    one.up_to_masked(numbers)
    revealed = revealed_of(one)
    revealed[2] = {i: bytes(33) for i in revealed[2]}
    assert centred(one.server.unmasked(revealed), BITS).tolist() == exact(
        numbers, [0, 1, 2, 3, 4, 6]
    )
    for liar in (0, 1, 3):
        revealed[liar] = dict.fromkeys(revealed[liar], bytes(33))
    with pytest.raises(TooFew, match="do not fit"):
        one.server.unmasked(revealed)


def test_what_is_no_answer_leaves_its_client_out() -> None:
    terms = Terms(7, 4, HALF)
    numbers = numbers_of(terms, 4)
    one = Round(terms)
    one.up_to_masked(numbers)
    sent, server = one.sent, one.server
    server._masked = {}
    wrong = {0: sent[0][:2], 1: sent[1].astype(np.int64), 2: sent[2].reshape(2, 2)}
    one.standing = server.masked({**sent, **wrong})
    assert server.alive == [3, 4, 5, 6]
    assert total_of(one) == exact(numbers, [3, 4, 5, 6])
