"""Every reply is decoded and checked on its own: what is in it must never hurt the round.

A header can lie, so nothing is believed that was not checked on the payload itself.
"""

import io
import math
from dataclasses import dataclass

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict

from .layout import ModelLayout

NUM_EXAMPLES = "num-examples"
MAX_EXAMPLES = 10**12
# The .npy header is text in front of the data; Flower's own take 128 bytes.
_MAX_NPY_HEADER = 4096


class RejectedReply(ValueError):
    """A reply that does not count; the message is the reason, in one line."""


@dataclass(frozen=True)
class Contribution:
    """What one client's reply brings: its local model w_i as a vector [d], and its count."""

    parameters: torch.Tensor
    num_examples: int | None
    metrics: dict[str, float]


def screen_reply(message: Message, layout: ModelLayout) -> Contribution:
    """Decode a training reply and check it against the global model's layout.

    Raises RejectedReply for an error reply, missing, extra or misshapen entries, a payload that
    differs from its header, a wrong dtype, a value that is not finite, or an insane count.
    """
    content = content_of(message)
    records = list(content.array_records.values())
    if len(records) != 1:
        raise RejectedReply(f"{len(records)} array records in the reply, expected 1")
    state = decode_state(records[0], layout)
    vector = layout.flatten(state)
    if not bool(torch.isfinite(vector).all()):
        raise RejectedReply("the model has values that are not finite")
    metrics = scalar_metrics(content)
    return Contribution(vector, _num_examples(metrics), metrics)


def content_of(message: Message) -> RecordDict:
    """The reply's content. Raises RejectedReply if the client answered with an error."""
    if message.has_error():
        reason = " ".join(str(message.error.reason or "no reason given").split())
        raise RejectedReply(f"error {message.error.code}: {reason[:300]}")
    if not message.has_content():
        raise RejectedReply("the reply is empty")
    return message.content


def decode_state(record: ArrayRecord, layout: ModelLayout) -> dict[str, np.ndarray]:
    """All entries of `record`, checked against `layout`. Raises RejectedReply."""
    missing = [name for name in layout.shapes if name not in record]
    extra = [name for name in record if name not in layout.shapes]
    if missing:
        raise RejectedReply(f"missing entry {missing[0]!r} ({len(missing)} missing)")
    if extra:
        raise RejectedReply(f"unexpected entry {extra[0][:80]!r} ({len(extra)} unexpected)")
    return {
        name: _decode_array(name, record[name], shape, layout.dtypes[name])
        for name, shape in layout.shapes.items()
    }


def _decode_array(name: str, array: Array, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Decode one .npy payload without allocating what its header merely promises."""
    if array.stype != "numpy.ndarray":
        raise RejectedReply(f"{name}: unknown serialisation {array.stype[:40]!r}")
    stream = io.BytesIO(array.data)
    try:
        version = np.lib.format.read_magic(stream)
        read_header = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }[version]
        real_shape, fortran, real_dtype = read_header(stream, max_header_size=_MAX_NPY_HEADER)
    except (ValueError, KeyError, EOFError, SyntaxError, TypeError, MemoryError):
        raise RejectedReply(f"{name}: the payload is not a NumPy array") from None
    if real_dtype != dtype:
        raise RejectedReply(f"{name}: dtype {real_dtype}, expected {dtype}")
    if tuple(real_shape) != shape:
        raise RejectedReply(f"{name}: shape {tuple(real_shape)}, expected {shape}")
    body = memoryview(array.data)[stream.tell() :]
    if len(body) != math.prod(shape) * dtype.itemsize:
        raise RejectedReply(f"{name}: {len(body)} bytes of data do not fit shape {shape}")
    flat = np.frombuffer(body, dtype=dtype)
    return flat.reshape(shape, order="F" if fortran else "C")


def scalar_metrics(content: RecordDict) -> dict[str, float]:
    """All scalar numbers in the reply's metric records, by name."""
    metrics = {}
    for record in content.metric_records.values():
        if isinstance(record, MetricRecord):
            for key, value in record.items():
                if isinstance(value, int | float):
                    metrics[key] = float(value)
    return metrics


def _num_examples(metrics: dict[str, float]) -> int | None:
    if NUM_EXAMPLES not in metrics:
        return None
    return sane_count(metrics[NUM_EXAMPLES])


def sane_count(value: float) -> int:
    """`value` as a number of examples. Raises RejectedReply unless 1 <= value <= 10^12."""
    if not 1 <= value <= MAX_EXAMPLES:  # false for NaN too
        raise RejectedReply(f"num-examples = {value:g} is not a count from 1 to 10^12")
    return int(value)
