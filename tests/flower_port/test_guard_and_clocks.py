"""The guard in front of Flower's real Fleet API, and clients whose clocks are off."""

import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import grpc
import pytest
from fleet_server import Fleet, fleet
from flwr.client.grpc_rere_client.node_auth_client_interceptor import NodeAuthClientInterceptor
from flwr.proto import message_pb2
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.node_pb2 import Node
from flwr.server.superlink.fleet.grpc_rere import node_auth_server_interceptor
from flwr.supercore import date

from blackthorn.attacks.rogue.server_attacks import Peer
from blackthorn.flower_port.guard.clocks import AHEAD_HEADER, by_our_clock


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with pytest.MonkeyPatch.context() as patch:
        bound = node_auth_server_interceptor.MIN_TIMESTAMP_DIFF
        patch.setattr(node_auth_server_interceptor, "MIN_TIMESTAMP_DIFF", bound)
        with fleet(tmp_path_factory.mktemp("guarded")) as one:
            yield one


def shift(patch: pytest.MonkeyPatch, seconds: float) -> None:
    """The clock by which the clients of this process sign."""
    signing = sys.modules[NodeAuthClientInterceptor.__module__]
    patch.setattr(signing, "now", lambda: date.now() + timedelta(seconds=seconds))


def beat(peer: Peer) -> dict[str, str]:
    """A heartbeat; the head of its answer."""
    request = SendNodeHeartbeatRequest(node=Node(node_id=peer.node_id), heartbeat_interval=60.0)
    with peer.stub() as stub:
        method: Any = stub.SendNodeHeartbeat
        _, call = method.with_call(request, timeout=20)
    return dict(call.initial_metadata())


@pytest.mark.parametrize(("seconds", "said"), [(3600, "3600 s ahead of"), (-3600, "3600 s behind")])
def test_a_clock_that_is_minutes_off_is_named_to_the_client_and_under_its_key(
    guarded: Fleet, monkeypatch: pytest.MonkeyPatch, seconds: float, said: str
) -> None:
    peer = guarded.node()
    shift(monkeypatch, seconds)
    with pytest.raises(grpc.RpcError) as caught:
        beat(peer)
    assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
    told = f"a clock that is {said} the server's, where at most 305 s are taken: set it, by NTP"
    assert told in caught.value.details()
    assert guarded.refused(peer) == {"clock": 1}
    assert guarded.records is not None
    (refusal,) = [r for r in guarded.records.refusals() if told in r["last"]]
    assert refusal["key"] == guarded.records.name(peer.public_key())


def test_a_clock_that_is_seconds_ahead_is_let_in_and_both_sides_are_told(
    guarded: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    peer = guarded.node()
    assert AHEAD_HEADER not in beat(peer)
    shift(monkeypatch, 60)
    with caplog.at_level("WARNING", logger="flwr"):
        flower = sys.modules["flwr.common.logger"].FLOWER_LOGGER
        flower.addHandler(caplog.handler)
        try:
            heads = [beat(peer), beat(peer)]
        finally:
            flower.removeHandler(caplog.handler)
    assert [float(head[AHEAD_HEADER]) for head in heads] == pytest.approx([60, 60], abs=2)
    assert guarded.refused(peer) == {}
    said = {r.getMessage() for r in caplog.records if "the clock of" in r.getMessage()}
    assert len(said) == 1
    assert "s ahead of the server's: its operator should set it, by NTP" in said.pop()


# Messages of the fleet have 600 seconds.
@pytest.mark.parametrize("seconds", [-200, -30, 0, 30, 290, 700])
def test_an_answer_in_its_messages_time_counts_whatever_the_clients_clock_says(
    guarded: Fleet, seconds: float
) -> None:
    peer = guarded.node()
    guarded.send(peer)
    guarded.answer(peer, ahead=seconds)
    assert guarded.refused(peer) == {}


def test_an_answer_after_its_messages_time_is_late_by_every_clock() -> None:
    now = time.time()
    for created in (now - 100, now + 100):
        metadata = message_pb2.Metadata(created_at=created, ttl=now - 10 - created)
        by_our_clock(metadata)
        assert metadata.created_at + metadata.ttl == pytest.approx(now - 10)
        assert metadata.created_at <= time.time()
