"""The guard and Flower's store: what is left of a message after a restart, and whose word counts
for objects that are not there yet."""

import time
from pathlib import Path

import grpc
import pytest
from fleet_server import MEMORY, answer_to, fleet
from flwr.common.constant import SubStatus
from flwr.common.serde import message_from_proto
from flwr.proto import fleet_pb2, message_pb2
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import get_object_tree, iterate_object_tree

from blackthorn.attacks.rogue.server_attacks import Peer, object_id, push
from blackthorn.flower_port.guard.object_trees import announced_by_a_serverapp


def test_an_answer_to_a_message_that_was_not_pulled_is_refused(tmp_path: Path) -> None:
    """How many objects it may have is known of those that were, but after a restart."""
    with fleet(tmp_path, tls=False) as one:
        node = one.node()
        message = one.send(node)
        head = message_pb2.Metadata(message_id=message, run_id=one.run_id, message_type="train")
        node.order = head
        tree = message_pb2.ObjectTree(object_id=object_id(3))
        assert "that it was not given" in push(node, tree)
        one.pull(node)
        assert "taken" in push(node, tree)


def test_a_late_answer_is_refused_and_no_offence(tmp_path: Path) -> None:
    """A SuperNode's answer has what is left of its message's time, which then is less than none."""
    with fleet(tmp_path, tls=False) as one:
        node = one.node()
        one.send(node)
        order = message_from_proto(one.pull(node))
        order.metadata.ttl = 1e-3
        order.metadata.created_at = time.time() - 1.0
        answer, tree, _ = answer_to(order)
        assert answer.metadata.ttl < 0
        assert "after the time that its message had" in push(node, tree, answer.metadata)
        assert one.records is not None
        (refusal,) = one.records.refusals()
        assert refusal["kind"] == "late answer"


def test_a_server_that_was_restarted_takes_nobody_for_connected(tmp_path: Path) -> None:
    """Who was there when it went down may have gone down with it."""
    with fleet(tmp_path, tls=False) as before:
        lives, was_killed = before.node(), before.node()
        assert before.state.get_nodes(before.run_id) == {lives.node_id, was_killed.node_id}
        before.send(lives)
    with fleet(tmp_path, tls=False) as after:
        assert after.state.get_nodes(before.run_id) == set()
        lives.address = was_killed.address = after.address
        # It has not noticed anything: what was sent to it is there still.
        assert after.pull(lives).metadata.message_id == before.sent[0]
        assert after.state.get_nodes(before.run_id) == {lives.node_id}
        # A node that is started again is not told that it is connected already.
        after.activate(was_killed)
        assert after.state.get_nodes(before.run_id) == {lives.node_id, was_killed.node_id}


def test_a_message_under_way_waits_for_its_node_over_a_restart(tmp_path: Path) -> None:
    with fleet(tmp_path, tls=False) as before:
        node = before.node()
        message = before.send(node)
    with fleet(tmp_path, tls=False) as after:
        assert after.state.get_message_res({message}) == []
        node.address, after.run_id = after.address, before.run_id
        after.answer(node)
        (reply,) = after.state.get_message_res({message})
        assert not reply.has_error()


def gone_message(folder: Path, gone: str) -> tuple[Peer, int, message_pb2.ObjectTree]:
    """Who pulled a message that is not there any more, nor (or) its run; the run, the message."""
    with fleet(folder, tls=False) as before:
        node = before.node()
        before.send(node)
        with node.stub() as stub:
            request = fleet_pb2.PullMessagesRequest(node=Node(node_id=node.node_id))
            (tree,) = stub.PullMessages(request, timeout=20).message_object_trees
        if gone == "message":
            before.state.cleanup_run(before.run_id)
        else:
            (task,) = before.state.get_tasks(run_ids=[before.run_id])
            assert before.state.finish_task(task.task_id, SubStatus.STOPPED, "")
        return node, before.run_id, tree


@pytest.mark.parametrize("gone", ["message", "run"])
def test_a_node_lets_go_of_a_message_whose_rest_is_not_there(tmp_path: Path, gone: str) -> None:
    """Told so as Flower does, it would answer what it has, and be a message late from then on."""
    node, run_id, tree = gone_message(tmp_path, gone)
    with fleet(tmp_path, tls=False) as after:
        node.address = after.address
        request = message_pb2.PullObjectRequest(
            node=Node(node_id=node.node_id), run_id=run_id, object_id=tree.children[0].object_id
        )
        with node.stub() as stub, pytest.raises(grpc.RpcError) as caught:
            stub.PullObject(request, timeout=20)
    assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize("gone", ["message", "run"])
def test_a_node_that_has_the_whole_of_a_message_keeps_it_although_it_is_not_there(
    tmp_path: Path, gone: str
) -> None:
    """Its answer may be made by then: forgetting the message alone, it would send that answer as
    the next message's."""
    node, run_id, tree = gone_message(tmp_path, gone)
    with fleet(tmp_path, tls=False) as after:
        node.address = after.address
        request = message_pb2.ConfirmMessageReceivedRequest(
            node=Node(node_id=node.node_id), run_id=run_id, message_object_id=tree.object_id
        )
        with node.stub() as stub:
            stub.ConfirmMessageReceived(request, timeout=20)
        assert after.refused(node) == {}


@pytest.mark.parametrize("database", [None, MEMORY], ids=["sqlite", "memory"])
def test_who_announces_another_node_s_objects_with_other_parts_holds_up_nobody(
    tmp_path: Path, database: str | None
) -> None:
    with fleet(tmp_path, database=database, tls=False) as one:
        honest, rogue = one.node(), one.node()
        one.send(rogue)
        foresee(rogue, answer_to(message_from_proto(one.pull(rogue)))[1])
        one.send(honest)
        one.answer(honest)
        assert one.refused(honest) == {}


@pytest.mark.parametrize("database", [None, MEMORY], ids=["sqlite", "memory"])
@pytest.mark.parametrize("uploads", [False, True])
def test_who_announces_a_serverapp_s_objects_with_other_parts_changes_nothing(
    tmp_path: Path, database: str | None, uploads: bool
) -> None:
    """Nor two, of whom the second announces and uploads what is true."""
    with fleet(tmp_path, database=database, tls=False) as one:
        honest, rogue, second = one.node(), one.node(), one.node()
        one.send(rogue)
        one.pull(rogue)
        one.send(second)
        content = one.content()
        foresee(rogue, get_object_tree(content))
        if uploads:
            one.answer(second, content=content)
        with announced_by_a_serverapp():
            one.send(honest)
        with honest.stub() as stub:
            request = fleet_pb2.PullMessagesRequest(node=Node(node_id=honest.node_id))
            (tree,) = stub.PullMessages(request, timeout=20).message_object_trees
        foreseen = get_object_tree(content)
        assert parts_of(foreseen) <= parts_of(tree)
        assert len(parts_of(tree)) == len(parts_of(foreseen)) + 1


@pytest.mark.parametrize("database", [None, MEMORY], ids=["sqlite", "memory"])
def test_an_announcement_tells_nobody_what_others_have_stored(
    tmp_path: Path, database: str | None
) -> None:
    """Who guesses what another has sent is answered as who guesses wrong, up to its own upload."""
    with fleet(tmp_path, database=database, tls=False) as one:
        honest, spy = one.node(), one.node()
        said = []
        for guessed in (1000, 1001):
            one.send(honest)
            one.answer(honest)
            one.send(spy)
            _, tree, _ = answer_to(message_from_proto(one.pull(spy)), guessed)
            foresee(spy, tree)
            with spy.stub() as stub:
                (part, *_) = tree.children
                upload = message_pb2.PushObjectRequest(
                    node=Node(node_id=spy.node_id),
                    run_id=one.run_id,
                    object_id=part.object_id,
                    object_content=b"Array  0\x00",
                )
                with pytest.raises(grpc.RpcError) as caught:
                    stub.PushObject(upload, timeout=20)
            said.append(caught.value.details())
        assert said[0] == said[1]
        assert one.refused(spy) == {"object tree": 2}


def foresee(peer: Peer, tree: message_pb2.ObjectTree) -> None:
    """Announce every object of the tree as having one part that is nowhere."""
    root = message_pb2.ObjectTree(object_id=object_id(int(tree.object_id[:8], 16)))
    for part in parts_of(tree):
        root.children.add(object_id=part[0]).children.add(object_id=object_id(77))
    assert "taken" in push(peer, root)


def parts_of(tree: message_pb2.ObjectTree) -> set[tuple[str, frozenset[str]]]:
    """Every object, and of which others it consists."""
    return {
        (part.object_id, frozenset(child.object_id for child in part.children))
        for part in iterate_object_tree(tree)
    }
