"""The K×K Gram matrix of centred updates: all that distance-based rules need to know of them."""

import numpy as np
from torch import Tensor

from .blocks import column_blocks


def gram_matrix(
    values: Tensor, rows: np.ndarray | None = None, centre: Tensor | None = None
) -> np.ndarray:
    """G_ij = ⟨u_i − c, u_j − c⟩, float64, in K² d operations and one pass over the updates.

    Differences and products are formed in float64, where the square of the largest float32 is
    far from overflow: rows of 1e25 need no scale and leave the products of the other rows exact.
    The centre matters for the accuracy, as distances are differences of entries of G: a large
    part common to all updates must be gone before they are squared. By default c is the
    coordinate-wise (lower) median of the rows. While fewer than half the rows are corrupt it lies
    between honest values in every coordinate, so no corrupt row can move it far from them; equal
    rows in the majority become exactly zero.

    Args:
        values: float32 or float64 [K, d].
        rows: int [n], the rows to take; all by default.
        centre: [d], another c.

    Returns:
        float64 [n, n], symmetric.
    """
    matrix = values.numpy()
    index = np.arange(len(matrix)) if rows is None else rows
    count, middle = len(index), (len(index) - 1) // 2
    total = np.zeros((count, count))
    wide: np.ndarray | None = None
    for block in column_blocks(count, matrix.shape[1], 8):
        columns = np.ascontiguousarray(matrix[index, block].T)
        given = None if centre is None else centre[block].numpy()
        offset = np.sort(columns, axis=1)[:, middle] if given is None else given
        if wide is None:
            wide = np.empty(columns.shape)
        centred = wide[: len(columns)]
        np.subtract(columns, offset[:, None], out=centred, dtype=np.float64)
        total += centred.T @ centred
    return total


def squared_distances(gram: np.ndarray) -> np.ndarray:
    """‖u_i − u_j‖² = G_ii + G_jj − 2 G_ij, [K, K], symmetric, never negative."""
    squares = np.diag(gram)
    distances = np.maximum(squares[:, None] + squares[None, :] - 2 * gram, 0.0)
    np.fill_diagonal(distances, 0.0)
    return distances


def distances_to(gram: np.ndarray, coefficients: np.ndarray) -> np.ndarray:
    """‖c_i − Σ_j a_j c_j‖ for every row, [K], c the centred rows and a the coefficients [K]."""
    products = gram @ coefficients
    return np.sqrt(np.maximum(np.diag(gram) - 2 * products + coefficients @ products, 0.0))
