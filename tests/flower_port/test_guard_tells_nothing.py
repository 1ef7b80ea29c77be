"""Behind the guard no node learns from Flower's real Fleet API what others were sent or answer."""

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from fleet_server import Fleet, answer_to, fleet
from flwr.common.serde import message_from_proto
from flwr.proto import fleet_pb2, message_pb2
from flwr.proto.node_pb2 import Node
from flwr.proto.run_pb2 import GetRunRequest

from blackthorn.attacks.rogue.server_attacks import (
    Peer,
)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with fleet(tmp_path_factory.mktemp("guarded")) as one:
        yield one


def pull_object(fleet: Fleet, peer: Peer, object_id: str) -> str:
    """What a node is told that asks for an object: its content has no word, a refusal has."""
    request = message_pb2.PullObjectRequest(
        node=Node(node_id=peer.node_id), run_id=fleet.run_id, object_id=object_id
    )
    with peer.stub() as stub:
        try:
            return f"found: {stub.PullObject(request, timeout=20).object_found}"
        except grpc.RpcError as refused:
            return str(refused.details())


def ids_of(fleet: Fleet, message_id: str) -> list[str]:
    waiting = [fleet.state.object_store.get_object_tree(message_id)]
    for part in waiting:
        waiting.extend(part.children)
    return [part.object_id for part in waiting]


def test_no_node_learns_what_another_was_sent(guarded: Fleet) -> None:
    """Ids are SHA-256 of contents that a client can guess: who finds one knows who takes part."""
    spy, victim = guarded.node(), guarded.node()
    own = ids_of(guarded, guarded.send(spy))
    guarded.pull(spy)
    sent = [one for one in ids_of(guarded, guarded.send(victim)) if one not in own]
    absent = "0" * 64
    told = {pull_object(guarded, spy, object_id) for object_id in [*sent, absent]}
    assert told == {"PullObject: an object of no message that this node is taking"}
    assert guarded.refused(spy) == {"other's object": len(sent) + 1}
    guarded.pull(victim)
    assert {pull_object(guarded, victim, object_id) for object_id in sent} == {"found: True"}


def test_what_a_node_has_confirmed_does_not_tell_who_else_has_not(guarded: Fleet) -> None:
    """A round's model is one object for all its clients, and goes with the last."""
    spy = guarded.node()
    own = ids_of(guarded, guarded.send(spy))
    message = guarded.pull(spy)
    assert {pull_object(guarded, spy, object_id) for object_id in own} == {"found: True"}
    request = message_pb2.ConfirmMessageReceivedRequest(
        node=Node(node_id=spy.node_id),
        run_id=guarded.run_id,
        message_object_id=message.metadata.message_id,
    )
    with spy.stub() as stub:
        stub.ConfirmMessageReceived(request, timeout=20)
    told = {pull_object(guarded, spy, object_id) for object_id in own}
    assert told == {"PullObject: an object of no message that this node is taking"}


def test_no_node_learns_what_another_has_answered(guarded: Fleet) -> None:
    """Flower asks for those objects of an answer alone that it has not."""
    victim, spy = guarded.node(), guarded.node()
    for peer in (victim, spy):
        guarded.send(peer)
    guarded.answer(victim)
    with spy.stub() as stub:
        order = message_from_proto(guarded.pull(spy, stub))
        head, tree, objects = answer_to(order)
        node = Node(node_id=spy.node_id)
        request = fleet_pb2.PushMessagesRequest(
            node=node, messages_list=[head], message_object_trees=[tree]
        )
        pushed = stub.PushMessages(request, timeout=20)
        assert set(pushed.objects_to_push) == set(objects)
        for object_id, content in objects.items():
            upload = message_pb2.PushObjectRequest(
                node=node,
                run_id=guarded.run_id,
                object_id=object_id,
                object_content=content.deflate(),
                session_id=pushed.session_id,
            )
            assert stub.PushObject(upload, timeout=20).stored
    (reply,) = guarded.state.get_message_res({order.metadata.message_id})
    assert not reply.has_error()
    assert guarded.refused(spy) == {}


def test_a_run_tells_no_node_what_the_others_have_sent_or_how_long_they_took(
    guarded: Fleet,
) -> None:
    """Every reply of another adds as many bytes: how many there were, round by round."""
    victim, spy = guarded.node(), guarded.node()
    guarded.send(victim)
    guarded.answer(victim)
    (run,) = guarded.state.get_run_info(run_ids=[guarded.run_id])
    assert run.bytes_sent > 0 and run.bytes_recv > 0
    with spy.stub() as stub:
        node = Node(node_id=spy.node_id)
        told = stub.GetRun(GetRunRequest(node=node, run_id=guarded.run_id), timeout=20).run
    assert told.run_id == guarded.run_id
    assert (told.bytes_sent, told.bytes_recv, told.clientapp_runtime) == (0, 0, 0)


def test_what_an_upload_is_told_does_not_tell_what_is_there(guarded: Fleet) -> None:
    """Another content than the id's is refused, whether or not the right one is there."""
    victim, spy = guarded.node(), guarded.node()
    for peer in (victim, spy):
        guarded.send(peer)
    guarded.answer(victim)
    told = set()
    with spy.stub() as stub:
        order = message_from_proto(guarded.pull(spy, stub))
        head, tree, objects = answer_to(order)
        node = Node(node_id=spy.node_id)
        request = fleet_pb2.PushMessagesRequest(
            node=node, messages_list=[head], message_object_trees=[tree]
        )
        pushed = stub.PushMessages(request, timeout=20)
        for object_id, content in objects.items():
            upload = message_pb2.PushObjectRequest(
                node=node,
                run_id=guarded.run_id,
                object_id=object_id,
                object_content=content.deflate() + b"x",
                session_id=pushed.session_id,
            )
            with pytest.raises(grpc.RpcError) as refused:
                stub.PushObject(upload, timeout=20)
            told.add(str(refused.value.details()))
    assert told == {"PushObject: an object that is not what its id says"}


def test_a_node_takes_the_rest_of_its_message_over_a_restart(tmp_path: Path) -> None:
    with fleet(tmp_path, tls=False) as before:
        node = before.node()
        own = ids_of(before, before.send(node))
        before.pull(node)
    with fleet(tmp_path, tls=False) as after:
        node.address, after.run_id = after.address, before.run_id
        assert {pull_object(after, node, object_id) for object_id in own} == {"found: True"}
        assert "no message" in pull_object(after, node, "0" * 64)
