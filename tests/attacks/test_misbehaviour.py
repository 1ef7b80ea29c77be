"""Lying replies: each lies in the way it says and in no other, and can be sent by Flower."""

import io
import os
import time

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Error, Message, MetricRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from blackthorn import attacks
from blackthorn.attacks import ReplyAttack, misbehaviour

ANSWERING = [name for name in attacks.names("reply") if name not in ("raise", "slow", "exit")]


def honest_reply() -> Message:
    """The answer of a client with a small model and a counter."""
    order = Message(RecordDict(), dst_node_id=7, message_type="train")
    arrays = {
        "weight": Array(np.arange(6, dtype=np.float32).reshape(2, 3)),
        "bias": Array(np.ones(2, dtype=np.float64)),
        "steps": Array(np.array(5)),
    }
    metrics = MetricRecord({"num-examples": 12, "loss": 0.5})
    content = RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics})
    return Message(content, reply_to=order)


def reply_attack(name: str) -> ReplyAttack:
    attack = attacks.get(name)
    assert isinstance(attack, ReplyAttack)
    return attack


def lie(name: str) -> Message:
    return reply_attack(name)(honest_reply())


def arrays_of(reply: Message) -> ArrayRecord:
    return reply.content.array_records["arrays"]


@pytest.mark.parametrize(("name", "value"), [("nan", np.nan), ("infinite", np.inf), ("huge", 1e25)])
def test_bad_values_are_in_every_floating_array_and_in_no_other(name: str, value: float) -> None:
    arrays = arrays_of(lie(name))
    for key, shape, dtype in [("weight", (2, 3), "float32"), ("bias", (2,), "float64")]:
        assert arrays[key].numpy().dtype == dtype
        np.testing.assert_array_equal(arrays[key].numpy(), np.full(shape, value, dtype=dtype))
    assert arrays["steps"].numpy() == 5


def test_wrong_shape_has_a_true_header() -> None:
    array = arrays_of(lie("wrong-shape"))["weight"]
    assert array.numpy().shape == tuple(array.shape) == (7,)


def test_wrong_dtype_has_a_true_header() -> None:
    array = arrays_of(lie("wrong-dtype"))["weight"]
    assert array.numpy().dtype == np.dtype(array.dtype) == np.complex64
    assert array.numpy().shape == (2, 3)


def test_each_lie_leaves_out_or_adds_the_key_or_record_it_is_named_by() -> None:
    assert list(arrays_of(lie("missing-key"))) == ["weight", "bias"]
    assert list(arrays_of(lie("extra-key"))) == ["weight", "bias", "steps", "extra"]
    assert list(arrays_of(lie("empty-arrays"))) == []
    assert list(lie("empty-record").content) == []


def test_lying_header_promises_the_right_shape() -> None:
    array = arrays_of(lie("lying-header"))["weight"]
    assert (tuple(array.shape), array.dtype) == ((2, 3), "float32")
    assert array.numpy().shape == (7,)


def test_lying_payload_announces_what_no_machine_holds() -> None:
    array = arrays_of(lie("lying-payload"))["weight"]
    assert (tuple(array.shape), array.dtype) == ((2, 3), "float32")
    assert len(array.data) < 200
    with pytest.raises((MemoryError, ValueError)):
        array.numpy()


def test_object_array_is_read_by_nobody_who_refuses_pickles() -> None:
    array = arrays_of(lie("object-array"))["weight"]
    assert (tuple(array.shape), array.dtype) == ((2, 3), "float32")
    with pytest.raises(ValueError, match="allow_pickle=False"):
        array.numpy()
    pickled = np.load(io.BytesIO(array.data), allow_pickle=True)
    assert (pickled.dtype, pickled.shape) == (np.dtype(object), (2, 3))


def test_garbage_is_no_array() -> None:
    for key, array in arrays_of(lie("garbage")).items():
        assert array.shape == arrays_of(honest_reply())[key].shape
        with pytest.raises(ValueError, match="pickled"):
            array.numpy()


def test_huge_count_changes_the_count_alone() -> None:
    reply = lie("huge-count")
    assert dict(reply.content.metric_records["metrics"]) == {"num-examples": 1e30, "loss": 0.5}
    assert arrays_of(reply) == arrays_of(honest_reply())


def test_a_count_is_claimed_even_where_none_was_reported() -> None:
    reply = honest_reply()
    del reply.content["metrics"]
    claimed = reply_attack("huge-count")(reply).content.metric_records["metrics"]
    assert claimed["num-examples"] == 1e30


@pytest.mark.parametrize("name", ANSWERING)
def test_the_honest_reply_stays_and_only_the_record_lied_about_changes(name: str) -> None:
    reply, untouched = honest_reply(), honest_reply()
    forged = reply_attack(name)(reply)
    assert reply.content == untouched.content
    assert forged.content != untouched.content
    assert forged.metadata == reply.metadata
    if name not in ("huge-count", "empty-record"):
        assert forged.content["metrics"] == untouched.content["metrics"]


@pytest.mark.parametrize("name", ANSWERING)
def test_flower_can_send_the_lie(name: str) -> None:
    assert all(get_all_nested_objects(lie(name)))


@pytest.mark.parametrize("name", ANSWERING)
def test_an_error_is_passed_on(name: str) -> None:
    order = Message(RecordDict(), dst_node_id=7, message_type="train")
    reply = Message(Error(2, "no data"), reply_to=order)
    assert reply_attack(name)(reply).error == Error(2, "no data")


def test_raise_refuses_to_answer() -> None:
    with pytest.raises(RuntimeError, match="refuses to answer"):
        lie("raise")


def test_slow_sleeps_as_long_as_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    reply = honest_reply()
    began = time.monotonic()
    assert misbehaviour.slow(reply, seconds=0.1) is reply
    assert 0.1 <= time.monotonic() - began < 5
    monkeypatch.setenv("BLACKTHORN_ATTACK_SECONDS", "0.2")
    began = time.monotonic()
    assert reply_attack("slow")(reply) is reply
    assert 0.2 <= time.monotonic() - began < 5


def test_exit_ends_the_process_without_a_word() -> None:
    child = os.fork()
    if child == 0:
        try:
            reply_attack("exit")(honest_reply())
        finally:  # reached only if the process has not ended by then
            os._exit(9)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 1
