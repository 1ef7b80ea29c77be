"""The mean around the median, MeaMed (Xie, Koyejo, Gupta, 2018, "Generalized Byzantine-tolerant
SGD")."""

from typing import Any

import numpy as np
from torch import Tensor

from .aggregate import Aggregate, as_updates, check_minority, over_sorted_columns, uniform_aggregate


def mean_around_median(updates: Any, num_corrupt: int) -> Aggregate:
    """In each coordinate the mean of the K − b values nearest to their median.

    Of two values that are equally near the smaller counts.

    Args:
        updates: float [K, d], gradient units.
        num_corrupt: b, the assumed number of corrupt rows.

    Raises:
        ValueError: for K = 0, unusable updates, or 2b >= K.
    """
    values = as_updates(updates)
    num_rows = len(values)
    check_minority("mean-around-median", num_corrupt, num_rows)
    vector = nearest_to_median(values, np.arange(num_rows), num_rows - num_corrupt)
    return uniform_aggregate(vector, num_rows)


def nearest_to_median(values: Tensor, rows: np.ndarray, num_kept: int) -> Tensor:
    """The mean of the `num_kept` values nearest to the median of `rows` int [n] of `values` [K, d],
    in each coordinate: [d], formed in float64."""
    num_rows = len(rows)
    window = np.arange(num_kept)[:, None]

    def mean_of_nearest(columns: np.ndarray) -> np.ndarray:
        ordered = columns.astype(np.float64)
        median = ordered[[(num_rows - 1) // 2, num_rows // 2]].mean(axis=0)
        # The nearest values are neighbours in the sorted column. Shifting the window up by one
        # swaps its lowest value for the next higher: it pays while that one is nearer.
        above, below = ordered[num_kept:] - median, median - ordered[: num_rows - num_kept]
        start = np.count_nonzero(above < below, axis=0)
        return np.take_along_axis(ordered, start + window, axis=0).mean(axis=0)

    return over_sorted_columns(values, mean_of_nearest, rows)
