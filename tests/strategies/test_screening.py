"""Bad replies of every kind: each is rejected with its reason, and nothing else happens."""

import io
import math
import struct
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict

from blackthorn.client_app.disclosure import PublicRefusal
from blackthorn.flower_port.transports import Delivery
from blackthorn.strategies.aggregation import rage
from blackthorn.strategies.array_codec import HeldArray
from blackthorn.strategies.global_model import GlobalModel
from blackthorn.strategies.screening import (
    MAX_UPDATE,
    RejectedReply,
    Screened,
    Screening,
    one_line,
    read_count,
    scalar_metrics,
    screen_reply,
)

WEIGHT = np.array([[1, 2, 3], [4, 5, 6]], dtype=np.float32)
LOCAL_LR = 0.5
State = dict[str, Any]


def global_model(dtype: str = "float32") -> GlobalModel:
    return GlobalModel.of(
        ArrayRecord(
            {
                "weight": Array(WEIGHT.astype(dtype)),
                "counter": Array(np.array(3, dtype=np.int64)),
                "bias": Array(np.zeros(2, dtype=np.float32)),
            }
        )
    )


def honest() -> State:
    return {
        "weight": Array(WEIGHT - 1),
        "counter": Array(np.array(99, dtype=np.int64)),
        "bias": Array(np.array([0.5, -0.5], dtype=np.float32)),
    }


def order() -> Message:
    return Message(RecordDict(), dst_node_id=7, message_type="train")


def reply(state: State | None = None, **metrics: Any) -> Message:
    arrays = ArrayRecord(honest() if state is None else state)
    record = MetricRecord({"num-examples": 5, **metrics})
    return Message(RecordDict({"a": arrays, "m": record}), reply_to=order())


def counting(value: Any) -> Message:
    content = RecordDict({"a": ArrayRecord(honest()), "m": MetricRecord({"num-examples": value})})
    return Message(content, reply_to=order())


def reason(message: Message, model: GlobalModel | None = None) -> str:
    with pytest.raises(RejectedReply) as caught:
        screen_reply(message, model or global_model(), LOCAL_LR)
    return str(caught.value)


def npy(header: bytes, body: bytes = b"\0" * 24, version: tuple[int, int] = (1, 0)) -> bytes:
    """An .npy file with any header at all."""
    length = struct.pack("<H" if version == (1, 0) else "<I", len(header) + 1)
    return b"\x93NUMPY" + bytes(version) + length + header + b"\n" + body


def header(shape: str = "(2, 3)", descr: str = "'<f4'", fortran: str = "False") -> bytes:
    return f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, }}".encode()


def payload(data: bytes) -> Message:
    """A reply whose weight has an honest-looking outer header over `data`."""
    lie = Array(dtype="float32", shape=(2, 3), stype="numpy.ndarray", data=data)
    return reply({**honest(), "weight": lie})


def test_an_honest_reply() -> None:
    contribution = screen_reply(reply(loss=0.25), global_model(), LOCAL_LR)
    # (w - w_i) / 0.5 over weight and bias; the counter is not part of it
    assert contribution.update.tolist() == [2, 2, 2, 2, 2, 2, -1, 1]
    assert contribution.update.dtype == torch.float32
    assert contribution.num_examples == 5
    assert contribution.metrics == {"loss": 0.25}


def test_screening_leaves_the_global_model_alone() -> None:
    model = global_model()
    contribution = screen_reply(reply(), model, LOCAL_LR)
    contribution.update.fill_(9)
    assert model.current.tolist() == [1, 2, 3, 4, 5, 6, 0, 0]


def test_without_metrics_there_is_no_count() -> None:
    message = Message(RecordDict({"a": ArrayRecord(honest())}), reply_to=order())
    assert screen_reply(message, global_model(), LOCAL_LR).num_examples is None


@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
def test_both_common_npy_versions_are_read(version: tuple[int, int]) -> None:
    stream = io.BytesIO()
    np.lib.format.write_array(stream, WEIGHT - 1, version=version)
    contribution = screen_reply(payload(stream.getvalue()), global_model(), LOCAL_LR)
    assert contribution.update.tolist()[:6] == [2] * 6


def test_fortran_order_is_read_right() -> None:
    local = np.asfortranarray(WEIGHT * 3)
    array = Array(local)
    assert b"'fortran_order': True" in array.data
    contribution = screen_reply(reply({**honest(), "weight": array}), global_model(), LOCAL_LR)
    assert contribution.update.tolist()[:6] == (-4 * WEIGHT).reshape(-1).tolist()


def test_the_order_of_the_entries_does_not_matter() -> None:
    state = dict(reversed(honest().items()))
    one, other = (screen_reply(reply(s), global_model(), LOCAL_LR) for s in (state, honest()))
    assert torch.equal(one.update, other.update)


def screened(delivery: Delivery) -> Screened:
    return Screening([delivery.client], global_model(), LOCAL_LR).result([delivery])


def test_an_error_reply() -> None:
    message = Message(Error(2, "no\ndata \x1b[2J here"), reply_to=order())
    assert reason(message).startswith("error 2: no")
    rejected = screened(Delivery(4, message)).rejected
    assert [(r.client, r.reason) for r in rejected] == [(4, "error 2: no data [2J here")]


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (
            PublicRefusal("the round would pass max-rounds = 2"),
            "PublicRefusal: the round would pass",
        ),
        (KeyError("x"), "KeyError: 'x'"),
        (ValueError(), "ValueError"),
        (RuntimeError("two\nlines"), "RuntimeError: two lines"),
        (type("Mine", (Exception,), {"__module__": "a.f.<locals>"})("b"), "Mine: b"),
    ],
)
def test_an_exception_is_shown_as_python_shows_it(error: Exception, shown: str) -> None:
    """Flower's ClientApp sends its class and its text in a form of its own."""
    form = str(type(error)) + ":<'" + str(error) + "'>"
    rejected = screened(Delivery(4, Message(Error(2, form), reply_to=order()))).rejected
    assert rejected[0].reason.startswith(f"error 2: {shown}")
    assert "class" not in rejected[0].reason
    plain = "see <class 'int'>:<'1'> there"
    assert reason(Message(Error(2, plain), reply_to=order())) == f"error 2: {plain}"


def test_an_error_without_a_reason() -> None:
    assert reason(Message(Error(8), reply_to=order())) == "error 8: no reason given"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({}, "0 array records"),
        ({"m": MetricRecord({"num-examples": 1})}, "0 array records"),
        ({"c": ConfigRecord({"a": 1})}, "0 array records"),
        ({"a": ArrayRecord()}, "missing entry 'weight' (3 missing)"),
        ({"a": ArrayRecord(honest()), "b": ArrayRecord(honest())}, "2 array records"),
        ({"a": ArrayRecord(honest()), "b": ArrayRecord()}, "2 array records"),
    ],
)
def test_missing_and_surplus_records(content: State, expected: str) -> None:
    assert expected in reason(Message(RecordDict(content), reply_to=order()))


def test_missing_and_extra_entries() -> None:
    state = honest()
    del state["bias"]
    assert reason(reply(state)) == "missing entry 'bias' (1 missing)"
    surplus = {**honest(), "x" * 1000: Array(np.ones(1))}
    assert reason(reply(surplus)) == f"unexpected entry '{'x' * 80}' (1 unexpected)"


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("weight", WEIGHT.T.copy(), "weight: shape (3, 2), expected (2, 3)"),
        ("weight", WEIGHT.reshape(-1), "weight: shape (6,), expected (2, 3)"),
        ("weight", WEIGHT[None], "weight: shape (1, 2, 3), expected (2, 3)"),
        ("weight", WEIGHT.astype(np.float64), "weight: dtype float64, expected float32"),
        ("weight", WEIGHT.astype(np.float16), "weight: dtype float16, expected float32"),
        ("weight", WEIGHT.astype(">f4"), "weight: dtype >f4, expected float32"),
        ("weight", WEIGHT.astype(np.int32), "weight: dtype int32, expected float32"),
        ("weight", WEIGHT.astype(np.complex64), "weight: dtype complex64, expected float32"),
        ("counter", np.array([99], dtype=np.int64), "counter: shape (1,), expected ()"),
        ("counter", np.array(99, dtype=np.int32), "counter: dtype int32, expected int64"),
        ("counter", np.array(99.0), "counter: dtype float64, expected int64"),
        ("bias", np.zeros((0,), dtype=np.float32), "bias: shape (0,), expected (2,)"),
    ],
)
def test_wrong_shapes_and_dtypes(name: str, value: np.ndarray, expected: str) -> None:
    assert reason(reply({**honest(), name: Array(value)})) == expected


def test_arrays_held_in_this_process_are_screened_as_others() -> None:
    honest_values = {name: array.numpy() for name, array in honest().items()}
    held = {name: HeldArray(value) for name, value in honest_values.items()}
    expected = screen_reply(reply(), global_model(), LOCAL_LR)
    assert torch.equal(screen_reply(reply(held), global_model(), LOCAL_LR).update, expected.update)
    for wrong in (WEIGHT.T, WEIGHT.astype(np.float64), np.full_like(WEIGHT, np.nan)):
        assert reason(reply({**held, "weight": HeldArray(wrong)})) == reason(
            reply({**held, "weight": Array(wrong)})
        )


def test_the_outer_header_is_not_believed() -> None:
    longer = Array(np.arange(7, dtype=np.float32))
    assert "shape (7,), expected (2, 3)" in reason(payload(longer.data))
    # The other way round: a false outer header over an honest payload does no harm.
    modest = Array(dtype="int8", shape=(1,), stype="numpy.ndarray", data=Array(WEIGHT - 1).data)
    contribution = screen_reply(reply({**honest(), "weight": modest}), global_model(), LOCAL_LR)
    assert contribution.update.tolist()[:6] == [2] * 6


@pytest.mark.parametrize("body", [b"", b"\0" * 23, b"\0" * 25, b"\0" * 48])
def test_the_payload_s_own_header_is_not_believed(body: bytes) -> None:
    expected = f"weight: {len(body)} bytes of data do not fit shape (2, 3)"
    assert reason(payload(npy(header(), body))) == expected


def test_an_announced_shape_is_never_allocated() -> None:
    message = payload(npy(header(shape=f"({2**40},)"), b"\0" * 16))
    tracemalloc.start()
    try:
        assert f"shape ({2**40},)" in reason(message)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x93NUMPY",
        b"\x93NUMPY\x01\x00",
        b"\x93NUMPY\x01\x00\xff\xff",
        b"no array at all",
        b"PK\x03\x04" + b"\0" * 60,
        npy(header(), version=(3, 0)),
        npy(header(), version=(9, 9)),
        npy(b" " * 5000 + header()),
        npy(b"\xff\xfe" + header()),
        npy(b"[1, 2]"),
        npy(b"{'descr': '<f4'}"),
        npy(b"{[]: 1}"),
        npy(b"__import__('os').getcwd()"),
        npy(header(fortran="'yes'")),
        npy(header(shape="[2, 3]")),
        npy(header(shape="(2, 'three')")),
        npy(header(descr="'|no'")),
        npy(header(descr="3")),
        npy(header(descr="'<f4\\0'")),
        npy(header(descr="[('a', '<f4'), ('a', '<f4')]")),
        # These raise IndexError, TokenError and RecursionError out of NumPy's reader.
        npy(header(descr="()")),
        npy(header(descr=f"{'(' * 150}'<f4'{',)' * 150}")),
        npy(b"{'descr': ("),
        npy(b"  {\n 'descr"),
        npy(b"-" * 3800 + b"1"),
    ],
)
def test_what_is_no_array(data: bytes) -> None:
    assert reason(payload(data)) == "weight: the payload is not a NumPy array"


def test_an_object_array_is_not_unpickled() -> None:
    stream = io.BytesIO()
    np.save(stream, np.array([[object()] * 3] * 2, dtype=object), allow_pickle=True)
    assert reason(payload(stream.getvalue())) == "weight: dtype object, expected float32"


@pytest.mark.parametrize(
    ("lie", "expected"),
    [
        (header(shape=f"(0x{'f' * 3900},)"), "weight: shape beyond all measure, expected (2, 3)"),
        (header(shape=f"({'1, ' * 1000})"), "weight: shape (1, 1, 1,"),
        (header(descr=str([(f"field{i}", "<f4") for i in range(150)])), "weight: dtype [('field0'"),
    ],
)
def test_reasons_stay_short_whatever_the_header_says(lie: bytes, expected: str) -> None:
    found = reason(payload(npy(lie)))
    assert found.startswith(expected)
    assert len(found) < 200


def test_an_unknown_serialisation() -> None:
    array = Array(dtype="float32", shape=(2, 3), stype="pickle" * 30, data=Array(WEIGHT).data)
    found = reason(reply({**honest(), "weight": array}))
    assert found.startswith("weight: unknown serialisation 'picklepickle")
    assert len(found) < 100


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [("weight", (1, 2)), ("bias", (0,))])
def test_values_that_are_not_finite(value: float, place: tuple[str, tuple[int, ...]]) -> None:
    name, index = place
    poisoned = honest()[name].numpy().copy()
    poisoned[index] = value
    found = reason(reply({**honest(), name: Array(poisoned)}))
    assert found == "the model has values that are not finite"


def test_a_finite_model_whose_update_overflows() -> None:
    """w_i fits float32 and (w - w_i)/η does not: one such row would end every rule."""
    poisoned = np.full((2, 3), 3e38, dtype=np.float32)
    assert "too large" in reason(reply({**honest(), "weight": Array(poisoned)}))


@pytest.mark.parametrize("sign", [1, -1])
def test_float64_updates_whose_squares_overflow(sign: int) -> None:
    def state(size: float) -> State:
        return {**honest(), "weight": Array(np.full((2, 3), sign * size))}

    model = global_model("float64")
    assert "too large" in reason(reply(state(MAX_UPDATE)), model)
    largest = screen_reply(reply(state(MAX_UPDATE * LOCAL_LR)), model, LOCAL_LR).update
    # What passes is what the rules take.
    others = torch.zeros(3, len(largest), dtype=torch.float64)
    survivors = rage(torch.vstack([others, largest]), 1).survivors
    assert survivors.tolist() == [True, True, True, False]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (1e30, "1e+30"),
        (10**13, "1e+13"),
        (10**400, "inf"),
        (math.inf, "inf"),
        (math.nan, "nan"),
        (0, "0"),
        (0.5, "0.5"),
        (-1, "-1"),
        ([3, 4], "[3, 4]"),
        ([0.5] * 5000, "[0.5, 0.5, "),
    ],
)
def test_insane_counts(value: Any, shown: str) -> None:
    found = reason(counting(value))
    assert found.startswith(f"num-examples = {shown}")
    assert len(found) < 150


@pytest.mark.parametrize(("value", "count"), [(1, 1), (10**12, 10**12), (12.0, 12)])
def test_sane_counts(value: float, count: int) -> None:
    assert screen_reply(counting(value), global_model(), LOCAL_LR).num_examples == count


def test_a_count_is_found_in_any_metric_record() -> None:
    content = RecordDict(
        {"one": MetricRecord({"loss": 1.5, "losses": [1.0, 2.0]}), "two": MetricRecord({"x": 2})}
    )
    assert read_count(content) is None
    content.metric_records["two"]["num-examples"] = 8
    assert read_count(content) == 8
    assert scalar_metrics(content) == {"loss": 1.5, "x": 2.0}


def test_scalar_metrics_beyond_float64_are_infinite() -> None:
    assert scalar_metrics(RecordDict({"m": MetricRecord({"x": 10**400})})) == {"x": math.inf}


@pytest.mark.parametrize("as_they_come", [False, True])
def test_of_all_deliveries_the_good_are_kept_by_id_and_the_bad_are_named(
    as_they_come: bool,
) -> None:
    other = honest()
    other["weight"] = Array(WEIGHT + 1)
    deliveries = [
        Delivery(5, reply()),
        Delivery(3, None, "no reply by the deadline"),
        Delivery(4, counting(-1)),
        Delivery(7, None, "enough others", surplus=True),
        Delivery(2, reply(other)),
    ]
    screening = Screening([2, 3, 4, 5, 7], global_model(), LOCAL_LR)
    if as_they_come:
        found = [screening.counts(delivery) for delivery in deliveries if not delivery.surplus]
        assert found == [True, False, False, True]
    came = screening.result(deliveries)
    assert list(came.contributions) == [2, 5]
    expected = [screen_reply(reply(s), global_model(), LOCAL_LR).update for s in (other, honest())]
    assert torch.equal(came.updates, torch.stack(expected))
    for one, update in zip(came.contributions.values(), expected, strict=True):
        assert torch.equal(one.update, update)
    assert came.surplus == [7]
    assert [(r.client, r.reason) for r in came.rejected] == [
        (3, "no reply by the deadline"),
        (4, "num-examples = -1 is not a count from 1 to 10^12"),
    ]


def test_what_screening_did_not_think_of_is_a_rejection_too() -> None:
    odd: Any = reply()
    odd.content["a"]["weight"].stype = 5
    rejected = screened(Delivery(1, odd)).rejected
    assert rejected[0].client == 1
    assert "cannot be read: TypeError" in rejected[0].reason


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("one\ntwo\t three", "one two three"),
        ("\x1b]0;title\x07 bell\u202e", "]0;title bell"),
        ("σ ≤ 1", "σ ≤ 1"),
        ("x" * 400, "x" * 300 + "..."),
    ],
)
def test_one_line(text: str, expected: str) -> None:
    assert one_line(text) == expected


def mutated(data: bytes, generator: np.random.Generator) -> bytes:
    """`data` with some bytes changed, cut off or put in twice, half the time behind its header."""
    noise = bytearray(data)
    first = int(generator.choice([0, len(data) - 24]))
    for _ in range(int(generator.integers(1, 4))):
        position = int(generator.integers(min(first, len(noise) - 1), len(noise)))
        kind = int(generator.integers(3))
        if kind == 0:
            noise[position] = int(generator.integers(256))
        elif kind == 1:
            del noise[position : position + int(generator.integers(1, 8))]
        else:
            noise[position:position] = noise[position : position + 8]
        noise = noise or bytearray(b"\0")
    return bytes(noise)


@pytest.mark.filterwarnings("ignore")
def test_random_damage_is_rejected_or_harmless() -> None:
    generator = np.random.default_rng(5)
    data, model = Array(WEIGHT).data, global_model()
    accepted = rejected = 0
    for _ in range(500):
        try:
            message = payload(mutated(data, generator))
            update = screen_reply(message, model, LOCAL_LR).update
            assert torch.isfinite(update).all() and len(update) == 8
            accepted += 1
        except RejectedReply:
            rejected += 1
    assert accepted > 30
    assert rejected > 30
