"""Loops over the rows of large matrices of updates, compiled by Numba.

Rows lie one after the other in memory (C order), in float32 or float64; `out` is what a kernel
writes. No kernel reorders sums or contracts products, so that each gives to the last bit what the
same loop in NumPy would.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar, cast

import numpy as np
from numba import njit

# Columns whose sums are held at a time: 8 KiB of float64 stay in the first cache.
_COLUMNS = 1024

_Kernel = TypeVar("_Kernel", bound=Callable[..., Any])
_Array = np.ndarray[Any, Any]


def _compiled(kernel: _Kernel) -> _Kernel:
    """The kernel in machine code, kept for the next process where there is a place for it."""
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    try:
        return cast(_Kernel, njit(cache=True, **options)(kernel))
    except RuntimeError:  # neither beside this file nor in the user's own cache folder
        return cast(_Kernel, njit(**options)(kernel))


@_compiled
def weighted_sum(
    matrix: _Array, rows: _Array, weights: _Array, start: int, stop: int, out: _Array
) -> None:
    """out[j] = Σ_i weights_i · matrix[rows_i, start + j], float64, row after row, rounded once."""
    sums = np.empty(_COLUMNS)
    for first in range(start, stop, _COLUMNS):
        width = min(_COLUMNS, stop - first)
        sums[:width] = 0.0
        for i in range(len(rows)):
            row, weight = matrix[rows[i], first : first + width], weights[i]
            for j in range(width):
                sums[j] += weight * row[j]
        at = first - start
        for j in range(width):
            out[at + j] = sums[j]


@_compiled
def sort_columns(block: _Array, comparators: _Array) -> None:
    """Sort every column of `block` [K, n] in place by the `comparators` [m, 2] of a network.

    A comparator is two whole rows, of which the lower gets the smaller values: the processor
    compares as many columns at a time as its vectors hold.
    """
    for c in range(len(comparators)):
        lower, upper = block[comparators[c, 0]], block[comparators[c, 1]]
        for j in range(block.shape[1]):
            a, b = lower[j], upper[j]
            lower[j] = a if a < b else b
            upper[j] = b if a < b else a


@cache
def sorting_network(size: int) -> _Array:
    """The comparators, int64 [m, 2], that sort `size` rows: Batcher's odd-even merge sort.

    For any size: those of the next power of two without the ones that name a row beyond. (Were
    the missing rows larger than all others, these would never move anything.)
    """
    found = []
    merged = 1
    while merged < size:
        distance = merged
        while distance >= 1:
            for base in range(distance % merged, size - distance, 2 * distance):
                for lower in range(base, base + min(distance, size - distance - base)):
                    upper = lower + distance
                    if lower // (2 * merged) == upper // (2 * merged):
                        found.append((lower, upper))
            distance //= 2
        merged *= 2
    return np.array(found, dtype=np.int64).reshape(-1, 2)
