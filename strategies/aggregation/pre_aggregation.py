"""Changing updates before a robust rule sees them: honest ones look more alike, none is very long.

All are linear: new row n is Σ_i M_ni u_i with M a matrix [n, K]. They compose with every rule,
`rule(nearest_neighbour_mixing(updates, b), b)`; `trace_back` says what the original rows counted
for in the result.
"""

import dataclasses
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..bounding import row_norms
from .aggregate import Aggregate, as_updates, check_minority
from .blocks import column_blocks
from .gram import gram_matrix, squared_distances


def nearest_neighbour_mixing(updates: Any, num_corrupt: int) -> Tensor:
    """Replaces each row by the mean of the K − b rows nearest to it, itself included.

    Allouah et al., AISTATS 2023, Algorithm 2. Ties go to the lower row number.

    Args:
        updates: float [K, d].
        num_corrupt: b, the assumed number of corrupt rows, also for the rule that follows.

    Returns:
        [K, d] in the dtype of the updates.

    Raises:
        ValueError: for K = 0, unusable updates, or 2b >= K.
    """
    return mix(updates, nearest_neighbour_matrix(updates, num_corrupt))


def bucketing(updates: Any, bucket_size: int, generator: np.random.Generator) -> Tensor:
    """The means of random buckets of s rows; the last bucket may be smaller.

    Karimireddy, He, Jaggi, ICLR 2022, Algorithm 1. b corrupt rows spoil at most b of the
    ⌈K/s⌉ buckets: give the rule that follows the same b.

    Args:
        updates: float [K, d].
        bucket_size: s, from 1 to K.
        generator: draws the permutation of the rows.

    Returns:
        [⌈K/s⌉, d] in the dtype of the updates.

    Raises:
        ValueError: for K = 0, unusable updates, or bucket_size out of range.
    """
    values = as_updates(updates)
    return mix(values, bucket_matrix(len(values), bucket_size, generator))


def adaptive_clipping(updates: Any, num_corrupt: int) -> Tensor:
    """Clips the k = ⌊2 (b/K) (K − b)⌋ longest rows to the length of the next one, ARC.

    Allouah et al., ICLR 2025, "Adaptive Gradient Clipping for Robust Federated Learning".

    Args:
        updates: float [K, d].
        num_corrupt: b, the assumed number of corrupt rows, also for the rule that follows.

    Returns:
        [K, d] in the dtype of the updates.

    Raises:
        ValueError: for K = 0, unusable updates, or 2b >= K.
    """
    return mix(updates, adaptive_clipping_matrix(updates, num_corrupt))


def adaptive_clipping_matrix(updates: Any, num_corrupt: int) -> Tensor:
    """The diagonal matrix [K, K] of `adaptive_clipping`, float64."""
    values = as_updates(updates)
    num_rows = len(values)
    check_minority("adaptive clipping", num_corrupt, num_rows)
    norms = row_norms(values)
    # In integers: 2 b (K − b)/K in binary can come out just below a whole number.
    clipped = 2 * num_corrupt * (num_rows - num_corrupt) // num_rows
    length = torch.sort(norms).values[num_rows - clipped - 1]
    return torch.diag(torch.where(norms > length, length / norms, 1.0))


def nearest_neighbour_matrix(updates: Any, num_corrupt: int) -> Tensor:
    """The matrix [K, K] of `nearest_neighbour_mixing`, float64."""
    values = as_updates(updates)
    num_rows = len(values)
    check_minority("nearest-neighbour mixing", num_corrupt, num_rows)
    distances = squared_distances(gram_matrix(values))
    # A row is the nearest to itself, whatever rounding says of its twins.
    np.fill_diagonal(distances, -1.0)
    nearest = np.argsort(distances, axis=1, kind="stable")[:, : num_rows - num_corrupt]
    matrix = np.zeros((num_rows, num_rows))
    np.put_along_axis(matrix, nearest, 1 / nearest.shape[1], axis=1)
    return torch.from_numpy(matrix)


def bucket_matrix(num_updates: int, bucket_size: int, generator: np.random.Generator) -> Tensor:
    """The matrix [⌈K/s⌉, K] of `bucketing`, float64."""
    if not 1 <= bucket_size <= num_updates:
        raise ValueError(f"bucket_size must lie between 1 and K = {num_updates}: got {bucket_size}")
    order = generator.permutation(num_updates)
    buckets = [order[i : i + bucket_size] for i in range(0, num_updates, bucket_size)]
    matrix = torch.zeros(len(buckets), num_updates, dtype=torch.float64)
    for row, bucket in enumerate(buckets):
        matrix[row, torch.from_numpy(bucket)] = 1 / len(bucket)
    return matrix


def mix(updates: Any, matrix: Tensor) -> Tensor:
    """M U, [n, d] in the dtype of the updates [K, d], for a matrix M [n, K] in float64."""
    values = as_updates(updates)
    source, weights = values.numpy(), matrix.numpy()
    result = torch.empty(len(weights), values.shape[1], dtype=values.dtype)
    for block in column_blocks(max(weights.shape), values.shape[1], 8):
        # A product with zeros is no product: rows outside of a mixture must not round it.
        result.numpy()[:, block] = weights @ source[:, block].astype(np.float64)
    return result


def trace_back(aggregate: Aggregate, matrix: Tensor) -> Aggregate:
    """The aggregate of mixed rows, told in terms of the original ones.

    An original row's weight is Σ_n w_n M_ni, and it survives if a surviving row contains it.
    """
    kept = aggregate.survivors.to(torch.float64)
    return dataclasses.replace(
        aggregate, weights=aggregate.weights @ matrix, survivors=(kept @ matrix) > 0
    )
