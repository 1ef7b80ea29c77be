"""Which entries of a model's state_dict belong to w, and how they become one vector and back.

Everything else is one of: running statistics, which describe data and which nobody trains; second
names of a tied parameter; and what stays as it is (frozen parameters, counters, masks).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

import numpy as np
import torch
from torch import nn

Statistics = Literal["average", "server", "local"]
STATISTICS: tuple[Statistics, ...] = ("average", "server", "local")
# BatchNorm's running statistics and counter are buffers: they describe data, nobody trains them.
VARIANCE = "running_var"
BUFFER_SUFFIXES = ("running_mean", VARIANCE, "num_batches_tracked")


def is_trainable(name: str, dtype: np.dtype) -> bool:
    """Whether an entry of which no more is known belongs to w: floating point and not a running
    statistic."""
    return np.issubdtype(dtype, np.floating) and not name.endswith(BUFFER_SUFFIXES)


@dataclass(frozen=True)
class Entries:
    """What the entries of a state_dict are.

    `parameters`: trainable ones, each once. `statistics`: floating-point buffers. `copies`: the
    second names of tied parameters, each with the first. `frozen`: parameters that nobody trains.
    `precision`: the machine epsilon of the coarsest parameter where it is computed.
    """

    parameters: tuple[str, ...]
    statistics: tuple[str, ...]
    copies: Mapping[str, str] = field(default_factory=dict)
    frozen: tuple[str, ...] = ()
    precision: float = 0.0

    @classmethod
    def by_name(cls, state: Mapping[str, np.ndarray]) -> "Entries":
        """Of arrays alone: what is floating point is a parameter unless it is named like one of
        BatchNorm's statistics. Ties and what is frozen cannot be seen."""
        floating = [name for name in state if np.issubdtype(state[name].dtype, np.floating)]
        parameters = tuple(name for name in floating if is_trainable(name, state[name].dtype))
        statistics = tuple(name for name in floating if name not in parameters)
        return cls(parameters, statistics)

    @classmethod
    def of_module(cls, module: nn.Module) -> "Entries":
        """Of a module, which knows all of it."""
        first: dict[int, str] = {}
        copies, parameters, frozen, statistics = {}, [], [], []
        precision = 0.0
        for name, value in module.state_dict(keep_vars=True).items():
            if not isinstance(value, torch.Tensor):
                continue
            if not isinstance(value, nn.Parameter):
                if value.is_floating_point():
                    statistics.append(name)
            elif id(value) in first:
                copies[name] = first[id(value)]
            elif value.requires_grad and value.is_floating_point():
                first[id(value)] = name
                parameters.append(name)
                precision = max(precision, torch.finfo(value.dtype).eps)
            else:
                frozen.append(name)
        return cls(tuple(parameters), tuple(statistics), copies, tuple(frozen), precision)


def state_of(module: nn.Module) -> dict[str, np.ndarray]:
    """The module's state_dict as arrays. NumPy has no bfloat16: such entries become float32."""
    state = {}
    for name, value in module.state_dict().items():
        if isinstance(value, torch.Tensor):
            wide = value.float() if value.dtype == torch.bfloat16 else value
            state[name] = wide.detach().cpu().numpy().copy()
    return state


@dataclass(frozen=True)
class ModelLayout:
    """Names, shapes and dtypes of a state_dict; the order of the names fixes the vector's order.

    `trainable`: what belongs to w. `averaged`: the statistics that clients send back. `local`:
    those that each client keeps for itself. `sent`: what travels to the clients; the rest stays
    here. `copies`: the other names of tied parameters, each with the one in
    `trainable`.

    `dtype` of the vector is float64 if any trainable entry is, else float32: an update keeps the
    precision in which the clients computed it, and half-precision models are averaged in float32.
    `precision` is the machine epsilon with which clients round a model.
    """

    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, np.dtype]
    trainable: tuple[str, ...]
    averaged: tuple[str, ...] = ()
    local: tuple[str, ...] = ()
    sent: tuple[str, ...] = ()
    copies: Mapping[str, str] = field(default_factory=dict)
    precision: float = 0.0

    @classmethod
    def of(
        cls,
        state: Mapping[str, np.ndarray],
        entries: Entries | None = None,
        shared: Sequence[str] = ("*",),
        statistics: Statistics = "average",
    ) -> "ModelLayout":
        """Layout of `state`, whose `entries` are told apart by name where nobody says.

        `shared`: patterns of the names that travel. Raises ValueError if nothing that travels can
        be trained, for a pattern that fits no name, and for a dtype that NumPy does not have.
        """
        for name, value in state.items():
            if value.dtype.kind == "V":
                raise ValueError(
                    f"{name!r} is of a dtype that NumPy does not have ({value.dtype}): send "
                    "bfloat16 entries as float32, which holds all their values"
                )
        for pattern in shared:
            if state and not any(fnmatchcase(name, pattern) for name in state):
                raise ValueError(f"shared = {pattern!r} is not allowed: no entry has such a name")
        entries = entries or Entries.by_name(state)

        def chosen(names: Sequence[str]) -> tuple[str, ...]:
            return tuple(n for n in names if any(fnmatchcase(n, pattern) for pattern in shared))

        # A tied parameter goes by the first of its names that travels.
        names = {first: [first] for first in entries.parameters}
        for second, first in entries.copies.items():
            names.setdefault(first, [first]).append(second)
        named = {first: chosen(tied)[0] for first, tied in names.items() if chosen(tied)}
        trainable = tuple(name for name in state if name in named.values())
        copies = {
            other: named[first]
            for first, tied in names.items()
            for other in tied
            if first in named and other != named[first]
        }
        moving = chosen(entries.statistics)
        if not any(state[name].size for name in trainable):
            raise ValueError("the model has no floating-point parameter to train")
        dtypes = {name: value.dtype for name, value in state.items()}
        frozen = {*entries.frozen}
        return cls(
            shapes={name: tuple(value.shape) for name, value in state.items()},
            dtypes=dtypes,
            trainable=trainable,
            averaged=moving if statistics == "average" else (),
            local=moving if statistics == "local" else (),
            sent=tuple(name for name in chosen(tuple(state)) if name not in frozen),
            copies=copies,
            precision=max(
                entries.precision, *(float(np.finfo(dtypes[name]).eps) for name in trainable)
            ),
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

    @property
    def coarsest(self) -> torch.dtype:
        """The dtype in which the entry of w travels that is rounded most."""
        kind = max((self.dtypes[name] for name in self.trainable), key=lambda k: np.finfo(k).eps)
        return torch.from_numpy(np.empty(0, kind)).dtype

    @property
    def is_half(self) -> bool:
        """Whether an entry of w travels in less precision than the vector has."""
        return any(self.dtypes[name].itemsize < 4 for name in self.trainable)

    def flatten(self, state: Mapping[str, np.ndarray]) -> torch.Tensor:
        """The trainable entries of `state` as a new vector [d]."""
        kind = np.float64 if self.dtype == torch.float64 else np.float32
        return torch.from_numpy(_joined(state, self.trainable, kind))

    def statistics(self, state: Mapping[str, np.ndarray]) -> np.ndarray:
        """The averaged statistics of `state` as a new vector, float64."""
        return _joined(state, self.averaged, np.float64)

    def unflatten(
        self,
        vector: torch.Tensor,
        buffers: Mapping[str, np.ndarray],
        statistics: np.ndarray | None = None,
    ) -> dict[str, np.ndarray]:
        """State with the trainable entries from `vector` [d], the averaged statistics from
        `statistics` where it is given, and all others from `buffers`. What is too large for its
        dtype becomes infinite."""
        own = self._parts(vector.detach().cpu().numpy(), self.trainable)
        if statistics is not None:
            own.update(self._parts(statistics, self.averaged))
        return {
            name: own[self.copies.get(name, name)]
            if self.copies.get(name, name) in own
            else buffers[name]
            for name in self.shapes
        }

    def _parts(self, flat: np.ndarray, names: Sequence[str]) -> dict[str, np.ndarray]:
        parts: dict[str, np.ndarray] = {}
        start = 0
        with np.errstate(over="ignore"):
            for name in names:
                size = int(np.prod(self.shapes[name]))
                part = flat[start : start + size].reshape(self.shapes[name])
                parts[name] = part.astype(self.dtypes[name])
                start += size
        return parts


def _joined(state: Mapping[str, np.ndarray], names: Sequence[str], kind: type) -> np.ndarray:
    parts: list[np.ndarray] = [np.asarray(state[name], dtype=kind).reshape(-1) for name in names]
    return np.concatenate(parts) if parts else np.empty(0, dtype=kind)
