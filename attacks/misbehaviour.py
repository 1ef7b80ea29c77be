"""What a lying client does to its reply: poison of the transport kind, and failures.

Each function takes the honest reply (a Flower Message) and returns another one; the honest
reply stays as it is. A reply that carries an error has nothing to poison and is passed on. The
last three do not answer at all: `raise_error`, `slow` and `exit_process`.

An honest reply holds its model in an ArrayRecord and its counts in a MetricRecord, which may
have any name in the content.
"""

import copy
import io
import os
import time
from collections.abc import Callable

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict

from blackthorn.wire import METRICS, NUM_EXAMPLES

SECONDS_VARIABLE = "BLACKTHORN_ATTACK_SECONDS"
_NUMPY = "numpy.ndarray"  # Flower's name for the .npy serialisation

Arrays = dict[str, Array]


def nan(reply: Message) -> Message:
    """NaN in every floating parameter."""
    return _filled(reply, np.nan)


def infinite(reply: Message) -> Message:
    """Infinity in every floating parameter."""
    return _filled(reply, np.inf)


def huge(reply: Message) -> Message:
    """1e25 in every floating parameter: finite, but its square overflows float32."""
    return _filled(reply, 1e25)


def wrong_shape(reply: Message) -> Message:
    """The first array flattened and one entry longer than it should be; its header is true."""
    return _first_array_replaced(reply, _longer)


def wrong_dtype(reply: Message) -> Message:
    """Complex numbers where real ones are expected; the headers are true."""

    def imagine(arrays: Arrays) -> Arrays:
        return {
            name: Array(np.asarray(array.numpy() * np.complex64(1j)))
            for name, array in arrays.items()
        }

    return _arrays_replaced(reply, imagine)


def missing_key(reply: Message) -> Message:
    """The last array is left out."""
    return _arrays_replaced(reply, lambda arrays: dict(list(arrays.items())[:-1]))


def extra_key(reply: Message) -> Message:
    """An array more than the model has."""
    return _arrays_replaced(reply, lambda arrays: {**arrays, "extra": Array(np.ones(3))})


def empty_arrays(reply: Message) -> Message:
    """The records are there, without a single array in them."""
    return _arrays_replaced(reply, lambda _: {})


def empty_record(reply: Message) -> Message:
    """A reply without any record."""
    return _content_replaced(reply, lambda _: RecordDict())


def lying_header(reply: Message) -> Message:
    """The first array's header keeps the promised shape, its payload is one entry longer."""
    return _first_array_replaced(reply, lambda array: _with_payload(array, _longer(array).data))


def lying_payload(reply: Message) -> Message:
    """The first array's payload announces 2^40 numbers and brings four.

    A reader that believes it asks the machine for terabytes.
    """
    payload = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        payload, {"descr": "<f4", "fortran_order": False, "shape": (2**40,)}
    )
    payload.write(np.ones(4, dtype="<f4").tobytes())
    return _first_array_replaced(reply, lambda array: _with_payload(array, payload.getvalue()))


def object_array(reply: Message) -> Message:
    """The first array's payload is a pickled array of Python objects; its header looks right.

    Whoever reads it with pickles allowed runs whatever code the sender chose.
    """

    def pickle(array: Array) -> Array:
        payload = io.BytesIO()
        objects = np.full(tuple(array.shape), None, dtype=object)
        np.save(payload, objects, allow_pickle=True)
        return _with_payload(array, payload.getvalue())

    return _first_array_replaced(reply, pickle)


def garbage(reply: Message) -> Message:
    """Every payload is a text instead of a serialised array; the headers look right."""

    def scribble(arrays: Arrays) -> Arrays:
        return {
            name: _with_payload(array, f"no array called {name} here".encode())
            for name, array in arrays.items()
        }

    return _arrays_replaced(reply, scribble)


def huge_count(reply: Message) -> Message:
    """1e30 examples, which would own any weighted mean; the other metrics stay."""

    def boast(content: RecordDict) -> RecordDict:
        metrics = content.metric_records or {METRICS: MetricRecord()}
        boasts = {
            name: MetricRecord({**record, NUM_EXAMPLES: 1e30}) for name, record in metrics.items()
        }
        return RecordDict({**content, **boasts})

    return _content_replaced(reply, boast)


def raise_error(reply: Message) -> Message:
    """RuntimeError instead of an answer."""
    raise RuntimeError(
        f"this client refuses to answer message {reply.metadata.reply_to_message_id}"
    )


def slow(reply: Message, seconds: float | None = None) -> Message:
    """The honest reply, `seconds` late (default: $BLACKTHORN_ATTACK_SECONDS, else 60)."""
    time.sleep(float(os.environ.get(SECONDS_VARIABLE, "60")) if seconds is None else seconds)
    return reply


def exit_process(reply: Message) -> Message:  # noqa: ARG001
    """The process ends at once, without a word: no clean-up, no exit handlers."""
    os._exit(1)


REPLY_ATTACKS: dict[str, Callable[[Message], Message]] = {
    "nan": nan,
    "infinite": infinite,
    "huge": huge,
    "wrong-shape": wrong_shape,
    "wrong-dtype": wrong_dtype,
    "missing-key": missing_key,
    "extra-key": extra_key,
    "empty-arrays": empty_arrays,
    "empty-record": empty_record,
    "lying-header": lying_header,
    "lying-payload": lying_payload,
    "object-array": object_array,
    "garbage": garbage,
    "huge-count": huge_count,
    "raise": raise_error,
    "slow": slow,
    "exit": exit_process,
}


def _content_replaced(reply: Message, rewrite: Callable[[RecordDict], RecordDict]) -> Message:
    if not reply.has_content():
        return reply
    forged = copy.copy(reply)
    forged.content = rewrite(reply.content)
    return forged


def _arrays_replaced(reply: Message, rewrite: Callable[[Arrays], Arrays]) -> Message:
    def rewrite_records(content: RecordDict) -> RecordDict:
        forged = {
            name: ArrayRecord(rewrite(dict(record)))
            for name, record in content.array_records.items()
        }
        return RecordDict({**content, **forged})

    return _content_replaced(reply, rewrite_records)


def _first_array_replaced(reply: Message, rewrite: Callable[[Array], Array]) -> Message:
    def rewrite_first(arrays: Arrays) -> Arrays:
        return {
            name: rewrite(array) if position == 0 else array
            for position, (name, array) in enumerate(arrays.items())
        }

    return _arrays_replaced(reply, rewrite_first)


def _filled(reply: Message, value: float) -> Message:
    def fill(array: Array) -> Array:
        honest = array.numpy()
        floating = np.issubdtype(honest.dtype, np.floating)
        return Array(np.full_like(honest, value)) if floating else array

    return _arrays_replaced(
        reply, lambda arrays: {name: fill(array) for name, array in arrays.items()}
    )


def _longer(array: Array) -> Array:
    honest = array.numpy()
    return Array(np.append(honest, np.zeros(1, dtype=honest.dtype)))


def _with_payload(array: Array, payload: bytes) -> Array:
    return Array(dtype=array.dtype, shape=tuple(array.shape), stype=_NUMPY, data=payload)
