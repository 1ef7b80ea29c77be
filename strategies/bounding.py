"""Bounding the length of updates: thresholds with their units, clip(z, c) and norm(z, c) over whole
flattened rows.

Used by FAT-Clipping (clip in Algorithms 1 and 2), CE-FedAvg (Δ̂ = clip(Δ, c)), DP-FedAvg and
DP-NormFedAvg (g = clip(u, C) and norm(u, C)). All norms are L2 norms accumulated in float64.

A row that holds NaN or an infinity has no length: it comes back as a row of NaN, so that the
screening of replies finds and drops it, whoever sent it. It never passes as a short row.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from numbers import Real
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from blackthorn.settings.catalogue import Units
from blackthorn.settings.derived import clip_units
from blackthorn.settings.keys import Keys

# Rows are widened to float64 a block at a time: 2^20 numbers are 8 MiB.
_BLOCK_NUMBERS = 1 << 20
# Outside of this range the square of a float64 norm over- or underflows.
_SAFE_NORMS = (1e-140, 1e140)
_FLOAT32 = torch.finfo(torch.float32)


def row_norms(updates: Any) -> Tensor:
    """‖u_i‖ for every row, float64 [K] (or a scalar tensor for a single [d])."""
    rows, single = _as_rows(updates)
    norms = np.empty(rows.shape[0])
    with _quiet():
        for part in _blocks(rows):
            norms[part] = _norms(rows.numpy()[part].astype(np.float64))
    return torch.from_numpy(norms)[0] if single else torch.from_numpy(norms)


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

    @classmethod
    def of(cls, config: Keys) -> Self:
        """The run configuration's."""
        return cls(config.clip_norm, clip_units(config))

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

    def scale(self, local_lr: float) -> float:
        """What gradient units are multiplied by to be the threshold's."""
        return 1.0 if self.units == "gradient" else local_lr


def check_bound(bound: float, local_lr: float) -> None:
    """Raises ValueError where float32 does not hold a bound in both units."""
    check_float32("the server's bound", bound)
    check_float32("the server's bound x local-lr", bound * local_lr)


@dataclass(frozen=True)
class NormBound:
    """The largest norm of an honest client's update, in gradient units (infinity: any).

    `roundings`: how often an honest client rounds its model after it has bounded its influence.
    """

    norm: float
    roundings: int = 1

    def exceeded(
        self, updates: Tensor, model: Tensor, local_lr: float, precision: float = 0.0
    ) -> Tensor:
        """Which updates u [K, d] are longer than an honest one's, beyond rounding: bool [K].

        `model` is w_t [d], `local_lr` η_l, `precision` the machine epsilon of what clients compute
        in, where that is coarser than the model's.
        """
        # w_i = w_t - η_l u_i was rounded to the model's precision on its way here: where the steps
        # are small, every time in the same direction.
        length = float(row_norms(model[None])) / local_lr + self.norm
        rounding = self.roundings * max(precision, torch.finfo(model.dtype).eps) * length
        return row_norms(updates) > self.norm * (1 + 1e-5) + rounding


def clip(updates: Any, bound: float) -> Tensor:
    """clip(u_i, c) = u_i · min(1, c / ‖u_i‖), row by row, in a new tensor.

    Args:
        updates: float tensor [K, d], or a single [d]; left as it is.
        bound: c > 0 in the units of the updates; infinity clips nothing.

    Returns:
        The same shape and dtype. Rows within the bound are unchanged to the last bit.

    Raises:
        ValueError: when the bound is not positive or the updates are not a float [K, d] or [d].
    """
    _check_bound(bound, finite=False)
    return _scaled(updates, lambda norms: _clip_factors(norms, bound))


def normalize(updates: Any, bound: float) -> Tensor:
    """norm(u_i, c) = c · u_i / ‖u_i‖, and 0 for a zero row, in a new tensor.

    Args:
        updates: float tensor [K, d], or a single [d]; left as it is.
        bound: the common length 0 < c < ∞, in the units of the updates.

    Returns:
        The same shape and dtype; each row has length c or is zero.

    Raises:
        ValueError: when the bound is not positive and finite or the updates are not a float
            [K, d] or [d].
    """
    _check_bound(bound, finite=True)
    return _scaled(updates, lambda norms: _normalizing_factors(norms, bound))


def _clip_factors(norms: np.ndarray, bound: float) -> np.ndarray:
    return np.where(norms < np.inf, np.minimum(bound / norms, 1.0), np.nan)


def _normalizing_factors(norms: np.ndarray, bound: float) -> np.ndarray:
    factors = np.where(norms == 0, 0.0, bound / norms)
    return np.where(norms < np.inf, factors, np.nan)


def _scaled(updates: Any, factors: Callable[[np.ndarray], np.ndarray]) -> Tensor:
    """Every row times its factor, which ``factors`` gives from the rows' norms, in a new tensor.

    The product is formed in float64: a factor for a row of 1e38 is no normal float32. A factor of
    1 leaves a row as it is to the last bit.
    """
    rows, single = _as_rows(updates)
    result = torch.empty_like(rows)
    # In NumPy, whose calls cost a tenth of PyTorch's: at every local step of FAT-Clipping-PI the
    # rows are few and often short.
    source, target = rows.numpy(), result.numpy()
    with _quiet():
        for part in _blocks(rows):
            wide = source[part].astype(np.float64)
            target[part] = wide * factors(_norms(wide))[:, None]
    return result[0] if single else result


def _norms(rows: np.ndarray) -> np.ndarray:
    """Norms [K] of float64 rows [K, d]; NaN or infinite for a row that is not finite."""
    norms = np.sqrt(np.einsum("ij,ij->i", rows, rows))
    low, high = _SAFE_NORMS
    unsafe = ~((norms >= low) & (norms <= high))
    if unsafe.any():
        scale = np.abs(rows[unsafe]).max(axis=1)
        scaled = rows[unsafe] / np.where((scale > 0) & (scale < np.inf), scale, 1.0)[:, None]
        norms[unsafe] = np.sqrt(np.einsum("ij,ij->i", scaled, scaled)) * scale
    return norms


def _quiet() -> np.errstate:
    # What is not finite is the caller's answer, not an accident.
    return np.errstate(all="ignore")


def _blocks(rows: Tensor) -> Iterator[slice]:
    size = max(1, _BLOCK_NUMBERS // rows.shape[1])
    for start in range(0, rows.shape[0], size):
        yield slice(start, min(start + size, rows.shape[0]))


def _as_rows(updates: Any) -> tuple[Tensor, bool]:
    tensor = torch.as_tensor(updates).detach()
    if tensor.ndim not in (1, 2) or tensor.shape[-1] == 0:
        raise ValueError(
            f"updates must have the shape [K, d] or [d] with d >= 1: got {list(tensor.shape)}"
        )
    if tensor.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"updates must be float32 or float64: got {tensor.dtype}")
    return (tensor[None], True) if tensor.ndim == 1 else (tensor, False)


def _check_bound(bound: float, *, finite: bool) -> None:
    if not bound > 0 or (finite and bound == float("inf")):
        allowed = "positive and finite" if finite else "positive (infinity clips nothing)"
        raise ValueError(f"bound must be {allowed}: got {bound}")
