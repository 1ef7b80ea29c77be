"""The K×K Gram matrix of updates: all that distance-based rules need to know of them."""

import numpy as np
import torch
from torch import Tensor

from .aggregate import check_finite, column_blocks

# Numbers up to which float64 is as good as free.
_SMALL = 1 << 20
# Columns of one float32 product, and the most entries that the products of one call have.
_PANEL = 4096
_PRODUCTS = 1 << 22
# A float32 product is trusted where the distances inside the majority, squared, are no less than
# this share of the squared lengths that they are the difference of.
_TRUSTED_SHARE = 0.01
# Mean square of a coordinate above which products that underflow in float32 do not count.
_LEAST_SQUARE = 1e-31
# Rows this close, in units of their squared length, may be the same row twice.
_SAME_SHARE = 1e-4


def gram_matrix(values: Tensor, rows: np.ndarray | None = None) -> np.ndarray:
    """G_ij = ⟨u_i − c, u_j − c⟩ about some c, float64, in one fast product where that is safe.

    `plain_gram_matrix` where it can be trusted, else `centred_gram_matrix`.

    Args:
        values: float32 or float64 [K, d], not checked yet for values that are not finite.
        rows: int [n], the rows to take; all by default.

    Returns:
        float64 [n, n], symmetric.

    Raises:
        ValueError: for updates that are not finite, as `check_finite`.
    """
    gram = plain_gram_matrix(values, rows)
    if gram is None:
        check_finite(values)
        gram = centred_gram_matrix(values, rows)
    return gram


def plain_gram_matrix(values: Tensor, rows: np.ndarray | None = None) -> np.ndarray | None:
    """G_ij = ⟨u_i, u_j⟩ [n, n] at the speed of one float32 product, or None.

    The products are formed in float32 over panels of columns and added up in float64. Their
    rounding, some 1e-7 of the rows' lengths, is nothing beside the distances of rows that lie
    well apart; rows that are equal have equal entries.

    None where that does not hold: where the products overflow, underflow or are not finite, where
    what most rows have in common is more than ten times what tells them apart, for float64, and
    for updates so small that float64 costs nothing.
    """
    if values.dtype != torch.float32 or values.numel() <= _SMALL:
        return None
    gram = _panel_products(values, rows)
    return _with_equal_rows(gram, values, rows) if _is_trusted(gram, values.shape[1]) else None


def centred_gram_matrix(
    values: Tensor, rows: np.ndarray | None = None, centre: Tensor | None = None
) -> np.ndarray:
    """G_ij = ⟨u_i − c, u_j − c⟩, float64, exact whatever the updates have in common.

    Differences and products are formed in float64, where the square of the largest float32 is
    far from overflow: rows of 1e25 need no scale and leave the products of the other rows exact.
    The centre matters for the accuracy, as distances are differences of entries of G: a large
    part common to all updates must be gone before they are squared. By default c is the
    coordinate-wise (lower) median of the rows. While fewer than half the rows are corrupt it lies
    between honest values in every coordinate, so no corrupt row can move it far from them; equal
    rows in the majority become exactly zero.

    Args:
        values: finite float32 or float64 [K, d].
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


def _panel_products(values: Tensor, rows: np.ndarray | None) -> np.ndarray:
    """U Uᵀ in float64, from float32 products of `_PANEL` columns each."""
    count = len(values) if rows is None else len(rows)
    panels = max(1, min(values.shape[1] // _PANEL, _PRODUCTS // count**2))
    total = np.zeros((count, count))
    start = 0
    while start < values.shape[1]:
        if values.shape[1] - start < _PANEL:
            panels, width = 1, values.shape[1] - start
        else:
            panels, width = min(panels, (values.shape[1] - start) // _PANEL), _PANEL
        part = values[:, start : start + panels * width]
        part = part if rows is None else part[torch.from_numpy(rows)]
        side_by_side = part.view(count, panels, width).transpose(0, 1)
        products = torch.bmm(side_by_side, side_by_side.transpose(1, 2))
        with np.errstate(invalid="ignore"):  # overflowed products: they will not be trusted
            total += np.add.reduce(products.numpy(), axis=0, dtype=np.float64)
        start += panels * width
    return total


def _is_trusted(gram: np.ndarray, dimension: int) -> bool:
    """Whether float32 products tell the rows of a majority apart.

    The majority are the rows nearest to the most central one. What the other rows are does not
    matter: nobody can be hidden by being far away.
    """
    if not np.isfinite(gram).all():
        return False
    distances = squared_distances(gram)
    majority = len(gram) // 2
    radii = np.partition(distances, majority, axis=1)[:, majority]
    centre = int(np.argmin(radii))
    largest = np.diag(gram)[distances[centre] <= radii[centre]].max()
    least = max(_TRUSTED_SHARE * float(largest), _LEAST_SQUARE * dimension)
    return bool(radii[centre] >= least)


def _with_equal_rows(gram: np.ndarray, values: Tensor, rows: np.ndarray | None) -> np.ndarray:
    """The same matrix with equal entries for equal rows, which rounding may have told apart."""
    index = np.arange(len(gram)) if rows is None else rows
    distances = squared_distances(gram)
    close = np.triu(distances <= _SAME_SHARE * np.diag(gram), 1)
    first = np.arange(len(gram))
    for row in np.flatnonzero(close.any(axis=0)):
        for twin in np.flatnonzero(close[:, row] & (first == np.arange(len(gram))))[:2]:
            if torch.equal(values[index[row]], values[index[twin]]):
                first[row] = twin
                break
    return gram[np.ix_(first, first)]
