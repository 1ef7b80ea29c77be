"""The mean of the rows nearest to a pivot, MoNNA's rule (Farhadkhani et al., ICML 2023)."""

from typing import Any

import numpy as np
import torch

from .aggregate import Aggregate, as_updates, check_minority, weighted_sum
from .coordinate_median import coordinate_median
from .gram import centred_gram_matrix


def monna(updates: Any, num_corrupt: int, *, pivot: Any = None) -> Aggregate:
    """The mean of the K − b rows nearest to the pivot; ties go to the lower row number.

    In MoNNA every node takes its own update for the pivot. A server has none: by default it is the
    coordinate-wise median, which no minority can carry away.

    Args:
        updates: float [K, d], gradient units.
        num_corrupt: b, the assumed number of corrupt rows.
        pivot: [d], another pivot.

    Returns:
        The aggregate; survivors are the rows that were averaged.

    Raises:
        ValueError: for K = 0, unusable updates, 2b >= K, or a pivot of another shape.
    """
    values = as_updates(updates)
    num_rows = len(values)
    check_minority("monna", num_corrupt, num_rows)
    if pivot is None:
        pivot = coordinate_median(values).vector
    centre = torch.as_tensor(pivot, dtype=values.dtype)
    if centre.shape != values.shape[1:]:
        raise ValueError(
            f"pivot must have the shape {list(values.shape[1:])}: got {list(centre.shape)}"
        )
    squares = np.diag(centred_gram_matrix(values, centre=centre))
    weights = np.zeros(num_rows)
    nearest = np.argsort(squares, kind="stable")[: num_rows - num_corrupt]
    weights[nearest] = 1 / len(nearest)
    vector = weighted_sum(values, weights)
    return Aggregate(vector, torch.from_numpy(weights), torch.from_numpy(weights > 0))
