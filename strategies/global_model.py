"""The global model: how a state_dict becomes its vector w and back, and its step

w_{t+1} = Proj( w_t − η_g η_l · momentum( agg(u_i) ) ).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import numpy as np
import torch
from flwr.app import ArrayRecord
from torch import nn

from .array_codec import encode_state
from .layout import Entries, Statistics, rounded, state_of
from .projection import CENTERS, SETS, Center, ConvexSet, project
from .release import real, take_over


@dataclass(frozen=True)
class ServerStep:
    """Two-sided learning rate, heavy-ball momentum v ← βv + a, projection onto a convex set.

    `projection` is the set, `projection_radius` its size (None: no projection), and
    `projection_center` what a ball or a box lies around; see `project`.
    Raises ValueError for a rate or radius that is not positive, or momentum outside [0, 1).
    """

    server_lr: float = 1.0
    momentum: float = 0.0
    projection_radius: float | None = None
    projection: ConvexSet = "ball"
    projection_center: Center = "initial"

    def __post_init__(self) -> None:
        take_over(self, real, "server_lr", "momentum")
        if self.projection_radius is not None:
            take_over(self, real, "projection_radius")
        if not 0 < self.server_lr < math.inf:
            raise ValueError(f"server_lr = {self.server_lr} is not allowed: positive and finite")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum = {self.momentum} is not allowed: from 0, less than 1")
        if self.projection not in SETS or self.projection_center not in CENTERS:
            raise ValueError(
                f"projection = {self.projection!r} around {self.projection_center!r} is not "
                f"allowed: {', '.join(SETS)}, around {' or '.join(CENTERS)}"
            )
        if self.projection_radius is not None and not self.projection_radius > 0:
            raise ValueError(
                f"projection_radius = {self.projection_radius} is not allowed: greater than 0"
            )

    def velocity(self, previous: torch.Tensor | None, aggregate: torch.Tensor) -> torch.Tensor:
        """v_t [d] from v_{t−1} (None: zero) and the aggregate a_t [d], in gradient units."""
        if previous is None or self.momentum == 0.0:
            return aggregate
        return self.momentum * previous + aggregate

    def apply(
        self,
        model: torch.Tensor,
        velocity: torch.Tensor,
        local_lr: float,
        initial: torch.Tensor,
    ) -> torch.Tensor:
        """w_{t+1} [d] from w_t [d]; `initial` is w_1, which a set may lie around."""
        moved = velocity * (self.server_lr * local_lr)
        torch.sub(model, moved, out=moved)
        if self.projection_radius is None:
            return moved
        center = initial if self.projection_center == "initial" else torch.zeros_like(initial)
        return project(moved, self.projection, self.projection_radius, center)


@dataclass(frozen=True)
class ModelLayout:
    """Names, shapes and dtypes of a state_dict; the order of the names fixes the vector's order.

    `trainable`: what belongs to w. `averaged`: the statistics that clients send back. `local`:
    those that each client keeps for itself. `sent`: what travels to the clients; the rest stays
    here. `copies`: the other names of tied parameters, each with the one in
    `trainable`.

    `dtype` of the vector is float64 if any trainable entry is, else float32: an update keeps the
    precision in which the clients computed it, and half-precision models are averaged in float32.
    `bfloat16`: of `trainable`, those that travel as float32 with numbers of bfloat16, in which the
    clients compute.
    """

    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, np.dtype]
    trainable: tuple[str, ...]
    averaged: tuple[str, ...] = ()
    local: tuple[str, ...] = ()
    sent: tuple[str, ...] = ()
    copies: Mapping[str, str] = field(default_factory=dict)
    bfloat16: frozenset[str] = frozenset()

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
            bfloat16=frozenset(named[name] for name in entries.bfloat16 if name in named),
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
    def precision(self) -> float:
        """The machine epsilon with which clients round a model."""
        coarsest = max(float(np.finfo(self.dtypes[name]).eps) for name in self.trainable)
        return max(coarsest, torch.finfo(torch.bfloat16).eps if self.bfloat16 else 0.0)

    @property
    def is_half(self) -> bool:
        """Whether an entry of w travels in less precision than the vector has."""
        return any(self.dtypes[name].itemsize < 4 for name in self.trainable)

    @property
    def is_rounded(self) -> bool:
        """Whether what travels of w is another number than the vector's."""
        return self.is_half or bool(self.bfloat16)

    def flatten(self, state: Mapping[str, np.ndarray]) -> torch.Tensor:
        """The trainable entries of `state` as a new vector [d]."""
        kind = np.float64 if self.dtype == torch.float64 else np.float32
        return torch.from_numpy(_joined(state, self.trainable, kind))

    def statistics(self, state: Mapping[str, np.ndarray]) -> np.ndarray:
        """The averaged statistics of `state` as a new vector, float64."""
        return _joined(state, self.averaged, np.float64)

    def named_statistics(self, flat: np.ndarray) -> dict[str, np.ndarray]:
        """The entries of such a vector, each in its own dtype."""
        return self._parts(flat, self.averaged)

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
                if name in self.bfloat16:
                    part = rounded(torch.from_numpy(part), torch.bfloat16).numpy()
                parts[name] = part.astype(self.dtypes[name])
                start += size
        return parts


def _joined(state: Mapping[str, np.ndarray], names: Sequence[str], kind: type) -> np.ndarray:
    parts: list[np.ndarray] = [np.asarray(state[name], dtype=kind).reshape(-1) for name in names]
    return np.concatenate(parts) if parts else np.empty(0, dtype=kind)


@dataclass
class GlobalModel:
    """w_t [d] (`current`), w_1 (`initial`), v_t (`velocity`); the averaged `statistics` [s] in
    float64; `buffers` keep the server's value."""

    layout: ModelLayout
    buffers: dict[str, np.ndarray]
    initial: torch.Tensor
    current: torch.Tensor
    statistics: np.ndarray = field(default_factory=lambda: np.empty(0))
    velocity: torch.Tensor | None = None
    _arrays: ArrayRecord | None = None
    _sent: ArrayRecord | None = None

    @classmethod
    def of(
        cls,
        model: ArrayRecord | nn.Module,
        shared: Sequence[str] = ("*",),
        statistics: Statistics = "average",
    ) -> "GlobalModel":
        """The model of a state_dict in Flower's form, or of a module, which also knows what is
        frozen or tied. Raises ValueError as ModelLayout does."""
        entries = None
        if isinstance(model, nn.Module):
            state, entries = state_of(model), Entries.of_module(model)
        else:
            state = {name: array.numpy() for name, array in model.items()}
        layout = ModelLayout.of(state, entries, shared, statistics)
        vector = layout.flatten(state)
        buffers = {name: value for name, value in state.items() if name not in layout.trainable}
        return cls(layout, buffers, vector, vector, layout.statistics(state))

    def arrays(self) -> ArrayRecord:
        """The model as a state_dict in Flower's form (the same object until the model moves)."""
        if self._arrays is None:
            self._arrays = self.arrays_of(self.current)
        return self._arrays

    def sent(self) -> ArrayRecord:
        """What of `arrays()` travels to the clients."""
        if self._sent is None:
            self._sent = self.travelling(self.arrays())
        return self._sent

    def travelling(self, arrays: ArrayRecord) -> ArrayRecord:
        """What of a model in Flower's form travels to the clients."""
        if len(self.layout.sent) == len(self.layout.shapes):
            return arrays
        return ArrayRecord({name: arrays[name] for name in self.layout.sent})

    def arrays_of(self, vector: torch.Tensor, statistics: np.ndarray | None = None) -> ArrayRecord:
        """Another model w [d] in Flower's form, with the same buffers, and the same statistics
        where no others are given."""
        own = self.statistics if statistics is None else statistics
        return encode_state(self.layout.unflatten(vector, self.buffers, own))

    def vector(self, arrays: ArrayRecord) -> torch.Tensor:
        """w [d] of a model in Flower's form."""
        return self.layout.flatten({name: array.numpy() for name, array in arrays.items()})

    def statistics_of(self, arrays: ArrayRecord) -> np.ndarray:
        """The averaged statistics [s] of a model in Flower's form."""
        return self.layout.statistics({name: array.numpy() for name, array in arrays.items()})

    def issued(self, arrays: ArrayRecord) -> bool:
        """Whether `arrays` is what `arrays()` handed out."""
        return arrays is self._arrays

    def update(self, local: torch.Tensor, local_lr: float) -> torch.Tensor:
        """u_i = (w_t − w_i)/η_l [d] of the local model w_i, in gradient units."""
        return (self.current - local).div_(local_lr)

    def update_of_state(
        self, state: Mapping[str, np.ndarray], local_lr: float, row: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`update` of a local state_dict, written into `row` [d] where one is given: from the model
        as it was sent, which in half precision, or bfloat16, is a rounded one."""
        row = torch.empty_like(self.current) if row is None else row
        current, out, start = self._as_sent().numpy(), row.numpy(), 0
        with np.errstate(over="ignore"):  # who screens sees what became infinite
            for name in self.layout.trainable:
                local = state[name].reshape(-1)
                own = slice(start, start + len(local))
                np.subtract(current[own], local, out=out[own])
                start += len(local)
            np.divide(out, local_lr, out=out)
        return row

    def _as_sent(self) -> torch.Tensor:
        return self.vector(self.arrays()) if self.layout.is_rounded else self.current

    def named_statistics(self) -> dict[str, np.ndarray]:
        """The averaged statistics by name, in their dtypes."""
        return self.layout.named_statistics(self.statistics)

    def moving_parts(self) -> dict[str, np.ndarray]:
        """Views of w_t and, where there are such, v_t and the statistics: what `restore` needs in
        another process."""
        parts = {"model": self.current.numpy()}
        if self.velocity is not None:
            parts["velocity"] = self.velocity.numpy()
        if len(self.statistics):
            parts["statistics"] = self.statistics
        return parts

    def restore(self, parts: Mapping[str, np.ndarray]) -> None:
        """Go on from `moving_parts`; w_1 and the buffers stay those of the initial model.

        Raises ValueError for vectors of another model.
        """
        vector = self.initial.numpy()
        for name, part in parts.items():
            own = self.statistics if name == "statistics" else vector
            if part.shape != own.shape or part.dtype != own.dtype:
                raise ValueError(
                    f"{name} is {part.dtype}{list(part.shape)}, of the model it would be "
                    f"{own.dtype}{list(own.shape)}"
                )
        self.current = torch.from_numpy(parts["model"].copy())
        velocity = parts.get("velocity")
        self.velocity = None if velocity is None else torch.from_numpy(velocity.copy())
        self.statistics = parts.get("statistics", self.statistics).copy()
        self._arrays = self._sent = None

    def step(self, step: ServerStep, aggregate: torch.Tensor, local_lr: float) -> None:
        """Move w by the server step with the aggregate [d] in gradient units.

        Raises ValueError, and leaves everything as it was, if w would not stay finite, also in the
        dtypes in which it travels.
        """
        velocity = step.velocity(self.velocity, aggregate.to(self.current.dtype))
        moved = step.apply(self.current, velocity, local_lr, self.initial)
        low, high = map(float, torch.aminmax(moved))
        if not -math.inf < low <= high < math.inf:  # false for NaN too
            raise ValueError("the model would not stay finite")
        if self.layout.is_rounded:
            self._check_rounded(moved)
        self.velocity = velocity if step.momentum else None
        self.current, self._arrays, self._sent = moved, None, None

    def _check_rounded(self, vector: torch.Tensor) -> None:
        state = self.layout.unflatten(vector, self.buffers)
        for name in self.layout.trainable:
            if not np.isfinite(state[name]).all():
                kind = "bfloat16" if name in self.layout.bfloat16 else self.layout.dtypes[name]
                raise ValueError(f"{name!r} would not stay finite in {kind}")

    def average_statistics(self, rows: np.ndarray, weights: np.ndarray) -> None:
        """The statistics become the mean of the clients' `rows` [K, s] with `weights` [K] >= 0."""
        if rows.shape[1] == 0 or not weights.sum() > 0:
            return
        mean = self.statistics + (weights / weights.sum()) @ (rows - self.statistics)
        kept = rows[weights > 0]
        # Equal ones are averaged to the last bit, and none leaves the range of its dtype.
        self.statistics = np.clip(mean, kept.min(axis=0), kept.max(axis=0))
        self._arrays = self._sent = None
