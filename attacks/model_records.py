"""Between a client's reply and its update as a vector.

u = (w - w_i) / eta_l over what the server's message names as the model's parameters or, where it
names none, the floating arrays of its ArrayRecord, flattened and joined in its order: d numbers,
float32 or, where the model has float64 arrays, float64. Other arrays (statistics, counters) are not
part of u: a lie about them is found out, and a corrupt client sends its honest ones.
"""

import copy
from collections.abc import Sequence

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from torch import Tensor

from blackthorn.wire import ARRAYS, LAYOUT, PARAMETERS


class FlatModel:
    """The global model of a round, to measure updates from and to forge replies with."""

    def __init__(self, record: ArrayRecord, parameters: Sequence[str] = ()) -> None:
        """Decode `record`; its arrays, of which `parameters` are u's, keep their order."""
        arrays = {name: array.numpy() for name, array in record.items()}
        self._floating = {
            name: array
            for name, array in arrays.items()
            if (name in parameters if parameters else np.issubdtype(array.dtype, np.floating))
        }
        self._dtype = np.result_type(np.float32, *(a.dtype for a in self._floating.values()))

    @classmethod
    def of(cls, message: Message) -> "FlatModel":
        """The model that a train message of the server's holds."""
        layout = message.content.config_records.get(LAYOUT, ConfigRecord())
        names = layout.get(PARAMETERS, [])
        parameters = [str(name) for name in names] if isinstance(names, list) else []
        return cls(message.content.array_records[ARRAYS], parameters)

    @property
    def vector(self) -> Tensor:
        """The global model w [d]."""
        parts = [array.astype(self._dtype).ravel() for array in self._floating.values()]
        return torch.from_numpy(np.concatenate(parts)) if parts else torch.empty(0)

    def update(self, reply: Message, local_lr: float) -> Tensor:
        """The honest reply's u [d], gradient units.

        ValueError if the reply has no model of this one's shapes.
        """
        local = self._local_arrays(reply)
        steps = [
            (array.astype(self._dtype) - local[name]).ravel() / self._dtype.type(local_lr)
            for name, array in self._floating.items()
        ]
        return torch.from_numpy(np.concatenate(steps)) if steps else torch.empty(0)

    def forge(self, reply: Message, update: Tensor, local_lr: float) -> Message:
        """A reply whose update is `update` [d]: w - eta_l u; all else is the honest reply's."""
        steps = update.numpy() * self._dtype.type(local_lr)
        forged: dict[str, Array] = dict(reply.content.array_records[ARRAYS])
        start = 0
        for name, array in self._floating.items():
            step = steps[start : start + array.size].reshape(array.shape)
            forged[name] = Array(np.asarray(array - step, dtype=array.dtype))
            start += array.size
        lie = copy.copy(reply)
        lie.content = RecordDict({**reply.content, ARRAYS: ArrayRecord(forged)})
        return lie

    def _local_arrays(self, reply: Message) -> dict[str, np.ndarray]:
        record = reply.content.array_records.get(ARRAYS, ArrayRecord())
        missing = [name for name in self._floating if name not in record]
        if missing:
            raise ValueError(
                f"an honest reply's record {ARRAYS!r} lacks {missing[0]!r}; "
                f"it holds {sorted(record)}"
            )
        local = {name: record[name].numpy() for name in self._floating}
        for name, array in self._floating.items():
            if local[name].shape != array.shape:
                raise ValueError(
                    f"an honest reply's array {name!r} has shape {local[name].shape}; "
                    f"the global model's is {array.shape}"
                )
        return local
