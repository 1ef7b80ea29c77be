"""Arrays in Flower's form: byte for byte what Flower writes, and back."""

import ast
import gc
import io
import sys
import threading

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord

from blackthorn.strategies.array_codec import (
    HeldArray,
    _parse,
    decode,
    encode,
    encode_state,
    read_header,
)

VALUES = [
    np.arange(6, dtype=np.float32).reshape(2, 3),
    np.array(7, dtype=np.int64),
    np.zeros((0, 4)),
    np.arange(24, dtype=np.float64).reshape(2, 3, 4)[:, ::2, 1:],
    np.asfortranarray(np.arange(6, dtype=np.int32).reshape(2, 3)),
    np.array([True, False]),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: f"{value.dtype}-{value.shape}")
def test_it_is_flower_s_own_array(value: np.ndarray) -> None:
    array = encode(value)
    flower = Array(np.ascontiguousarray(value).reshape(value.shape))
    assert array == flower
    assert array.data == flower.data
    back = decode(Array(value))
    np.testing.assert_array_equal(back, value)
    assert back.dtype == value.dtype
    back.fill(1)  # writable, and nobody else's
    np.testing.assert_array_equal(Array(value).numpy(), value)


def test_a_record_keeps_what_is_encoded_already() -> None:
    done = encode(np.ones(3))
    record = encode_state({"b": np.zeros(2), "a": done})
    assert list(record) == ["b", "a"]
    assert record == ArrayRecord({"b": Array(np.zeros(2)), "a": done})


def test_headers_of_both_versions() -> None:
    for version in ((1, 0), (2, 0)):
        stream = io.BytesIO()
        np.lib.format.write_array(stream, np.arange(5, dtype=np.int16), version=version)
        data = stream.getvalue()
        assert read_header(data) == (len(data) - 10, (5,), False, np.dtype(np.int16))


SHAPES = [(), (0,), (7,), (2, 3), (10, 0, 4), (1, 2, 3, 4)]


@pytest.mark.parametrize("name", ["<f4", "<f8", "<f2", ">f4", "<i8", "|i1", "|u1", "|b1", "<c8"])
@pytest.mark.parametrize("fortran", [False, True])
def test_numbers_are_read_as_numpy_reads_them_and_nothing_is_evaluated(
    name: str, fortran: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def written(shape: tuple[int, ...]) -> bytes:
        stream = io.BytesIO()
        order = np.asfortranarray if fortran else np.asarray
        np.lib.format.write_array(stream, order(np.zeros(shape, dtype=name)))
        return stream.getvalue()

    expected = []
    for shape in SHAPES:
        stream = io.BytesIO(written(shape))
        np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0(stream)
        expected.append((stream.tell(), *read))
    monkeypatch.setattr(ast, "literal_eval", lambda _: pytest.fail("a header was evaluated"))
    _parse.cache_clear()
    assert [read_header(written(shape)) for shape in SHAPES] == expected


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"(2, 3)", b"(02,3)"),
        (b"(2, 3)", b"(2 ,3)"),
        (b"(2, 3)", b"(-2,3)"),
        (b"'<f4'", b"'<q4'"),
        (b"'<f4'", b"'|O8'"),
        (b"False", b"FALSE"),
        (b"}", b" "),
        (b"\n", b""),
    ],
)
def test_any_other_header_is_for_numpy_to_judge(old: bytes, new: bytes) -> None:
    whole = encode(np.zeros((2, 3), dtype=np.float32)).data[:128]
    header = whole.replace(old, new, 1)
    stream = io.BytesIO(header)
    np.lib.format.read_magic(stream)
    try:
        expected = np.lib.format.read_array_header_1_0(stream)
    except Exception as error:
        with pytest.raises(type(error)):
            read_header(header)
    else:
        assert read_header(header)[1:] == expected


@pytest.mark.parametrize(
    "data", [b"", b"\x93NUMPY", b"\x93NUMPY\x01\x00\xff\xff{", b"x" * 300, b"\x93NUMPY\x07\x00"]
)
def test_what_is_no_header_raises(data: bytes) -> None:
    with pytest.raises((ValueError, KeyError)):
        read_header(data)


def test_a_header_without_end_is_not_read() -> None:
    text = b"{'descr': '<f4', 'fortran_order': False, 'shape': (" + b"1," * 40000 + b"), }\n"
    data = b"\x93NUMPY\x02\x00" + len(text).to_bytes(4, "little") + text
    with pytest.raises(ValueError):
        read_header(data)


def test_objects_are_never_unpickled() -> None:
    stream = io.BytesIO()
    np.save(stream, np.array([print], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="OBJECT"):
        decode(Array("object", (1,), "numpy.ndarray", stream.getvalue()))


def test_a_held_array_is_the_array_in_bytes_once_somebody_asks() -> None:
    value = np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::2]
    held, plain = HeldArray(value), Array(value)
    assert held.value is value
    assert (held.dtype, held.shape, held.stype) == (plain.dtype, plain.shape, plain.stype)
    assert held.data == plain.data
    assert held.object_id == plain.object_id
    assert np.array_equal(held.numpy(), value)
    copy = decode(held)
    copy[:] = -1
    assert np.array_equal(value, plain.numpy())


def test_a_held_array_whose_bytes_were_replaced_holds_those() -> None:
    held = HeldArray(np.zeros(3, dtype=np.float32))
    before = held.object_id
    held.data = Array(np.ones(3, dtype=np.float32)).data
    assert held.value is None
    assert held.object_id != before
    assert decode(held).tolist() == held.numpy().tolist() == [1, 1, 1]


def test_an_array_is_read_whatever_other_threads_read_meanwhile() -> None:
    """Where a garbage collection lets other threads run, CPython 3.11 mixes up their syntax trees,
    in which NumPy reads headers: more than 100 of these failed."""
    payloads = [encode(np.zeros((rows % 7 + 1, rows))).data for rows in range(300)]
    failed: list[Exception] = []

    def read(first: int) -> None:
        for payload in payloads[first::4] * 3:
            _parse.cache_clear()
            try:
                read_header(payload)
            except Exception as error:
                failed.append(error)

    def let_others_run(phase: str, info: dict[str, int]) -> None:
        del phase, info
        sum(range(50))

    threads = [threading.Thread(target=read, args=(first,)) for first in range(4)]
    threshold, interval = gc.get_threshold(), sys.getswitchinterval()
    gc.callbacks.append(let_others_run)
    gc.set_threshold(5)
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        gc.callbacks.remove(let_others_run)
        gc.set_threshold(*threshold)
        sys.setswitchinterval(interval)
    assert failed == []
