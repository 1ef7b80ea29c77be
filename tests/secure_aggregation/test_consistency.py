"""Clients compare whom the server says to be in the sum, before they open it: what a server that
tells them different lists gets, alone and with clients that help it."""

import os
from collections.abc import Callable, Iterable, Mapping
from hashlib import sha256
from itertools import combinations

import numpy as np
import pytest
from secure_rounds import BITS, Round, numbers_of

from blackthorn.secure_aggregation import shamir
from blackthorn.secure_aggregation.client import SecureClient
from blackthorn.secure_aggregation.graph import Terms
from blackthorn.secure_aggregation.key_agreement import KeyPair, Refused
from blackthorn.secure_aggregation.masks import centred
from blackthorn.secure_aggregation.server import TooFew

DIFFERENT = "the server told different lists of who is in the sum"
Shares = Mapping[int, Mapping[int, bytes]]


def round_of(terms: Terms) -> Round:
    one = Round(terms)
    one.up_to_masked(numbers_of(terms, one.length))
    return one


def exact(numbers: Mapping[int, np.ndarray], clients: Iterable[int]) -> list[int]:
    return np.sum([numbers[client] for client in clients], axis=0).tolist()


def given_by(one: Round, client: int, alive: Iterable[int]) -> dict[int, bytes]:
    """The shares that a client gives which is told that these are in the sum, and asks nobody."""
    state, size = one.clients[client], shamir.SHARE_BYTES
    there = {*alive}
    given = {
        other: words[:size] if other in there else words[size:]
        for other, words in state.held.items()
    }
    return given | {client: state.own_share}


# A server that nobody helps.


@pytest.mark.parametrize(("clients", "survivors", "summed"), [(20, 16, 15), (20, 14, 12)])
def test_lists_that_would_open_the_sum_of_fewer_open_nothing(
    clients: int, survivors: int, summed: int
) -> None:
    """Each client is told that as many have vanished as may, and of each whom the server wants out
    of the sum enough are told that it has."""
    one = round_of(Terms(clients, survivors))
    numbers, out = numbers_of(one.terms, one.length), range(clients - summed)
    told = dict.fromkeys(out, 0)
    lists = {}
    for client in range(clients):
        others = sorted((other for other in out if other != client), key=told.__getitem__)
        gone = others[: clients - survivors]
        told |= {other: told[other] + 1 for other in gone}
        lists[client] = [other for other in range(clients) if other not in gone]
    # It would do, if they did not ask one another.
    revealed: Shares = {
        client: {
            other: share
            for other, share in given_by(one, client, lists[client]).items()
            if (other in lists[client]) == (other not in out)
        }
        for client in range(clients)
    }
    kept = dict(one.server._masked)
    for client in out:
        del one.server._masked[client]
    opened = centred(one.server.unmasked(revealed), BITS)
    assert opened.tolist() == exact(numbers, range(clients - summed, clients))
    one.server._masked = kept
    tags = {
        client: one.told(client, alive, {*range(clients)} - {*alive})
        for client, alive in lists.items()
    }
    for client, alive in lists.items():
        for_it = {other: tags[other][client] for other in alive if client in tags[other]}
        # Of whom the server wants out of the sum, those that count it in may all be told the same.
        with pytest.raises(Refused, match="told" if client in out else DIFFERENT):
            one.unmask(client, for_it)
        same = {other: tag for other, tag in for_it.items() if lists[other] == alive}
        with pytest.raises(Refused, match="of a neighbourhood were told one list"):
            one.unmask(client, same)


def test_one_client_that_is_told_otherwise_opens_nothing_and_the_others_refuse_its_tag() -> None:
    one = round_of(Terms(7, 6))
    lists = {client: range(7) for client in range(6)}
    tags = {client: one.told(client, alive, []) for client, alive in lists.items()}
    tags[6] = one.told(6, [0, 1, 2, 3, 4, 6], [5])
    with pytest.raises(Refused, match=f"{DIFFERENT}: client 6's is not client 0's"):
        one.unmask(0, {other: tags[other][0] for other in range(1, 7)})
    with pytest.raises(Refused, match=f"{DIFFERENT}: client 0's is not client 6's"):
        one.unmask(6, {other: tags[other][6] for other in range(5)})
    # Without it they are enough.
    assert one.unmask(0, {other: tags[other][0] for other in range(1, 6)}).keys() == {*range(7)}


def test_of_fewer_that_told_their_keys_as_many_have_to_agree_as_of_all() -> None:
    """Else a server that says so to some could have two lists agreed on, each by t of fewer."""
    terms = Terms(20, 16)
    assert (terms.shares_needed(16), terms.agreeing_needed(16)) == (11, 14)
    one = Round(terms, silent={"keys": range(4), "consistency": [18, 19]})
    numbers, there = numbers_of(terms, one.length), range(4, 20)
    one.up_to_masked(numbers)
    assert centred(one.total(), BITS).tolist() == exact(numbers, there)
    one = Round(terms, silent={"keys": range(4)})
    one.up_to_masked(numbers)
    given = {client: one.told(client, there, []) for client in range(4, 17)}
    with pytest.raises(TooFew, match="13 of a neighbourhood have said what they were told"):
        one.server.consistency(given)
    tags = {other: words[4] for other, words in given.items() if other != 4}
    with pytest.raises(Refused, match="13 of a neighbourhood were told one list"):
        one.unmask(4, tags)


# A tag that is not what it should be.


def told_alike(session: bytes) -> Round:
    """A round of seven whose clients were all told that all are in the sum."""
    one = Round(Terms(7, 6), session=session)
    one.up_to_masked(numbers_of(one.terms, one.length))
    one.up_to_told()
    return one


def changed(one: Round) -> bytes:
    return one.tags[0][3][:-1] + bytes([one.tags[0][3][-1] ^ 1])


def in_another_session(one: Round) -> bytes:
    return told_alike(one.session[::-1]).tags[0][3]


def in_a_round_whose_session_has_the_same_name(one: Round) -> bytes:
    return told_alike(one.session).tags[0][3]


def of_another_sender(one: Round) -> bytes:
    return one.tags[0][4]


def for_another_receiver(one: Round) -> bytes:
    return one.tags[1][3]


def sent_back_to_who_made_it(one: Round) -> bytes:
    return one.tags[3][0]


def the_shares_in_its_place(one: Round) -> bytes:
    return one.server._shares[3].sealed[0]


def cut(one: Round) -> bytes:
    return one.tags[0][3][:11]


@pytest.mark.parametrize(
    "forged",
    [
        changed,
        in_another_session,
        in_a_round_whose_session_has_the_same_name,
        of_another_sender,
        for_another_receiver,
        sent_back_to_who_made_it,
        the_shares_in_its_place,
        cut,
    ],
)
def test_a_tag_that_is_not_its_senders_for_this_client_and_round_is_refused(
    forged: Callable[[Round], bytes],
) -> None:
    one = told_alike(os.urandom(32))
    state, tags = one.clients[0], one.tags[0]
    assert state.unmask(one.session, tags, one.terms)[1]
    with pytest.raises(Refused, match="what is sealed does not open"):
        state.unmask(one.session, {**tags, 3: forged(one)}, one.terms)


def test_tags_that_change_places_are_refused() -> None:
    one = told_alike(os.urandom(32))
    tags = one.tags[0]
    with pytest.raises(Refused, match="does not open"):
        one.unmask(0, {**tags, 3: tags[4], 4: tags[3]})


def test_tags_that_are_missing_are_refused_below_the_threshold_and_from_it_on_not() -> None:
    one = told_alike(os.urandom(32))
    state, needed = one.clients[0], one.terms.agreeing_needed(7)
    assert needed == 5
    for count in range(7):
        some = {other: one.tags[0][other] for other in range(1, 1 + count)}
        if count + 1 >= needed:
            assert state.unmask(one.session, some, one.terms)[1].keys() == {*range(7)}
            continue
        with pytest.raises(Refused, match=f"{count + 1} of a neighbourhood were told one list"):
            state.unmask(one.session, some, one.terms)


def test_tags_of_who_is_not_in_the_sum_are_refused() -> None:
    one = Round(Terms(7, 6), silent={"masked": [6]})
    one.up_to_masked(numbers_of(one.terms, one.length))
    one.up_to_told()
    for stranger in (6, 0, 9):
        with pytest.raises(Refused, match="no neighbour in the sum"):
            one.unmask(0, {**one.tags[0], stranger: one.tags[0][1]})


# A server that some clients help: they tell both lists, and give both shares.


def agreed(one: Round, helpers: set[int], without: set[int]) -> tuple[Shares, Shares]:
    """What the others give who are told that all are in the sum, and those in `without`, who are
    told that client 0 has vanished; with the server's best choice of what it passes on."""
    lists = {True: [*range(len(one.clients))], False: [*range(1, len(one.clients))]}
    states: dict[tuple[int, bool], SecureClient] = {}
    tags: dict[tuple[int, bool], dict[int, bytes]] = {}
    for client, state in one.clients.items():
        for told in (True, False):
            if client in helpers or (client not in without) == told:
                gone = [] if told else [0]
                key = (client, told)
                states[key], tags[key] = state.consistency(
                    one.session, lists[told], gone, one.terms, os.urandom
                )
    given: dict[bool, dict[int, Mapping[int, bytes]]] = {True: {}, False: {}}
    for (client, told), state in states.items():
        if client in helpers:
            given[told][client] = given_by(one, client, lists[told])
            continue
        for_it = {
            other: words[client]
            for (other, same), words in tags.items()
            if same == told and other != client
        }
        try:
            given[told][client] = state.unmask(one.session, for_it, one.terms)[1]
        except Refused as refusal:
            assert "of a neighbourhood were told one list" in str(refusal)
    return given[True], given[False]


def opened(one: Round, as_alive: Shares, as_gone: Shares) -> bool:
    """Whether shares of both secrets of client 0 are there, enough to open its update alone."""
    needed, server = one.terms.shares_needed(len(one.clients)), one.server
    seeds = {holder: given[0] for holder, given in as_alive.items()}
    keys = {holder: given[0] for holder, given in as_gone.items()}
    if len(seeds) < needed or len(keys) < needed:
        return False
    seed, key = shamir.reconstruct(seeds), shamir.reconstruct(keys)
    return (
        seed is not None
        and key is not None
        and sha256(seed).digest() == server._shares[0].commitment
        and KeyPair.of(key).public == server._keys[0].masking
    )


@pytest.mark.parametrize(("clients", "threshold"), [(7, 2 / 3), (6, 0.5)])
def test_two_lists_are_agreed_on_from_2t_minus_n_helpers_on_and_with_fewer_never(
    clients: int, threshold: float
) -> None:
    """Every way in which a server can divide those who do not help it."""
    terms = Terms(clients, clients - 1, threshold)
    one = round_of(terms)
    for count in range(terms.helpers_needed + 1):
        helpers = {*range(clients - count, clients)}
        others = [i for i in range(1, clients) if i not in helpers]
        found = False
        for size in range(len(others) + 1):
            for without in combinations(others, size):
                as_alive, as_gone = agreed(one, helpers, {*without})
                both = as_alive.keys() - helpers and as_gone.keys() - helpers
                assert bool(both) <= (count == terms.helpers_needed)
                found |= opened(one, as_alive, as_gone)
        assert found == (count == terms.helpers_needed)


@pytest.mark.parametrize("threshold", [2 / 3, 0.5])
def test_helpers_that_cannot_have_two_lists_agreed_on_open_no_secret_of_a_smaller_neighbourhood(
    threshold: float,
) -> None:
    """And leave none of those who refuse a list a sum of their own: that takes n' + t - n."""
    for clients in range(3, 129):
        fewest = max(3, Terms(clients, clients, threshold).shares_needed(clients))
        for survivors in range(fewest, clients + 1):
            terms = Terms(clients, survivors, threshold)
            helping = terms.helpers_needed - 1
            assert helping < terms.shares_needed(survivors)
            assert helping < survivors + terms.agreeing_needed(clients) - clients


def test_the_figures_of_the_page_on_who_is_trusted_with_what() -> None:
    for clients, threshold, helpers in (
        *((5, 2 / 3, 3), (20, 2 / 3, 8), (100, 2 / 3, 34), (128, 2 / 3, 44)),
        *((20, 0.5, 2), (21, 0.5, 1)),
    ):
        assert Terms(clients, clients, threshold).helpers_needed == helpers
    for clients, survivors, fewest in ((129, 103, 53), (1000, 800, 243)):
        terms = Terms(clients, survivors)
        assert terms.fewest_alive(terms.degree + 1) == fewest


# Beyond 128 clients, where a client knows its neighbours alone.


def test_in_a_sparse_graph_neighbours_compare_the_whole_list_and_count_it() -> None:
    terms = Terms(129, 103)
    one = round_of(terms)
    around = {advertised.client for advertised in one.clients[0].neighbours}
    strangers = [i for i in range(1, 129) if i not in around]
    assert not terms.is_complete
    # Enough of a neighbourhood, and too few of all.
    with pytest.raises(Refused, match="79 of a neighbourhood are in the sum, and 102 of all"):
        one.told(0, [*{0, *around}, *strangers[:23]], [])
    first, other = sorted(around)[:2]
    tags = {first: one.told(first, range(129), []), other: one.told(other, range(130), [])}
    one.told(0, range(129), [])
    with pytest.raises(Refused, match=f"{DIFFERENT}: client {other}'s is not client 0's"):
        one.unmask(0, {i: words[0] for i, words in tags.items()})
    with pytest.raises(Refused, match="2 of a neighbourhood were told one list"):
        one.unmask(0, {first: tags[first][0]})
