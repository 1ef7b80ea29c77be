"""Replies to be screened, honest and with any payload at all."""

import struct
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict

from blackthorn.strategies.global_model import GlobalModel
from blackthorn.strategies.screening import (
    RejectedReply,
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
