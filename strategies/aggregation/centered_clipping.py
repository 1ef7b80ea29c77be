"""Centred clipping (Karimireddy, He, Jaggi, ICML 2021)."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .aggregate import Aggregate, as_updates, check_minority, weighted_sum
from .coordinate_median import coordinate_median
from .gram import centred_gram_matrix, distances_to


def centered_clipping(
    updates: Any,
    num_corrupt: int = 0,
    *,
    radius: float | None = None,
    start: Any = None,
    iterations: int = 3,
) -> Aggregate:
    """v ← v + (1/K) Σ_i clip(u_i − v, τ), a fixed number of times.

    v stays a combination of the start and the updates, so the iterations run on the Gram matrix
    of u_i − start. The published proof assumes a start near the honest mean and at most a tenth
    of the rows corrupt; beyond that each corrupt row still moves v by at most τ/K an iteration.

    Args:
        updates: float [K, d], gradient units.
        num_corrupt: b, only checked: fewer than half.
        radius: τ > 0 in the units of the updates; by default the median distance of the updates
            to the start.
        start: v at the start, finite [d], such as the last round's aggregate; by default the
            coordinate-wise median.
        iterations: how often, at least 1.

    Returns:
        The aggregate; its weights are the coefficients of the updates, and what they lack to 1
        is the coefficient of the start.

    Raises:
        ValueError: for K = 0, unusable updates, 2b >= K, or another argument out of its range.
    """
    values = as_updates(updates)
    check_minority("centered-clipping", num_corrupt, len(values))
    if radius is not None and not radius > 0:
        raise ValueError(f"radius must be positive: got {radius}")
    if iterations < 1:
        raise ValueError(f"iterations must be at least 1: got {iterations}")
    origin = _as_start(coordinate_median(values).vector if start is None else start, values)
    gram = centred_gram_matrix(values, centre=origin)
    bound = float(np.median(np.sqrt(np.diag(gram)))) if radius is None else radius
    weights = np.zeros(len(values))
    for _ in range(iterations):
        distances = distances_to(gram, weights)
        factors = np.ones(len(values))
        far = distances > bound
        factors[far] = bound / distances[far]
        weights = weights * (1 - factors.mean()) + factors / len(values)
    vector = weighted_sum(values, weights, dtype=torch.float64) + (1 - weights.sum()) * origin
    survivors = torch.from_numpy(weights > 0)
    return Aggregate(vector.to(values.dtype), torch.from_numpy(weights), survivors, iterations)


def _as_start(start: Any, values: Tensor) -> Tensor:
    origin = torch.as_tensor(start, dtype=torch.float64).detach().cpu()
    if origin.shape != values.shape[1:] or not origin.isfinite().all():
        raise ValueError(
            f"start must be a finite vector [{values.shape[1]}]: got shape {list(origin.shape)}"
        )
    return origin
