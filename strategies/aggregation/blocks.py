"""Walking through a matrix [K, d] in blocks of columns, so that memory stays at a block."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

# A block that fits the second-level cache is up to twice as fast as one of 8 MiB. With very many
# rows a block still gets enough columns to be worth adding its K×K product to the sum.
_BLOCK_BYTES = 1 << 20
_LEAST_COLUMNS = 128
# Each holds up to six blocks at a time (Bulyan): together they stay below 100 MiB.
_MOST_THREADS = 16
# A block of a weighted sum is held in float64: 128 KiB stay in the nearer caches.
_SUM_TERMS = 8


def column_blocks(num_rows: int, num_columns: int, itemsize: int) -> Iterator[slice]:
    """Slices that cover the columns, each of 1 MiB of items or 128 columns, whichever is more."""
    size = max(_LEAST_COLUMNS, _BLOCK_BYTES // (num_rows * itemsize))
    for start in range(0, num_columns, size):
        yield slice(start, min(start + size, num_columns))


def over_sorted_columns(
    values: Tensor, rule: Callable[[np.ndarray], np.ndarray], rows: np.ndarray | None = None
) -> Tensor:
    """`rule` of every column's values in ascending order, [d] in the dtype of the values.

    A block of columns is copied to contiguous rows first: NumPy sorts those with vector
    instructions, and without Python's lock, so that torch's number of threads work side by side.

    Args:
        values: float [K, d].
        rule: from sorted rows [n, K], one for each column of a block, to [n].
        rows: int [k], the rows to take; all by default.
    """
    matrix = values.numpy()
    num_rows, num_columns = len(matrix) if rows is None else len(rows), matrix.shape[1]
    result = torch.empty(num_columns, dtype=values.dtype)
    out = result.numpy()

    def work(block: slice) -> None:
        part = matrix[:, block] if rows is None else matrix[rows, block]
        columns = np.array(part.T, order="C")  # always a copy: the updates stay as they are
        columns.sort(axis=1)
        out[block] = rule(columns)

    _side_by_side(work, column_blocks(num_rows, num_columns, matrix.itemsize))
    return result


def weighted_sum(
    values: Tensor, weights: np.ndarray, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Σ_i weights_i · values_i [d], accumulated in float64, row after row, and rounded once.

    Args:
        values: finite float [K, d].
        weights: float64 [K].
        dtype: of the sum; by default that of the values.
    """
    matrix = values.numpy()
    rows = np.flatnonzero(weights)
    # Rows that count for nothing are skipped where most do: else zeros cost less than a copy.
    few = 2 * len(rows) < len(weights)
    used = weights[rows] if few else weights
    result = torch.empty(matrix.shape[1], dtype=values.dtype if dtype is None else dtype)
    out = result.numpy()

    def work(block: slice) -> None:
        # Not a product: a BLAS wants all of it in float64, and starts threads of its own.
        part = matrix[rows, block] if few else matrix[:, block]
        # einsum goes through memory in its order: a transposed matrix would be rounded otherwise.
        if part.strides[1] != part.itemsize:
            part = np.ascontiguousarray(part)
        # A block at a time: all of it in float64 would take 80 MB for 1e7 parameters.
        out[block] = np.einsum("i,ij->j", used, part)

    _side_by_side(work, column_blocks(_SUM_TERMS, matrix.shape[1], 8))
    return result


def _side_by_side(work: Callable[[slice], None], blocks: Iterator[slice]) -> None:
    """`work` on every block, in as many threads as torch uses: NumPy lets go of Python's lock."""
    waiting = list(blocks)
    num_threads = min(len(waiting), torch.get_num_threads(), _MOST_THREADS)
    with ThreadPoolExecutor(num_threads) as threads:
        # They return nothing; going through them raises what one of them raised.
        for _ in threads.map(work, waiting):
            pass
