"""The coordinate-wise trimmed mean (Yin et al., ICML 2018, Definition 2)."""

from typing import Any

import numpy as np

from .aggregate import Aggregate, as_updates, check_minority, over_sorted_columns, uniform_aggregate


def trimmed_mean(updates: Any, num_corrupt: int) -> Aggregate:
    """In each coordinate the mean without the b smallest and the b largest values.

    Args:
        updates: float [K, d], gradient units.
        num_corrupt: b, the assumed number of corrupt rows, trimmed from each end.

    Raises:
        ValueError: for K = 0, unusable updates, or 2b >= K.
    """
    values = as_updates(updates)
    num_rows = len(values)
    check_minority("trimmed-mean", num_corrupt, num_rows)
    kept = slice(num_corrupt, num_rows - num_corrupt)

    def mean_of_kept(columns: np.ndarray) -> np.ndarray:
        return columns[kept].mean(axis=0, dtype=np.float64)

    return uniform_aggregate(over_sorted_columns(values, mean_of_kept), num_rows)
