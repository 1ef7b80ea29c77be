"""A bound on every client's update, given in gradient or in parameter units."""

from dataclasses import dataclass
from numbers import Real
from typing import Literal

import torch

Units = Literal["gradient", "parameter"]


_FLOAT32 = torch.finfo(torch.float32)


def check_float32(name: str, value: float) -> None:
    """Raises ValueError unless `value` is a positive number that float32 holds in full precision:
    products of smaller ones come out too long or are 0, of larger ones infinite."""
    if not _FLOAT32.smallest_normal <= value <= _FLOAT32.max:
        raise ValueError(
            f"{name} = {value:g} is not allowed: {_FLOAT32.smallest_normal:.3g} to "
            f"{_FLOAT32.max:.3g}, which float32 holds in full precision"
        )


@dataclass(frozen=True)
class ClipNorm:
    """A threshold C with its unit. C_parameter = η_l · C_gradient, since Δ_i = −η_l u_i.

    "gradient": u_i = (w_t − w_i)/η_l, the sum of K gradients. "parameter": Δ_i = w_i − w_t.
    Raises ValueError unless the value is a positive number, and the unit one of the two.
    """

    value: float
    units: Units = "gradient"

    def __post_init__(self) -> None:
        if not (isinstance(self.value, Real) and self.value > 0):
            raise ValueError(f"clip_norm = {self.value!r} is not allowed: a number greater than 0")
        if self.units not in ("gradient", "parameter"):
            raise ValueError(f"clip_units = {self.units!r} is not allowed: gradient or parameter")
        object.__setattr__(self, "value", float(self.value))

    def in_gradient_units(self, local_lr: float) -> float:
        """The threshold for u_i at the local learning rate η_l = `local_lr`.

        Raises ValueError where float64 has no such number.
        """
        bound = self.value if self.units == "gradient" else self.value / local_lr
        if not bound > 0:
            raise ValueError(
                f"clip_norm = {self.value} is not allowed at local rate {local_lr}: in gradient "
                f"units it is {bound}"
            )
        return bound
