"""The mean: no protection at all, the rule the others are measured against."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .aggregate import Aggregate, RoundOfRule, as_updates, weighted_sum


def mean(updates: Any, weights: Any = None) -> Aggregate:
    """Σ_i p_i u_i with p_i = weights_i / Σ_j weights_j, or 1/K without weights.

    Args:
        updates: float [K, d], gradient units.
        weights: finite and non-negative [K], such as the clients' numbers of examples.

    Returns:
        The aggregate; its weights are the p_i.

    Raises:
        ValueError: for K = 0, unusable updates, weights of another shape, negative or non-finite
            weights, or weights that are all zero.
    """
    values = as_updates(updates)
    shares = np.full(len(values), 1 / len(values)) if weights is None else _shares(weights, values)
    vector = weighted_sum(values, shares)
    return Aggregate(vector, torch.from_numpy(shares), torch.from_numpy(shares > 0))


def weighted_mean(
    updates: Tensor,
    weights: Tensor,
    at: RoundOfRule,  # noqa: ARG001 (whatever the round)
) -> Aggregate:
    """Σ weights_i u_i."""
    return mean(updates, weights)


def _shares(weights: Any, values: Tensor) -> np.ndarray:
    raw = torch.as_tensor(weights, dtype=torch.float64).detach().numpy()
    if raw.shape != (len(values),):
        raise ValueError(f"weights must have the shape [{len(values)}]: got {list(raw.shape)}")
    if not np.isfinite(raw).all() or (raw < 0).any():
        raise ValueError(f"weights must be finite and not negative: got {raw.tolist()}")
    if not raw.any():
        raise ValueError("weights must not all be zero")
    # Divided by the largest first, so that the sum cannot overflow.
    raw = raw / raw.max()
    return raw / raw.sum()
