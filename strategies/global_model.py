"""The global model and its step w_{t+1} = Proj( w_t − η_g η_l · momentum( agg(u_i) ) )."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from flwr.app import ArrayRecord

from .array_codec import encode_state
from .layout import ModelLayout


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
    """w_t [d] (`current`), w_1 (`initial`), v_t (`velocity`); buffers keep the server's value."""

    layout: ModelLayout
    buffers: dict[str, np.ndarray]
    initial: torch.Tensor
    current: torch.Tensor
    velocity: torch.Tensor | None = None
    _arrays: ArrayRecord | None = None

    @classmethod
    def of(cls, arrays: ArrayRecord) -> "GlobalModel":
        """Model of a state_dict in Flower's form. Raises ValueError if nothing is trainable."""
        state = {name: array.numpy() for name, array in arrays.items()}
        layout = ModelLayout.of(state)
        vector = layout.flatten(state)
        buffers = {name: value for name, value in state.items() if name not in layout.trainable}
        return cls(layout, buffers, vector, vector)

    def arrays(self) -> ArrayRecord:
        """The model as a state_dict in Flower's form (the same object until the model moves)."""
        if self._arrays is None:
            self._arrays = self.arrays_of(self.current)
        return self._arrays

    def arrays_of(self, vector: torch.Tensor) -> ArrayRecord:
        """Another model w [d] in Flower's form, with the same buffers."""
        return encode_state(self.layout.unflatten(vector, self.buffers))

    def vector(self, arrays: ArrayRecord) -> torch.Tensor:
        """w [d] of a model in Flower's form."""
        return self.layout.flatten({name: array.numpy() for name, array in arrays.items()})

    def issued(self, arrays: ArrayRecord) -> bool:
        """Whether `arrays` is what `arrays()` handed out."""
        return arrays is self._arrays

    def update(self, local: torch.Tensor, local_lr: float) -> torch.Tensor:
        """u_i = (w_t − w_i)/η_l [d] of the local model w_i, in gradient units."""
        return (self.current - local).div_(local_lr)

    def update_of_state(
        self, state: Mapping[str, np.ndarray], local_lr: float, row: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`update` of a local state_dict, written into `row` [d] where one is given."""
        row = torch.empty_like(self.current) if row is None else row
        current, out, start = self.current.numpy(), row.numpy(), 0
        with np.errstate(over="ignore"):  # who screens sees what became infinite
            for name in self.layout.trainable:
                local = state[name].reshape(-1)
                own = slice(start, start + len(local))
                np.subtract(current[own], local, out=out[own])
                start += len(local)
            np.divide(out, local_lr, out=out)
        return row

    def moving_parts(self) -> dict[str, np.ndarray]:
        """Views of w_t and, where there is one, v_t: what `restore` needs in another process."""
        parts = {"model": self.current}
        if self.velocity is not None:
            parts["velocity"] = self.velocity
        return {name: part.numpy() for name, part in parts.items()}

    def restore(self, parts: Mapping[str, np.ndarray]) -> None:
        """Go on from `moving_parts`; w_1 and the buffers stay those of the initial model.

        Raises ValueError for vectors of another model.
        """
        for name, part in parts.items():
            if part.shape != tuple(self.initial.shape) or part.dtype != self.initial.numpy().dtype:
                raise ValueError(
                    f"{name} is {part.dtype}{list(part.shape)}, of the model it would be "
                    f"{self.initial.numpy().dtype}{list(self.initial.shape)}"
                )
        self.current = torch.from_numpy(parts["model"].copy())
        velocity = parts.get("velocity")
        self.velocity = None if velocity is None else torch.from_numpy(velocity.copy())
        self._arrays = None

    def step(self, step: ServerStep, aggregate: torch.Tensor, local_lr: float) -> None:
        """Move w by the server step with the aggregate [d] in gradient units.

        Raises ValueError, and leaves everything as it was, if w would not stay finite.
        """
        velocity = step.velocity(self.velocity, aggregate.to(self.current.dtype))
        moved = step.apply(self.current, velocity, local_lr, self.initial)
        low, high = map(float, torch.aminmax(moved))
        if not -math.inf < low <= high < math.inf:  # false for NaN too
            raise ValueError("the model would not stay finite")
        self.velocity = velocity if step.momentum else None
        self.current, self._arrays = moved, None
