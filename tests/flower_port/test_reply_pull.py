"""What a reply may weigh and how long it may take, against a SuperLink's stub in memory."""

import resource
import time
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import flwr.superlink.grid
import grpc
import httpx
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.proto.message_pb2 import ObjectTree, PullObjectResponse
from flwr.proto.runtime_pb2 import PullAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)

from blackthorn.flower_port import versions
from blackthorn.flower_port.grids import adapter_of
from blackthorn.flower_port.pulling import Allowance, ReplyRefused
from blackthorn.flower_port.transports import Polling, PullingTransport
from blackthorn.flower_port.versions import is_one_of

LONG = 60.0


class Stub:
    """A SuperLink that has one reply; `available` says which of its objects are uploaded."""

    def __init__(
        self,
        tree: ObjectTree | None,
        contents: dict[str, bytes],
        available: Callable[[str], bool] = lambda _: True,
    ) -> None:
        self.tree, self.contents, self.available = tree, contents, available
        self.pulled: list[str] = []
        self.confirmed: list[str] = []

    def PullMessages(self, _: Any) -> PullAppMessagesResponse:
        trees: Iterable[ObjectTree] = [] if self.tree is None else [self.tree]
        return PullAppMessagesResponse(message_object_trees=trees)

    def PullObject(self, request: Any) -> PullObjectResponse:
        self.pulled.append(request.object_id)
        if request.object_id not in self.contents:
            return PullObjectResponse(object_found=False)
        if not self.available(request.object_id):
            return PullObjectResponse(object_found=True, object_available=False)
        content = self.contents[request.object_id]
        return PullObjectResponse(object_found=True, object_available=True, object_content=content)

    def ConfirmMessageReceived(self, request: Any) -> None:
        self.confirmed.append(request.message_object_id)


GRPC = is_one_of(versions.GRPC)
FlowersGrid: Any = vars(flwr.superlink.grid)["GrpcGrid" if GRPC else "HttpGrid"]


class Link(FlowersGrid):
    """The installed Flower's own grid, on the stub; what is pushed gets the id "asked"."""

    def __init__(self, stub: Stub) -> None:
        super().__init__(token="t")
        self._run: Any = SimpleNamespace(run_id=1)
        # It is connected.
        if GRPC:
            self._channel, self._grpc_stub = object(), stub
        else:
            self._client = stub

    @property
    def run(self) -> Any:
        return self._run

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        return ["asked" for _ in messages]


def order(size: int, group: str = "3") -> Message:
    arrays = ArrayRecord({"w": Array(np.zeros(size, dtype=np.float32))})
    message = Message(RecordDict({"arrays": arrays}), 7, "train", group_id=group)
    message.metadata.__dict__["_message_id"] = "asked"
    return message


def reply_to(message: Message, size: int) -> Message:
    numbers = np.random.default_rng(0).normal(size=size).astype(np.float32)
    metrics = MetricRecord({"num-examples": 7})
    arrays = ArrayRecord({"w": Array(numbers)})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


def link_with(reply: Message, **options: Any) -> tuple[Link, Stub]:
    with no_object_id_recompute():
        tree, objects = get_object_tree(reply), get_all_nested_objects(reply)
        contents = {object_id: each.deflate() for object_id, each in objects.items()}
    stub = Stub(tree, contents, **options)
    return Link(stub), stub


def pull(link: Link, message: Message, seconds: float = LONG) -> Message | None:
    allowance = Allowance.for_reply_to(message)
    return adapter_of(link).pull("asked", allowance, time.monotonic() + seconds)


@pytest.mark.parametrize("size", [3, 2_000_000, 20_000_000])
def test_an_honest_reply_passes_whole(size: int) -> None:
    message = order(size)
    sent = reply_to(message, size)
    link, stub = link_with(sent)
    received = pull(link, message)
    assert received is not None
    assert received.content == sent.content
    assert received.metadata.reply_to_message_id == "asked"
    assert stub.tree is not None
    assert stub.confirmed == [stub.tree.object_id] == [received.metadata.message_id]


def test_before_there_is_a_reply_nothing_is_pulled() -> None:
    link = Link(Stub(None, {}))
    assert pull(link, order(3)) is None


def test_a_reply_of_too_many_parts_is_not_downloaded_and_forgotten() -> None:
    message = order(3)
    records = {f"m{i}": MetricRecord({"x": i}) for i in range(1000)}
    link, stub = link_with(Message(RecordDict(dict(records)), reply_to=message))
    with pytest.raises(ReplyRefused, match="parts, expected at most"):
        pull(link, message)
    # The message, and its content, which lists them.
    assert len(stub.pulled) == 2
    assert len(stub.confirmed) == 1


def test_what_a_reply_consists_of_is_read_in_it_and_not_in_the_announcement() -> None:
    """Who announces an equal object first says what the link takes for its parts."""
    message = order(3)
    sent = reply_to(message, 3)
    link, stub = link_with(sent)
    assert stub.tree is not None
    for part in stub.tree.children:
        part.children.add(object_id="a part that is nowhere")
    del stub.tree.children[1:]
    received = pull(link, message)
    assert received is not None
    assert received.content == sent.content


def test_chunks_that_repeat_are_counted_before_they_are_put_together() -> None:
    """Half a megabyte that lists its one chunk a thousand times would have 500 MB."""
    message = order(3)
    link, stub = link_with(reply_to(message, 125_000))
    for object_id, content in list(stub.contents.items()):
        if content.startswith(b"Array "):
            repeated = content.replace(
                b'"arraychunk_ids": [0]', b'"arraychunk_ids": [%s0]' % (b"0," * 999)
            )
            head, _, body = repeated.partition(b"\x00")
            words = head.rsplit(b" ", 1)[0]
            stub.contents[object_id] = words + b" %d\x00" % len(body) + body
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ReplyRefused, match="one lists 1000 chunks and has 1"):
        pull(link, message)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before  # KiB
    assert grown < 100 * 1024
    assert len(stub.confirmed) == 1


def test_a_reply_that_weighs_too_much_is_refused_in_mid_download() -> None:
    message = order(3)
    link, stub = link_with(reply_to(message, 10_000_000))  # in eight chunks
    with pytest.raises(ReplyRefused, match="more than the 1048"):
        pull(link, message)
    chunks = [each for each in stub.pulled if stub.contents[each].startswith(b"ArrayChunk")]
    assert len(chunks) == 1
    assert len(stub.confirmed) == 1


def test_an_unfinished_upload_is_waited_for_until_the_deadline_and_forgotten() -> None:
    message = order(3)
    link, stub = link_with(reply_to(message, 3), available=lambda _: False)
    began = time.monotonic()
    with pytest.raises(ReplyRefused, match="announced, but not uploaded"):
        pull(link, message, seconds=0.3)
    assert 0.3 <= time.monotonic() - began < LONG / 2
    assert len(stub.confirmed) == 1


def test_a_part_that_is_uploaded_later_is_taken() -> None:
    message = order(3)
    looks: list[str] = []

    def at_the_fourth_look(object_id: str) -> bool:
        looks.append(object_id)
        return len(looks) > 3

    link, _ = link_with(reply_to(message, 3), available=at_the_fourth_look)
    assert pull(link, message) is not None
    assert len(looks) > 4


def test_a_reply_with_a_part_that_is_gone_is_refused() -> None:
    message = order(3)
    link, stub = link_with(reply_to(message, 3))
    stub.contents.clear()
    with pytest.raises(ReplyRefused, match="a part of the reply is gone"):
        pull(link, message)
    assert len(stub.confirmed) == 1


def test_what_is_no_message_is_refused() -> None:
    message = order(3)
    record = MetricRecord({"num-examples": 7})
    stub = Stub(ObjectTree(object_id=record.object_id), {record.object_id: record.deflate()})
    with pytest.raises(ReplyRefused, match="the reply is a MetricRecord"):
        pull(Link(stub), message)


def delivered(reply: Message, message: Message, **options: Any) -> Any:
    link, _ = link_with(reply, **options)
    seconds = 0.5 if options else LONG
    (delivery,) = PullingTransport(link).exchange([message], [4], seconds)
    return delivery


def test_the_round_gets_the_reply_or_the_reason() -> None:
    message = order(3)
    assert delivered(reply_to(message, 3), message).message is not None
    assert "more than the" in delivered(reply_to(message, 10_000_000), message).problem
    unfinished = delivered(reply_to(message, 3), message, available=lambda _: False)
    assert unfinished.problem == "the reply was announced, but not uploaded by the deadline"


def test_an_old_reply_and_one_for_another_round_are_refused() -> None:
    message, earlier = order(3), order(3, group="2")
    earlier.metadata.__dict__["_message_id"] = "asked before"
    assert "answers another message" in delivered(reply_to(earlier, 3), message).problem
    forged = reply_to(message, 3)
    forged.metadata.__dict__["_group_id"] = "99"
    assert delivered(forged, message).problem == "the reply is for round '99', expected '3'"


def test_who_is_behind_a_superlink_has_others_beside_him() -> None:
    assert not PullingTransport(Link(Stub(None, {}))).is_closed


class Restarting(Stub):
    """A SuperLink whose first answer is that the connection breaks."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.breaks = [grpc.RpcError() if GRPC else httpx.ConnectError("refused")]

    def PullMessages(self, request: Any) -> PullAppMessagesResponse:
        if self.breaks:
            raise self.breaks.pop()
        return super().PullMessages(request)


def test_a_reply_is_waited_for_while_the_superlink_restarts() -> None:
    message = order(3)
    sent = reply_to(message, 3)
    _, stub = link_with(sent)
    restarting = Restarting(stub.tree, stub.contents)
    transport = PullingTransport(Link(restarting), Polling(reply=0.002))
    (delivery,) = transport.exchange([message], [7], LONG)
    assert delivery.message is not None, delivery.problem
    assert delivery.message.content == sent.content
    assert restarting.breaks == []
