"""The geometric median by the smoothed Weiszfeld algorithm (Pillutla et al., IEEE TSP 2022)."""

from typing import Any

import numpy as np
import torch

from .aggregate import Aggregate, as_updates, check_minority, weighted_sum
from .gram import centred_gram_matrix, distances_to, squared_distances


def geometric_median(
    updates: Any,
    num_corrupt: int = 0,
    *,
    smoothing: float = 1e-6,
    tolerance: float = 1e-9,
    max_iterations: int = 1000,
) -> Aggregate:
    """argmin_z Σ_i ‖z − u_i‖, as z = Σ_i a_i u_i with Σ a_i = 1.

    Weiszfeld's iteration a_i ∝ 1 / max(ν, ‖z − u_i‖) needs only the Gram matrix of the updates,
    so that one iteration is K×K whatever d is. It starts from the mean of the rows nearest to
    the most central row, so that huge corrupt rows cost no iterations.

    Args:
        updates: float [K, d], gradient units.
        num_corrupt: b, only checked: the geometric median tolerates any minority.
        smoothing: ν in units of the median distance from the most central row to the others.
        tolerance: stop when z moves by less than this, in the same units.
        max_iterations: stop after so many iterations at the latest.

    Returns:
        The aggregate; its weights are the a_i.

    Raises:
        ValueError: for K = 0, unusable updates, 2b >= K, or numbers that are not positive.
    """
    for name, value in (("smoothing", smoothing), ("tolerance", tolerance)):
        if not 0 < value < float("inf"):
            raise ValueError(f"{name} must be positive and finite: got {value}")
    if max_iterations < 1:
        raise ValueError(f"max_iterations must be at least 1: got {max_iterations}")
    values = as_updates(updates)
    check_minority("geometric-median", num_corrupt, len(values))
    gram = centred_gram_matrix(values)
    start, scale = _central_start(gram)
    weights, iterations = _weiszfeld(gram, start, scale, smoothing, tolerance, max_iterations)
    vector = weighted_sum(values, weights)
    return Aggregate(vector, torch.from_numpy(weights), torch.from_numpy(weights > 0), iterations)


def _central_start(gram: np.ndarray) -> tuple[np.ndarray, float]:
    """Uniform coefficients over the majority nearest to the most central row, and its radius."""
    distances = np.sqrt(squared_distances(gram))
    radii = np.sort(distances, axis=1)[:, len(gram) // 2]
    centre = int(np.argmin(radii))
    near = distances[centre] <= radii[centre]
    return near / near.sum(), float(radii[centre])


def _weiszfeld(
    gram: np.ndarray,
    start: np.ndarray,
    scale: float,
    smoothing: float,
    tolerance: float,
    max_iterations: int,
) -> tuple[np.ndarray, int]:
    if scale == 0:  # more than half of the rows are one point: that is the median
        return start, 0
    weights = start
    iterations = 0
    while iterations < max_iterations:
        inverse = 1 / np.maximum(distances_to(gram, weights), smoothing * scale)
        update = inverse / inverse.sum()
        step = update - weights
        weights = update
        iterations += 1
        if np.sqrt(max(step @ gram @ step, 0.0)) <= tolerance * scale:
            break
    return weights, iterations
