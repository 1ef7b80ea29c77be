"""Walking through a matrix [K, d] in blocks of columns, so that memory stays at a block.

Up to 2^20 numbers NumPy's own loops do; beyond, those of kernels.py, whose first use in a process
takes longer than a small matrix. Both give the same to the last bit.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

# Numbers up to which a matrix is small.
SMALL = 1 << 20
# A block that fits the second-level cache is up to twice as fast as one of 8 MiB. With very many
# rows a block still gets enough columns to be worth adding its K×K product to the sum.
_BLOCK_BYTES = 1 << 20
_LEAST_COLUMNS = 128
# A block to be sorted goes through the cache once a comparator: a quarter of it leaves room.
_SORTED_BYTES = 1 << 18
# Columns of a weighted sum that one thread takes at a time.
_SUMMED_COLUMNS = 1 << 16
# Each holds up to six blocks at a time (Bulyan): together they stay below 100 MiB.
_MOST_THREADS = 16


def column_blocks(
    num_rows: int, num_columns: int, itemsize: int, num_bytes: int = _BLOCK_BYTES
) -> Iterator[slice]:
    """Slices that cover the columns, each of `num_bytes` of items or 128 columns, whichever is
    more."""
    size = max(_LEAST_COLUMNS, num_bytes // (num_rows * itemsize))
    for start in range(0, num_columns, size):
        yield slice(start, min(start + size, num_columns))


def over_sorted_columns(
    values: Tensor, rule: Callable[[np.ndarray], np.ndarray], rows: np.ndarray | None = None
) -> Tensor:
    """`rule` of every column's values in ascending order, [d] in the dtype of the values.

    Args:
        values: float [K, d].
        rule: from a block [K, n] whose columns are sorted to [n].
        rows: int [k], the rows to take; all by default.
    """
    matrix = values.numpy()
    num_rows = len(matrix) if rows is None else len(rows)
    result = torch.empty(matrix.shape[1], dtype=values.dtype)
    out, sort = result.numpy(), _sorter(num_rows, matrix.size)

    def work(block: slice) -> None:
        part = matrix[:, block] if rows is None else matrix[rows, block]
        columns = np.array(part, order="C")  # always a copy: the updates stay as they are
        sort(columns)
        out[block] = rule(columns)

    blocks = column_blocks(num_rows, matrix.shape[1], matrix.itemsize, _SORTED_BYTES)
    _side_by_side(work, blocks)
    return result


def _sorter(num_rows: int, size: int) -> Callable[[np.ndarray], None]:
    if size <= SMALL:
        return lambda columns: columns.sort(axis=0)
    from .kernels import sort_columns, sorting_network

    network = sorting_network(num_rows)
    return lambda columns: sort_columns(columns, network)


def weighted_sum(
    values: Tensor, weights: np.ndarray, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Σ_i weights_i · values_i [d], accumulated in float64, row after row, and rounded once.

    So a sum is off by at most one rounding to its dtype and K of float64.

    Args:
        values: finite float [K, d].
        weights: float64 [K].
        dtype: of the sum; by default that of the values.
    """
    matrix = values.numpy()
    result = torch.empty(matrix.shape[1], dtype=values.dtype if dtype is None else dtype)
    out = result.numpy()
    # What counts for nothing is not read.
    rows = np.flatnonzero(weights)
    used = np.ascontiguousarray(weights[rows])
    if matrix.size <= SMALL:
        # einsum goes through memory in its order: a transposed matrix would be rounded otherwise.
        out[:] = np.einsum("i,ij->j", used, np.ascontiguousarray(matrix[rows]))
        return result
    from . import kernels

    def work(block: slice) -> None:
        if matrix.flags.c_contiguous:
            kernels.weighted_sum(matrix, rows, used, block.start, block.stop, out[block])
        else:
            part = np.ascontiguousarray(matrix[:, block])
            kernels.weighted_sum(part, rows, used, 0, part.shape[1], out[block])

    starts = range(0, matrix.shape[1], _SUMMED_COLUMNS)
    _side_by_side(work, (slice(s, min(s + _SUMMED_COLUMNS, matrix.shape[1])) for s in starts))
    return result


def _side_by_side(work: Callable[[slice], None], blocks: Iterator[slice]) -> None:
    """`work` on every block, in as many threads as torch uses: neither NumPy's loops nor the
    compiled ones hold Python's lock."""
    waiting = list(blocks)
    num_threads = min(len(waiting), torch.get_num_threads(), _MOST_THREADS)
    if num_threads < 2:
        for block in waiting:
            work(block)
        return
    with ThreadPoolExecutor(num_threads) as threads:
        # They return nothing; going through them raises what one of them raised.
        for _ in threads.map(work, waiting):
            pass
