"""The server step w_{t+1} = Proj( w_t − η_g η_l · momentum( agg(u_i) ) ), in gradient units."""

import math
from dataclasses import dataclass

import torch


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
