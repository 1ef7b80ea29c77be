"""Arrays in Flower's form: the .npy bytes that Flower itself writes and reads, without writing and
reading the text of the same header again for every array of every client.
"""

import contextlib
import io
import re
import threading
from collections.abc import Mapping
from functools import lru_cache

import numpy as np
from flwr.app import Array, ArrayRecord

NUMPY = "numpy.ndarray"
# The .npy header is text in front of the data; Flower's own take 128 bytes.
_MAX_HEADER = 4096
_FIRST_VERSION = b"\x93NUMPY\x01\x00"
# What NumPy writes of numbers, from the header's text on: read without evaluating it.
_USUAL = re.compile(
    rb"\{'descr': '([<>|][a-z][0-9]{1,2})', 'fortran_order': (True|False), "
    rb"'shape': \((|N,|N(?:, N)+)\), \} *\n".replace(b"N", b"(?:0|[1-9][0-9]*)")
)
# CPython 3.11 counts the depth of all threads' syntax trees in one place, and raises SystemError
# where a garbage collection lets another thread make one in between.
_one_tree = threading.Lock()
_TRIES = 3


class HeldArray(Array):
    """An Array in the process that made it: ``value`` itself, as bytes only where somebody asks.

    ``value`` must not change afterwards. Never comes out of a message that was sent: there
    everything is bytes, which nobody should believe.
    """

    def __init__(self, value: np.ndarray) -> None:
        state = self.__dict__
        state["dtype"], state["shape"] = _name(value.dtype), value.shape
        state["stype"], state["_value"], state["_bytes"] = NUMPY, value, None

    @property
    def value(self) -> np.ndarray | None:
        """What it holds; None if other bytes were put in its place."""
        held: np.ndarray | None = self.__dict__["_value"]
        return held

    @property
    def data(self) -> bytes:
        """The .npy bytes."""
        if self.__dict__["_bytes"] is None:
            self.__dict__["_bytes"] = encode(self.__dict__["_value"]).data
        written: bytes = self.__dict__["_bytes"]
        return written

    @data.setter
    def data(self, data: bytes) -> None:
        self.__dict__["_bytes"], self.__dict__["_value"] = data, None

    def deflate(self) -> bytes:
        """As the Array of the same bytes: what is sent names its class to the receiver."""
        return Array(self.dtype, self.shape, self.stype, self.data).deflate()


def encode(value: np.ndarray) -> Array:
    """The same as ``Array(value)``."""
    name, header = _description(value.dtype, value.shape)
    # One copy of the data; `header + value.tobytes()` would be two.
    return Array(name, value.shape, NUMPY, b"".join((header, np.ascontiguousarray(value).data)))


def encode_state(state: Mapping[str, np.ndarray | Array]) -> ArrayRecord:
    """A state_dict in Flower's form; entries that are in it already go in as they are."""
    record = ArrayRecord()
    for name, value in state.items():
        record[name] = value if isinstance(value, Array) else encode(value)
    return record


def decode(array: Array) -> np.ndarray:
    """A writable copy of what ``array`` holds: for arrays of our own, whose payload is right."""
    if isinstance(array, HeldArray) and array.value is not None:
        return array.value.copy()
    header, shape, fortran, dtype = read_header(array.data)
    flat = np.frombuffer(array.data, dtype, offset=header)
    return flat.reshape(shape, order="F" if fortran else "C").copy()


def read_header(data: bytes) -> tuple[int, tuple[int, ...], bool, np.dtype]:
    """Length in bytes of a .npy payload's header; and the shape, whether in Fortran's order, and
    the dtype that it promises.

    The usual header of numbers is read by its form. For any other one raises whatever NumPy's
    reader raises, which evaluates it as Python: a hostile one ends in a ValueError, an IndexError,
    a TokenError, a RecursionError, ...
    """
    width = 2 if data[6:7] == b"\x01" else 4
    length = int.from_bytes(data[8 : 8 + width], "little")
    header = data[: 8 + width + min(length, _MAX_HEADER)]
    return len(header), *_parse(header)


@lru_cache(maxsize=256)
def _name(dtype: np.dtype) -> str:
    """Flower's name of the dtype, which NumPy spells out anew every time."""
    return str(dtype)


@lru_cache(maxsize=256)
def _description(dtype: np.dtype, shape: tuple[int, ...]) -> tuple[str, bytes]:
    """Flower's name of the dtype, and the .npy header."""
    stream = io.BytesIO()
    description = np.lib.format.dtype_to_descr(dtype)
    np.lib.format.write_array_header_1_0(
        stream, {"descr": description, "fortran_order": False, "shape": shape}
    )
    return _name(dtype), stream.getvalue()


@lru_cache(maxsize=256)
def _parse(header: bytes) -> tuple[tuple[int, ...], bool, np.dtype]:
    is_whole = len(header) == 10 + int.from_bytes(header[8:10], "little")
    usual = _USUAL.fullmatch(header, 10) if header.startswith(_FIRST_VERSION) else None
    if usual is not None and is_whole:
        description, fortran, shape = usual.groups()
        # One that names no dtype is for NumPy's own words.
        with contextlib.suppress(TypeError):
            dtype = np.dtype(description.decode())
            return tuple(map(int, shape.replace(b",", b" ").split())), fortran == b"True", dtype
    for _ in range(_TRIES - 1):
        try:
            with _one_tree:
                return _evaluated(header)
        # The other tree was not ours: Flower reads arrays, too. It says nothing of the header.
        except SystemError:
            continue
    with _one_tree:
        return _evaluated(header)


def _evaluated(header: bytes) -> tuple[tuple[int, ...], bool, np.dtype]:
    stream = io.BytesIO(header)
    version = np.lib.format.read_magic(stream)
    read = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }[version]
    shape, fortran, dtype = read(stream, max_header_size=_MAX_HEADER)
    return shape, fortran, dtype
