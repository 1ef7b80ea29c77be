"""What every aggregation rule returns, what it checks first, and how it walks through a matrix
[K, d]: in blocks of columns, so that memory stays at a block."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Gram matrices are sums of squares in float64: up to here they cannot overflow. Every float32
# is below it.
_LARGEST = 1e140
# Numbers up to which a matrix is small, and NumPy's own loops do; beyond, those of kernels.py,
# whose first use in a process takes longer than a small matrix. Both give the same to the last bit.
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


@dataclass(frozen=True)
class Aggregate:
    """The result of an aggregation rule on updates [K, d].

    Attributes:
        vector: the aggregate [d], in the dtype of the updates.
        weights: float64 [K], what each row counted for. 0 is a row that was left out. For rules
            that are weighted sums of rows these are the coefficients; coordinate-wise rules treat
            all rows alike and give 1/K; `rage` gives the filter's weights w.
        survivors: bool [K], the rows that count; by default those with a weight above 0.
        iterations: passes of the rule's loop; 0 for rules without one.
    """

    vector: Tensor
    weights: Tensor
    survivors: Tensor = None  # type: ignore[assignment]
    iterations: int = 0

    def __post_init__(self) -> None:
        if self.survivors is None:
            object.__setattr__(self, "survivors", torch.as_tensor(self.weights) > 0)


@dataclass(frozen=True)
class RoundOfRule:
    """What a rule may know of a round beside the updates.

    generator: of what the rule draws in it; model: w_t [d].
    """

    server_round: int
    local_lr: float
    model: Tensor
    generator: np.random.Generator


def as_updates(updates: Any) -> Tensor:
    """`as_matrix` and `check_finite`."""
    values = as_matrix(updates)
    check_finite(values)
    return values


def as_matrix(updates: Any) -> Tensor:
    """The updates as a detached tensor [K, d] on the CPU, float32 or float64 as given.

    Raises:
        ValueError: for K = 0, or another shape or dtype.
    """
    values = torch.as_tensor(updates).detach().cpu()
    if values.ndim != 2 or values.shape[1] == 0:
        raise ValueError(f"updates must have the shape [K, d], d >= 1: got {list(values.shape)}")
    if values.shape[0] == 0:
        raise ValueError("there are no updates to aggregate: got K = 0, at least 1 is needed")
    if values.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"updates must be float32 or float64: got {values.dtype}")
    return values


def check_finite(values: Tensor) -> None:
    """One pass over the updates [K, d]; `gram_matrix` sees for itself.

    Raises:
        ValueError: for a row that is not finite (beyond 1e140 for float64, whose squares would
            overflow). Screening drops such rows beforehand.
    """
    low, high = torch.aminmax(values)
    # As Python floats: in float32 the limit itself would be infinite.
    if not (float(low) >= -_LARGEST and float(high) <= _LARGEST):
        largest = values.abs().amax(dim=1).double()
        row = int(torch.nonzero(~(largest <= _LARGEST))[0])
        raise ValueError(
            f"updates must be finite and at most {_LARGEST:g} in size: row {row} is not"
        )


def check_num_corrupt(rule: str, num_corrupt: int, num_updates: int, needs: str, most: int) -> None:
    """Refuses a number of corrupt rows for which the rule's guarantee does not hold.

    Args:
        rule: the rule's name, for the message.
        num_corrupt: b, the assumed number of corrupt rows.
        num_updates: K.
        needs: the condition in words, such as "num_corrupt < K/3".
        most: the largest b the condition allows at this K, negative when it allows none.

    Raises:
        ValueError: unless 0 <= num_corrupt <= most.
    """
    if isinstance(num_corrupt, bool) or not isinstance(num_corrupt, Integral) or num_corrupt < 0:
        raise ValueError(f"num_corrupt must be an integer of at least 0: got {num_corrupt!r}")
    if num_corrupt > most:
        allowed = f"at most {most} is allowed" if most >= 0 else "K is too small for any"
        raise ValueError(
            f"{rule} needs {needs}: got num_corrupt = {num_corrupt} with K = {num_updates} "
            f"updates ({allowed})"
        )


def check_minority(rule: str, num_corrupt: int, num_updates: int) -> None:
    """Refuses a number of corrupt rows that is not a minority, 2b < K."""
    check_num_corrupt(rule, num_corrupt, num_updates, "num_corrupt < K/2", (num_updates - 1) // 2)


def uniform_aggregate(vector: Tensor, num_updates: int) -> Aggregate:
    """An aggregate in which all the rows took part alike."""
    weights = torch.full((num_updates,), 1 / num_updates, dtype=torch.float64)
    return Aggregate(vector, weights, torch.ones(num_updates, dtype=torch.bool))


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
