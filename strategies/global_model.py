"""The global model and its step w_{t+1} = Proj( w_t − η_g η_l · momentum( agg(u_i) ) )."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from flwr.app import ArrayRecord
from torch import nn

from .array_codec import encode_state
from .layout import Entries, ModelLayout, Statistics, state_of


@dataclass(frozen=True)
class ServerStep:
    """Two-sided learning rate, heavy-ball momentum v ← βv + a, projection onto an L2 ball.

    `projection_radius` is the radius around the initial model; None: no projection.
    Raises ValueError for a rate or radius that is not positive, or momentum outside [0, 1).
    """

    server_lr: float = 1.0
    momentum: float = 0.0
    projection_radius: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.server_lr < math.inf:
            raise ValueError(f"server_lr = {self.server_lr} is not allowed: positive and finite")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum = {self.momentum} is not allowed: from 0, less than 1")
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
        """w_{t+1} [d] from w_t [d]; `initial` is w_1, the centre of the ball."""
        moved = velocity * (self.server_lr * local_lr)
        torch.sub(model, moved, out=moved)
        if self.projection_radius is None:
            return moved
        offset = (moved - initial).double()
        norm = float(torch.linalg.vector_norm(offset))
        if norm <= self.projection_radius:
            return moved
        return (initial.double() + offset * (self.projection_radius / norm)).to(model.dtype)


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
        as it was sent, which in half precision is a rounded one."""
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
        return self.vector(self.arrays()) if self.layout.is_half else self.current

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
        if self.layout.is_half:
            self._check_half(moved)
        self.velocity = velocity if step.momentum else None
        self.current, self._arrays, self._sent = moved, None, None

    def _check_half(self, vector: torch.Tensor) -> None:
        state = self.layout.unflatten(vector, self.buffers)
        for name in self.layout.trainable:
            if not np.isfinite(state[name]).all():
                raise ValueError(f"{name!r} would not stay finite in {self.layout.dtypes[name]}")

    def average_statistics(self, rows: np.ndarray, weights: np.ndarray) -> None:
        """The statistics become the mean of the clients' `rows` [K, s] with `weights` [K] >= 0."""
        if rows.shape[1] == 0 or not weights.sum() > 0:
            return
        mean = self.statistics + (weights / weights.sum()) @ (rows - self.statistics)
        kept = rows[weights > 0]
        # Equal ones are averaged to the last bit, and none leaves the range of its dtype.
        self.statistics = np.clip(mean, kept.min(axis=0), kept.max(axis=0))
        self._arrays = self._sent = None
