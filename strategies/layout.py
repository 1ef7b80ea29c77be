"""How a model's state_dict becomes one flat vector w of length d, and back."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

# BatchNorm's running statistics and counter are buffers: they describe data, nobody trains them.
BUFFER_SUFFIXES = ("running_mean", "running_var", "num_batches_tracked")


def is_trainable(name: str, dtype: np.dtype) -> bool:
    """Whether an entry belongs to w: floating point and not a running statistic."""
    return np.issubdtype(dtype, np.floating) and not name.endswith(BUFFER_SUFFIXES)


@dataclass(frozen=True)
class ModelLayout:
    """Names, shapes and dtypes of a state_dict; the order of the names fixes the vector's order.

    `dtype` of the vector is float64 if any trainable entry is, else float32: an update keeps the
    precision in which the clients computed it, and half-precision models are averaged in float32.
    """

    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, np.dtype]
    trainable: tuple[str, ...]

    @classmethod
    def of(cls, state: Mapping[str, np.ndarray]) -> "ModelLayout":
        """Layout of `state`. Raises ValueError if nothing in it can be trained."""
        trainable = tuple(name for name, value in state.items() if is_trainable(name, value.dtype))
        if not trainable:
            raise ValueError("the model has no floating-point parameter to train")
        return cls(
            shapes={name: tuple(value.shape) for name, value in state.items()},
            dtypes={name: value.dtype for name, value in state.items()},
            trainable=trainable,
        )

    @property
    def dimension(self) -> int:
        """Length d of the vector."""
        return sum(int(np.prod(self.shapes[name])) for name in self.trainable)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the vector."""
        wide = any(self.dtypes[name] == np.float64 for name in self.trainable)
        return torch.float64 if wide else torch.float32

    def flatten(self, state: Mapping[str, np.ndarray]) -> torch.Tensor:
        """The trainable entries of `state` as a new vector [d]."""
        kind = np.float64 if self.dtype == torch.float64 else np.float32
        parts = [np.asarray(state[name], dtype=kind).reshape(-1) for name in self.trainable]
        return torch.from_numpy(np.concatenate(parts))

    def unflatten(
        self, vector: torch.Tensor, buffers: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """State with the trainable entries from `vector` [d] and all others from `buffers`."""
        state = {}
        start = 0
        flat = vector.detach().cpu().numpy()
        for name, shape in self.shapes.items():
            if name not in self.trainable:
                state[name] = buffers[name]
                continue
            size = int(np.prod(shape))
            state[name] = flat[start : start + size].reshape(shape).astype(self.dtypes[name])
            start += size
        return state
