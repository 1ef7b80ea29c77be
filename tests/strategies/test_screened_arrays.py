"""Arrays that are not what they say, or not the model's: each is rejected with its reason."""

import io
import tracemalloc

import numpy as np
import pytest
import torch
from flwr.app import Array
from screened_replies import (
    LOCAL_LR,
    WEIGHT,
    global_model,
    header,
    honest,
    npy,
    payload,
    reason,
    reply,
)

from blackthorn.strategies.array_codec import HeldArray
from blackthorn.strategies.screening import (
    RejectedReply,
    screen_reply,
)


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


def test_an_unknown_serialisation_is_rejected_in_a_short_line() -> None:
    array = Array(dtype="float32", shape=(2, 3), stype="pickle" * 30, data=Array(WEIGHT).data)
    found = reason(reply({**honest(), "weight": array}))
    assert found.startswith("weight: unknown serialisation 'picklepickle")
    assert len(found) < 100


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
