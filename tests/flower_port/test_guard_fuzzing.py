"""Requests that nobody would think of, through the guard to Flower's real Fleet API.

BLACKTHORN_FUZZ_SECONDS says for how long (60): nothing may raise, stall or leak.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import hypothesis
import pytest
from fleet_server import Fleet, fleet
from flwr.proto import fab_pb2, fleet_pb2, heartbeat_pb2, message_pb2, run_pb2
from flwr.proto.node_pb2 import Node
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

from blackthorn.attacks.rogue.server_attacks import Peer
from blackthorn.flower_port.guard.limits import Limits

pytestmark = pytest.mark.slow

SECONDS = float(os.environ.get("BLACKTHORN_FUZZ_SECONDS", "60"))
EXAMPLES = 200
# Kinds of refusals that are reached in any long enough time.
CHECKS = {"shape", "source", "object", "object tree"}
MOST_SECONDS_MORE = 300.0
PROMPT_SECONDS = 20.0
MOST_GROWTH = 200 * 2**20
REQUESTS: dict[str, type[Message]] = {
    "RegisterNode": fleet_pb2.RegisterNodeFleetRequest,
    "ActivateNode": fleet_pb2.ActivateNodeRequest,
    "DeactivateNode": fleet_pb2.DeactivateNodeRequest,
    "UnregisterNode": fleet_pb2.UnregisterNodeFleetRequest,
    "PullMessages": fleet_pb2.PullMessagesRequest,
    "PushMessages": fleet_pb2.PushMessagesRequest,
    "SendNodeHeartbeat": heartbeat_pb2.SendNodeHeartbeatRequest,
    "GetRun": run_pb2.GetRunRequest,
    "GetFab": fab_pb2.GetFabRequest,
    "PushObject": message_pb2.PushObjectRequest,
    "PullObject": message_pb2.PullObjectRequest,
    "ConfirmMessageReceived": message_pb2.ConfirmMessageReceivedRequest,
}
# The announcements have most to be checked. (Who unregisters has no more to say.)
METHODS = [*(m for m in REQUESTS if m != "UnregisterNode"), *8 * ["PushMessages"]]
# What a request that is wrong may be told. INTERNAL and UNKNOWN would be exceptions that nobody
# foresaw.
ANSWERS = {
    *(grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED),
    *(grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION),
    *(grpc.StatusCode.NOT_FOUND, grpc.StatusCode.ALREADY_EXISTS),
    *(grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE),
}


@pytest.fixture(scope="module", params=["sqlite", "memory"])
def guarded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fuzzed")
    database = None if request.param == "sqlite" else ":flwr-in-memory:"
    limits = Limits(offences=10**9, key_connections_a_minute=10**6)
    with fleet(folder, database=database, tls=False, limits=limits) as one:
        yield one


def messages(descriptor: Any, known: dict[str, list[Any]], depth: int = 0) -> st.SearchStrategy:
    """Protobufs of a kind: fields left out, of known values, or of any."""
    made = {
        field.name: st.none() | values(field, known, depth)
        for field in descriptor.fields
        if depth < 6 or field.type != FieldDescriptor.TYPE_MESSAGE
    }
    return st.fixed_dictionaries(made).map(
        lambda found: {name: value for name, value in found.items() if value is not None}
    )


def values(field: Any, known: dict[str, list[Any]], depth: int) -> st.SearchStrategy:
    one: st.SearchStrategy
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        if field.message_type.GetOptions().map_entry or "Record" in field.message_type.name:
            return st.none()
        one = messages(field.message_type, known, depth + 1)
    elif field.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
        one = st.floats(width=32)
    elif field.type == FieldDescriptor.TYPE_STRING:
        one = st.sampled_from(known["text"]) | st.text(max_size=80)
    elif field.type == FieldDescriptor.TYPE_BYTES:
        one = st.sampled_from(known["bytes"]) | st.binary(max_size=2000)
    elif field.type == FieldDescriptor.TYPE_BOOL:
        one = st.booleans()
    elif field.type == FieldDescriptor.TYPE_UINT64:
        one = st.sampled_from(known["number"]) | st.integers(0, 2**64 - 1)
    else:
        one = st.sampled_from([0, 1, 2]) | st.integers(-(2**31), 2**31 - 1)
    return st.lists(one, max_size=4) if field.is_repeated else one


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def call(stub: Any, method: str, request: Any) -> None:
    """The answer comes in time, and is one that a wrong request may get."""
    try:
        getattr(stub, method)(request, timeout=PROMPT_SECONDS)
    except grpc.RpcError as error:
        assert error.code() in ANSWERS, (method, request, error)


def test_nothing_raises_stalls_or_leaks(guarded: Fleet) -> None:
    honest, rogue, victim = guarded.node(), guarded.node(), guarded.node()
    grown_from = 0
    began = time.monotonic()
    turns = 0

    def over() -> bool:
        """On a busy machine fewer requests fit into the time, and it goes on for some more."""
        seconds = time.monotonic() - began
        seen = guarded.refused(rogue).keys() >= CHECKS or seconds > SECONDS / 2 + MOST_SECONDS_MORE
        return seconds > SECONDS / 2 and seen

    with rogue.stub() as stub, honest.stub() as honest_stub:
        while not over():
            turns += 1
            asked = guarded.send(rogue)
            others = guarded.send(victim)
            guarded.pull(rogue, stub)
            _fuzz(stub, _known(guarded, rogue, victim, [asked, others]), turns)
            beat = heartbeat_pb2.SendNodeHeartbeatRequest(
                node=Node(node_id=honest.node_id), heartbeat_interval=60.0
            )
            assert honest_stub.SendNodeHeartbeat(beat, timeout=PROMPT_SECONDS).success
            # The first turns fill what the guard and Flower remember.
            grown_from = grown_from or (resident() if turns == 2 else 0)
    assert turns
    assert not grown_from or resident() - grown_from < MOST_GROWTH
    # What was refused was refused by every kind of check that a message can meet.
    assert guarded.refused(rogue).keys() >= CHECKS
    # The victim, of whom the rogue knew all but the private key, answers as ever.
    guarded.answer(victim)
    # (Nothing of it was refused: it has done nothing.)
    assert guarded.refused(victim) == {}


def _known(guarded: Fleet, rogue: Peer, victim: Peer, asked: list[str]) -> dict[str, list[Any]]:
    return {
        "text": [*asked, "train", "1", "a" * 64, "b" * 64, "/", "x" * 300],
        "bytes": [rogue.public_key(), victim.public_key(), b"", b"Array  2\x00{}", b"\x00" * 5000],
        "number": [0, 1, rogue.node_id, victim.node_id, guarded.run_id, 2**63, 2**64 - 1],
    }


def _fuzz(stub: Any, known: dict[str, list[Any]], turn: int) -> None:
    @hypothesis.seed(time.time_ns() + turn)
    @hypothesis.settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(data=st.data(), method=st.sampled_from(METHODS))
    def run(data: st.DataObject, method: str) -> None:
        kind = REQUESTS[method]
        made = data.draw(messages(kind.DESCRIPTOR, known))
        if "node" in kind.DESCRIPTOR.fields_by_name:
            # All others are refused for that alone.
            made["node"] = {"node_id": known["number"][2]}
        if method == "PushMessages":
            _make_likely(data, made, known)
        call(stub, method, kind(**made))

    run()


def _make_likely(data: st.DataObject, made: dict[str, Any], known: dict[str, list[Any]]) -> None:
    """Mend most of an announcement, so that the checks behind the first are reached."""
    tree = (made.get("message_object_trees") or [{}])[0]
    message = (made.get("messages_list") or [{}])[0]
    right = {
        "src_node_id": known["number"][2],
        "dst_node_id": 1,
        "message_id": tree.setdefault("object_id", "a" * 64),
        "reply_to_message_id": data.draw(st.sampled_from(known["text"][:2])),
        "run_id": known["number"][4],
        "ttl": 1.0,
        "created_at": 1.0,
        "message_type": "train",
        "group_id": "1",
    }
    wrong = data.draw(st.sets(st.sampled_from(sorted(right)), max_size=1))
    mended = {name: value for name, value in right.items() if name not in wrong}
    message["metadata"] = {**message.get("metadata", {}), **mended}
    message.pop("error", None)
    message["content"] = {}
    made["message_object_trees"], made["messages_list"] = [tree], [message]
    made["clientapp_runtime_list"] = []


def test_bytes_that_are_no_request_get_a_known_status(guarded: Fleet) -> None:
    rogue = guarded.node()
    with rogue.channel() as channel:

        @hypothesis.settings(max_examples=EXAMPLES, deadline=None, database=None)
        @hypothesis.given(method=st.sampled_from(sorted(REQUESTS)), body=st.binary(max_size=4000))
        def run(method: str, body: bytes) -> None:
            try:
                channel.unary_unary(f"/flwr.proto.Fleet/{method}")(body, timeout=PROMPT_SECONDS)
            except grpc.RpcError as error:
                assert error.code() in ANSWERS, (method, body, error)

        run()
    assert guarded.refused(rogue)["shape"] > 10
