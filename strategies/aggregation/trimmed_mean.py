"""The coordinate-wise trimmed mean (Yin et al., ICML 2018, Definition 2)."""

from typing import Any

import torch

from .aggregate import Aggregate, as_updates, check_minority, uniform_aggregate
from .blocks import sorted_blocks


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
    vector = torch.empty(values.shape[1], dtype=values.dtype)
    out = vector.numpy()
    for block, columns in sorted_blocks(values):
        kept = columns[:, num_corrupt : num_rows - num_corrupt]
        out[block] = kept.mean(axis=1, dtype="float64")
    return uniform_aggregate(vector, num_rows)
