"""Changing updates before a robust rule sees them: honest ones look more alike, none is very long.

All are linear: new row n is Σ_i M_ni u_i with M a matrix [n, K], float64, which the functions here
give. They compose with every rule, `rule(mix(updates, matrix), b)` with the same b; `trace_back`
says what the original rows counted for in the result.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..bounding import row_norms
from .aggregate import Aggregate, as_updates, check_minority, column_blocks
from .gram import gram_matrix, squared_distances


def nearest_neighbours(
    updates: Any,
    num_corrupt: int,
    generator: np.random.Generator | None = None,  # noqa: ARG001 (nothing is drawn)
) -> Tensor:
    """Nearest-neighbour mixing (Allouah et al., AISTATS 2023, Algorithm 2): each row becomes the
    mean of the K − b rows nearest to it, itself included; ties go to the lower row number.

    The matrix [K, K]. Raises ValueError for K = 0, unusable updates, or 2b >= K.
    """
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


def adaptive_clipping(
    updates: Any,
    num_corrupt: int,
    generator: np.random.Generator | None = None,  # noqa: ARG001 (nothing is drawn)
) -> Tensor:
    """Adaptive robust clipping, ARC (Allouah et al., ICLR 2025): the k = ⌊2 (b/K) (K − b)⌋ longest
    rows are clipped to the length of the next one.

    The diagonal matrix [K, K]. Raises ValueError for K = 0, unusable updates, or 2b >= K.
    """
    values = as_updates(updates)
    num_rows = len(values)
    check_minority("adaptive clipping", num_corrupt, num_rows)
    norms = row_norms(values)
    # In integers: 2 b (K − b)/K in binary can come out just below a whole number.
    clipped = 2 * num_corrupt * (num_rows - num_corrupt) // num_rows
    length = torch.sort(norms).values[num_rows - clipped - 1]
    return torch.diag(torch.where(norms > length, length / norms, 1.0))


def equal_lengths(
    updates: Any,
    num_corrupt: int,  # noqa: ARG001 (below half of them, the median length is an honest one's)
    generator: np.random.Generator | None = None,  # noqa: ARG001 (nothing is drawn)
) -> Tensor:
    """Every row is scaled to the median length of all; rows of zeros stay.

    Where clients are unlike, the mean of the honest updates is far shorter than each: an attacker
    who has to be as long as they are, to undo that mean, is long in one direction where they are
    not, and a filter that looks for such directions (`caf`) finds it.

    The diagonal matrix [K, K]. Raises ValueError for K = 0 or unusable updates.
    """
    norms = row_norms(as_updates(updates)).to(torch.float64)
    return torch.diag(torch.where(norms > 0, torch.quantile(norms, 0.5) / norms, 0.0))


@dataclass(frozen=True)
class Buckets:
    """Bucketing (Karimireddy, He, Jaggi, ICLR 2022, Algorithm 1): the means of buckets of `size` s
    rows, drawn afresh each round; the last bucket may be smaller.

    b corrupt rows spoil at most b of the buckets. Where fewer than `size` updates came, they are
    one bucket. Raises ValueError for a size below 1.
    """

    size: int = 2

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size = {self.size} is not allowed: at least 1")

    def __call__(
        self,
        updates: Any,
        num_corrupt: int,  # noqa: ARG002 (see above)
        generator: np.random.Generator,
    ) -> Tensor:
        """The matrix [⌈K/s⌉, K]."""
        order = generator.permutation(len(updates))
        buckets = [order[i : i + self.size] for i in range(0, len(order), self.size)]
        matrix = torch.zeros(len(buckets), len(order), dtype=torch.float64)
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
    return replace(aggregate, weights=aggregate.weights @ matrix, survivors=(kept @ matrix) > 0)
