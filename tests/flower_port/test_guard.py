"""The guard in front of Flower's real Fleet API: what a rogue with one key, or none, can do."""

import contextlib
import resource
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from fleet_server import MEMORY, Fleet, fleet
from flwr.proto import fleet_pb2, message_pb2
from flwr.proto.fleet_pb2_grpc import FleetStub
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.node_pb2 import Node
from process_watch import until
from sqlalchemy.exc import OperationalError

from blackthorn.attacks.rogue.server_attacks import (
    ATTACKS,
    HELD,
    Peer,
    half_open,
    many_ids,
    object_id,
    object_tree,
    push,
    registrations,
    stalled_handshakes,
)
from blackthorn.flower_port.guard.limits import Limits

# What an honest call takes at most, on a machine that is busy with the whole test suite.
PROMPT_SECONDS = 10.0

LIMITS = Limits(
    stranger_seconds=2.0,
    idle_connection_seconds=2.0,
    request_seconds=4.0,
    offences=1000,
    key_connections_a_minute=30,
)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 20_000), hard))
    with fleet(tmp_path_factory.mktemp("guarded"), limits=LIMITS) as one:
        yield one
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def rogue(guarded: Fleet) -> Peer:
    """A registered node that has pulled a message, and knows a victim and its message."""
    peer, victim = guarded.node(), guarded.node()
    guarded.send(peer)
    guarded.pull(peer)
    peer.victim, peer.others_message = victim.public_key(), guarded.send(victim)
    guarded.pull(victim)
    return peer


# Attack -> what the SuperLink says, and the kind under which the key's record has it.
REFUSED = {
    "many-ids": ("a request of 3400", "size"),
    "object-tree": ("an object that consists of different parts", "object tree"),
    "long-error": ("RESOURCE_EXHAUSTED", "unfinished request"),
    "million-metrics": ("RESOURCE_EXHAUSTED", "unfinished request"),
    "instruction": ("a message that says it is node 1's", "source"),
    "others-message": ("an answer to a message to node", "other's message"),
    "replay": ("second: PERMISSION_DENIED: PushMessages: a second answer", "second answer"),
    "repeated-answer": ("an answer that was announced 9 times before", "repeated answer"),
    "other-node": ("UNAUTHENTICATED: PullMessages: a request that says it is", "another node"),
    "other-key": ("a key in the request that did not sign it", "other's key"),
    "long-key": ("RESOURCE_EXHAUSTED", "unfinished request"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_attack_with_a_key_is_refused_and_named(guarded: Fleet, rogue: Peer, name: str) -> None:
    said, kind = REFUSED[name]
    began = time.monotonic()
    outcome = ATTACKS[name](rogue)
    assert said in outcome, outcome
    assert time.monotonic() - began < PROMPT_SECONDS
    assert guarded.refused(rogue) == {kind: 3 if name == "repeated-answer" else 1}


def test_without_a_guard_flower_takes_it(tmp_path: Path) -> None:
    """What is refused above is no fault of the attack's."""
    with fleet(tmp_path, guarded=False, tls=False) as one:
        peer, victim = one.node(), one.node()
        one.send(peer)
        one.pull(peer)
        peer.victim = victim.public_key()
        one.state.deactivate_node(victim.node_id)
        assert {n: ATTACKS[n](peer) for n in ("instruction", "other-key", "long-error")} == {
            "instruction": "taken",
            "other-key": "taken",
            "long-error": "taken",
        }


def test_an_honest_answer_passes(guarded: Fleet) -> None:
    peer = guarded.node()
    for _ in range(3):
        guarded.send(peer)
        guarded.answer(peer)
    assert guarded.refused(peer) == {}


def test_ids_are_counted_below_the_limit_of_bytes(guarded: Fleet, rogue: Peer) -> None:
    """400 ids are few bytes, but far more than the message needs: it has eight objects."""
    outcome = many_ids(rogue, count=400)
    assert "400 object ids, at most" in outcome
    assert guarded.refused(rogue) == {"object tree": 1}


def test_an_answer_of_more_bytes_than_twice_its_message_is_refused(guarded: Fleet) -> None:
    peer = guarded.node()
    guarded.send(peer, 1000)
    with pytest.raises(grpc.RpcError) as caught:
        guarded.answer(peer, 10**6)
    assert "an answer of more than" in caught.value.details()
    assert guarded.refused(peer) == {"bytes": 1}


def test_a_tree_in_the_store_in_memory_does_not_grow(tmp_path: Path) -> None:
    """There, without a guard, the tree of a few kilobytes is stored and stands for 2^17 objects."""
    for is_guarded in (False, True):
        with fleet(
            tmp_path / str(is_guarded), guarded=is_guarded, database=MEMORY, tls=False
        ) as one:
            peer = one.node()
            one.send(peer)
            one.pull(peer)
            assert ("taken" in object_tree(peer)) != is_guarded


def test_a_request_in_another_node_s_name_leaves_a_key_its_shares(
    rogue: Peer,
) -> None:
    """Flower refuses it in the words with which it sends away a key that is not registered."""
    with rogue.stub() as stub:
        push(rogue, message_pb2.ObjectTree(object_id=object_id(1)))
        with pytest.raises(grpc.RpcError, match="a request that says it is node"):
            request = fleet_pb2.UnregisterNodeFleetRequest(node_id=rogue.node_id + 1)
            stub.UnregisterNode(request, timeout=20)
    second = push(rogue, message_pb2.ObjectTree(object_id=object_id(2)))
    assert "a second answer" in second


def test_what_a_node_confirms_is_its_own(guarded: Fleet, rogue: Peer) -> None:
    with rogue.stub() as stub, pytest.raises(grpc.RpcError) as caught:
        request = message_pb2.ConfirmMessageReceivedRequest(
            node=Node(node_id=rogue.node_id),
            run_id=guarded.run_id,
            message_object_id=rogue.others_message,
        )
        stub.ConfirmMessageReceived(request, timeout=20)
    assert "to confirm a message to node" in caught.value.details()
    assert guarded.refused(rogue) == {"other's message": 1}


def test_a_victims_node_stays_its_own(guarded: Fleet, rogue: Peer) -> None:
    """Its node is offline, which is when Flower would give it away."""
    guarded.state.deactivate_node(guarded.state.get_node_id_by_public_key(rogue.victim))
    ATTACKS["other-key"](rogue)
    (victim,) = [n for n in guarded.state.get_node_info() if n.public_key == rogue.victim]
    assert victim.heartbeat_interval == 60.0


@pytest.mark.parametrize("name", HELD)
def test_strangers_hold_up_nobody(guarded: Fleet, name: str) -> None:
    """Without the guard, 1,000 streams of headers alone take all threads there are."""
    honest, stranger = guarded.node(), guarded.stranger()
    before = guarded.refused()
    with honest.stub() as stub, HELD[name](stranger):
        end = time.monotonic() + 3.0
        while time.monotonic() < end:
            _beat(stub, honest)
    assert sum(guarded.refused().values()) > sum(before.values())


def test_strangers_connections_are_closed(guarded: Fleet) -> None:
    stranger = guarded.stranger()
    with stalled_handshakes(stranger, 1), half_open(stranger, 100), stranger.raw() as silent:
        assert silent.closed_within(4 * LIMITS.idle_connection_seconds)


def test_a_key_has_no_more_than_its_share(guarded: Fleet) -> None:
    """Of 100 streams with its signature eight are let in, and these only until the deadline."""
    honest, greedy = guarded.node(), guarded.node()
    with honest.stub() as stub, half_open(greedy, 100):
        for _ in range(5):
            _beat(stub, honest)
        until(lambda: guarded.refused(greedy).get("unfinished request", 0) == LIMITS.key_calls)
    assert guarded.refused(greedy)["requests at a time"] >= 1


def test_a_heartbeat_that_is_one_request_too_many_is_sent_again(guarded: Fleet) -> None:
    """Of another code than UNAVAILABLE the thread dies that sends a SuperNode's heartbeats."""
    greedy = guarded.node()
    with greedy.stub() as stub, half_open(greedy, 100):
        until(lambda: guarded.refused(greedy).get("requests at a time", 0) >= 1)
        for method, code in [("PullMessages", "RESOURCE_EXHAUSTED"), ("heartbeat", "UNAVAILABLE")]:
            with pytest.raises(grpc.RpcError) as caught:
                if method == "heartbeat":
                    _beat(stub, greedy)
                else:
                    request = fleet_pb2.PullMessagesRequest(node=Node(node_id=greedy.node_id))
                    stub.PullMessages(request, timeout=PROMPT_SECONDS)
            assert caught.value.code().name == code
            assert caught.value.details() == "more than 8 requests at a time"
    until(lambda: _beats(greedy))


def test_a_key_holds_no_more_connections_than_its_share(guarded: Fleet) -> None:
    """The newest stay: who is honest has come back, and its old connection is dead."""
    greedy, spare = guarded.node(), 4
    with contextlib.ExitStack() as held:
        for _ in range(int(LIMITS.key_connections) + spare):
            newest = held.enter_context(greedy.stub())
            _beat(newest, greedy)
        until(lambda: guarded.refused(greedy).get("connections", 0) >= spare)
        _beat(newest, greedy)
    assert guarded.refused(greedy).keys() == {"connections"}


def test_a_key_makes_no_more_connections_in_a_minute_than_its_share(guarded: Fleet) -> None:
    honest, greedy = guarded.node(), guarded.node()
    for _ in range(int(LIMITS.key_connections_a_minute)):
        with greedy.stub() as stub:
            _beat(stub, greedy)
    with greedy.raw() as one_more, honest.stub() as stub:
        one_more.begin("/flwr.proto.Fleet/PullMessages", greedy.signed())
        assert one_more.closed_within(LIMITS.request_seconds)
        _beat(stub, honest)
    assert guarded.refused(greedy)["connections"] >= 1


def test_a_slow_upload_is_given_up(guarded: Fleet, rogue: Peer) -> None:
    uploading = threading.Thread(target=ATTACKS["slow-upload"], args=(rogue,), daemon=True)
    uploading.start()
    until(lambda: guarded.refused(rogue).get("unfinished request", 0) == 1)


@pytest.mark.parametrize("name", ["pings", "resets", "endless-headers"])
def test_floods_end_with_their_connection(guarded: Fleet, rogue: Peer, name: str) -> None:
    honest = guarded.node()
    flood = threading.Thread(target=ATTACKS[name], args=(rogue,), daemon=True)
    with honest.stub() as stub:
        flood.start()
        while flood.is_alive():
            _beat(stub, honest)


def test_registrations_are_refused_and_counted(guarded: Fleet) -> None:
    nodes = len(guarded.state.get_node_info())
    before = guarded.refused().get("unauthenticated", 0)
    assert registrations(guarded.stranger(), count=50).startswith("0 of 50")
    assert len(guarded.state.get_node_info()) == nodes
    assert guarded.refused()["unauthenticated"] - before >= 50


def test_a_key_that_was_registered_a_moment_ago_is_let_in(guarded: Fleet) -> None:
    """While strangers hold all that they can hold."""
    with half_open(guarded.stranger(), 300):
        began = time.monotonic()
        while True:
            try:
                guarded.node()
                break
            except grpc.RpcError as error:
                assert error.code() == grpc.StatusCode.UNAVAILABLE
                assert time.monotonic() - began < PROMPT_SECONDS
                time.sleep(0.1)


def test_repeated_offences_bar_a_key_until_it_is_lifted(tmp_path: Path) -> None:
    with fleet(tmp_path, tls=False, limits=Limits(offences=3)) as one:
        peer, other = one.node(), one.node()
        one.send(peer)
        one.pull(peer)
        for _ in range(3):
            ATTACKS["instruction"](peer)
        assert "its key is barred (source)" in ATTACKS["instruction"](peer)
        with other.stub() as stub:
            _beat(stub, other)
        assert one.records is not None
        # A SuperLink that is started again knows it still.
        assert type(one.records)(tmp_path / "guard", 3).registration(peer.public_key()).barred
        assert one.records.lift(peer.public_key())
        assert "barred" not in ATTACKS["instruction"](peer)


def test_a_key_that_was_unregistered_is_told_so(guarded: Fleet) -> None:
    peer = guarded.node()
    guarded.state.delete_node("", peer.node_id)
    with peer.stub() as stub:
        for _ in range(2):
            with pytest.raises(grpc.RpcError) as caught:
                _beat(stub, peer)
            assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED


def test_a_stranger_is_told_that_its_key_is_not_registered(guarded: Fleet) -> None:
    """And not, as Flower says, that the node cannot be activated: so it is of a key in use, too."""
    with pytest.raises(grpc.RpcError) as caught:
        guarded.activate(guarded.stranger())
    assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
    assert caught.value.details() == "a key that is not registered"


def test_a_database_that_is_busy_makes_nobody_give_up(
    guarded: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower's nodes try again after UNAVAILABLE, and give up after what Flower says: INTERNAL."""
    peer = guarded.node()

    def locked(*_: object, **__: object) -> None:
        raise OperationalError("UPDATE node", {}, Exception("database is locked"))

    monkeypatch.setattr(guarded.state, "acknowledge_node_heartbeat", locked)
    with peer.stub() as stub, pytest.raises(grpc.RpcError) as caught:
        _beat(stub, peer)
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert guarded.refused(peer) == {}


def _beat(stub: FleetStub, peer: Peer) -> None:
    """A heartbeat that is answered at once."""
    request = SendNodeHeartbeatRequest(node=Node(node_id=peer.node_id), heartbeat_interval=60.0)
    stub.SendNodeHeartbeat(request, timeout=PROMPT_SECONDS)


def _beats(peer: Peer) -> bool:
    with peer.stub() as stub:
        try:
            _beat(stub, peer)
        except grpc.RpcError:
            return False
    return True
