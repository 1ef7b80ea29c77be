"""Bounding the length of updates: clip(z, c) and norm(z, c) over whole flattened rows.

Used by FAT-Clipping (clip in Algorithms 1 and 2), CE-FedAvg (Δ̂ = clip(Δ, c)), DP-FedAvg and
DP-NormFedAvg (g = clip(u, C) and norm(u, C)). All norms are L2 norms accumulated in float64.

A row that holds NaN or an infinity has no length: it comes back as a row of NaN, so that the
screening of replies finds and drops it, whoever sent it. It never passes as a short row.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Rows are widened to float64 a block at a time: 2^20 numbers are 8 MiB.
_BLOCK_NUMBERS = 1 << 20
# Outside of this range the square of a float64 norm over- or underflows.
_SAFE_NORMS = (1e-140, 1e140)


def row_norms(updates: Any) -> Tensor:
    """‖u_i‖ for every row, float64 [K] (or a scalar tensor for a single [d])."""
    rows, single = _as_rows(updates)
    norms = np.empty(rows.shape[0])
    with _quiet():
        for part in _blocks(rows):
            norms[part] = _norms(rows.numpy()[part].astype(np.float64))
    return torch.from_numpy(norms)[0] if single else torch.from_numpy(norms)


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
        if self.norm == math.inf:
            return torch.zeros(len(updates), dtype=torch.bool)
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
