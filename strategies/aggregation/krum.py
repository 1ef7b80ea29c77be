"""Krum and Multi-Krum (Blanchard et al., NeurIPS 2017)."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .aggregate import Aggregate, as_matrix, check_num_corrupt, weighted_sum
from .gram import gram_matrix, squared_distances


def krum(updates: Any, num_corrupt: int) -> Aggregate:
    """The one row u_i with the smallest score Σ_{j ∈ N_i} ‖u_i − u_j‖², as it is.

    N_i are the K − b − 2 other rows nearest to u_i. Of equal scores the first row wins. The
    distances come from the Gram matrix of centred updates in float64, so tiny updates are told
    apart beside a large part common to all.

    Args:
        updates: float [K, d], gradient units.
        num_corrupt: b, the assumed number of corrupt rows.

    Raises:
        ValueError: for K = 0, unusable updates, or K < 2b + 3.
    """
    return _select("krum", as_matrix(updates), num_corrupt, 1)


def multi_krum(updates: Any, num_corrupt: int, *, num_selected: int | None = None) -> Aggregate:
    """The mean of the m rows with the smallest Krum scores.

    Args:
        updates: float [K, d], gradient units.
        num_corrupt: b, the assumed number of corrupt rows.
        num_selected: m, from 1 (Krum) to K − b; K − b − 2 by default.

    Raises:
        ValueError: for K = 0, unusable updates, K < 2b + 3, or num_selected out of range.
    """
    values = as_matrix(updates)
    if num_selected is None:
        return _select("multi-krum", values, num_corrupt, None)
    if not 1 <= num_selected <= len(values) - num_corrupt:
        raise ValueError(
            f"num_selected must lie between 1 and K - num_corrupt = {len(values) - num_corrupt}: "
            f"got {num_selected}"
        )
    return _select("multi-krum", values, num_corrupt, num_selected)


def krum_scores(distances: np.ndarray, num_neighbours: int) -> np.ndarray:
    """The sum of each row's num_neighbours smallest squared distances to the others.

    Args:
        distances: squared distances [K, K] with a zero diagonal.
        num_neighbours: from 0 to K − 1.
    """
    others = distances.copy()
    np.fill_diagonal(others, np.inf)
    return np.sort(others, axis=1)[:, :num_neighbours].sum(axis=1)


def _select(rule: str, values: Tensor, num_corrupt: int, num_selected: int | None) -> Aggregate:
    num_rows = len(values)
    check_num_corrupt(rule, num_corrupt, num_rows, "K >= 2 num_corrupt + 3", (num_rows - 3) // 2)
    num_neighbours = num_rows - num_corrupt - 2
    scores = krum_scores(squared_distances(gram_matrix(values)), num_neighbours)
    best = np.argsort(scores, kind="stable")[: num_selected or num_neighbours]
    weights = np.zeros(num_rows)
    weights[best] = 1 / len(best)
    vector = weighted_sum(values, weights)
    return Aggregate(vector, torch.from_numpy(weights), torch.from_numpy(weights > 0))
