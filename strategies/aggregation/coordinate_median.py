"""The coordinate-wise median (Yin et al., ICML 2018, Definition 1)."""

from typing import Any

import numpy as np

from .aggregate import Aggregate, as_updates, check_minority, over_sorted_columns, uniform_aggregate


def coordinate_median(updates: Any, num_corrupt: int = 0) -> Aggregate:
    """The median of each coordinate; with an even K the mean of the two middle values.

    Args:
        updates: float [K, d], gradient units.
        num_corrupt: b, only checked: the median tolerates any minority.

    Raises:
        ValueError: for K = 0, unusable updates, or 2b >= K.
    """
    values = as_updates(updates)
    num_rows = len(values)
    check_minority("coordinate-median", num_corrupt, num_rows)
    lower, upper = (num_rows - 1) // 2, num_rows // 2

    def middle(columns: np.ndarray) -> np.ndarray:
        return columns[[lower, upper]].mean(axis=0, dtype=np.float64)

    return uniform_aggregate(over_sorted_columns(values, middle), num_rows)
