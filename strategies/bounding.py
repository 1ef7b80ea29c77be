"""Bounding the length of updates: clip(z, c) and norm(z, c) over whole flattened rows.

Used by FAT-Clipping (clip in Algorithms 1 and 2), CE-FedAvg (Δ̂ = clip(Δ, c)), DP-FedAvg and
DP-NormFedAvg (g = clip(u, C) and norm(u, C)). All norms are L2 norms accumulated in float64.

A row that holds NaN or an infinity has no length: it comes back as a row of NaN, so that the
screening of replies finds and drops it, whoever sent it. It never passes as a short row.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

# Rows are widened to float64 a block at a time: 2^20 numbers are 8 MiB.
_BLOCK_NUMBERS = 1 << 20
# Outside of this range the square of a float64 norm over- or underflows.
_SAFE_NORMS = (1e-140, 1e140)


def row_norms(updates: Any) -> Tensor:
    """‖u_i‖ for every row, float64 [K] (or a scalar tensor for a single [d])."""
    rows, single = _as_rows(updates)
    norms = torch.empty(len(rows), dtype=torch.float64)
    for block in _row_blocks(rows):
        norms[block] = _norms(rows[block].to(torch.float64))
    return norms[0] if single else norms


def clip_factors(updates: Any, bound: float) -> Tensor:
    """The factors min(1, c / ‖u_i‖) of clip(u_i, c), 1 for a zero row, NaN for a non-finite one.

    Args:
        updates: float tensor [K, d], or a single [d].
        bound: c > 0 in the units of the updates; infinity clips nothing.

    Returns:
        float64 [K], or a scalar tensor for a single [d].

    Raises:
        ValueError: when the bound is not positive or the updates are not a float [K, d] or [d].
    """
    _check_bound(bound, finite=False)
    return _clip_factors(row_norms(updates), bound)


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
    rows, single = _as_rows(updates)
    return _scaled(rows, _clip_factors(row_norms(rows), bound), single)


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
    rows, single = _as_rows(updates)
    norms = row_norms(rows)
    factors = torch.where(norms > 0, bound / norms, torch.zeros_like(norms))
    return _scaled(rows, factors.masked_fill(~norms.isfinite(), torch.nan), single)


def _clip_factors(norms: Tensor, bound: float) -> Tensor:
    return (bound / norms).clamp(max=1.0).masked_fill(~norms.isfinite(), torch.nan)


def _scaled(rows: Tensor, factors: Tensor, single: bool) -> Tensor:
    # The product is formed in float64: a factor for a row of 1e38 is no normal float32.
    result = rows.clone()
    for block in _row_blocks(rows):
        for index in range(block.start, block.stop):
            if factors[index] != 1.0:
                result[index] = (rows[index].to(torch.float64) * factors[index]).to(rows.dtype)
    return result[0] if single else result


def _norms(rows: Tensor) -> Tensor:
    norms = torch.linalg.vector_norm(rows, dim=1)
    low, high = _SAFE_NORMS
    unsafe = (norms < low) | (norms > high)
    if not unsafe.any():
        return norms
    scale = rows.abs().amax(dim=1, keepdim=True)
    scaled = rows / scale.masked_fill((scale == 0) | ~scale.isfinite(), 1.0)
    careful = torch.linalg.vector_norm(scaled, dim=1) * scale[:, 0]
    return torch.where(unsafe, careful, norms)


def _row_blocks(rows: Tensor) -> Iterator[slice]:
    size = max(1, _BLOCK_NUMBERS // rows.shape[1])
    for start in range(0, len(rows), size):
        yield slice(start, min(start + size, len(rows)))


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
