"""Bulyan of Krum (El Mhamdi et al., ICML 2018)."""

from typing import Any

import numpy as np
import torch

from .aggregate import Aggregate, as_matrix, check_num_corrupt
from .gram import gram_matrix, squared_distances
from .krum import krum_scores
from .mean_around_median import nearest_to_median


def bulyan(updates: Any, num_corrupt: int) -> Aggregate:
    """θ = K − 2b rows chosen by repeated Krum, then a mean around the median in each coordinate.

    Each choice runs Krum on the n rows not chosen yet, with n − b − 2 neighbours (at least one
    while there is another row: the last choices have fewer rows than Krum asks for). In each
    coordinate the result is the mean of the θ − 2b chosen values nearest to their median.

    Args:
        updates: float [K, d], gradient units.
        num_corrupt: b, the assumed number of corrupt rows.

    Returns:
        The aggregate; survivors are the chosen rows, iterations is θ.

    Raises:
        ValueError: for K = 0, unusable updates, or K < 4b + 3.
    """
    values = as_matrix(updates)
    num_rows = len(values)
    needs, most = "K >= 4 num_corrupt + 3", (num_rows - 3) // 4
    check_num_corrupt("bulyan", num_corrupt, num_rows, needs, most)
    chosen = _choose(squared_distances(gram_matrix(values)), num_corrupt)
    survivors = torch.zeros(num_rows, dtype=torch.bool)
    survivors[chosen] = True
    vector = nearest_to_median(values, np.array(chosen), len(chosen) - 2 * num_corrupt)
    weights = survivors.to(torch.float64) / len(chosen)
    return Aggregate(vector, weights, survivors, len(chosen))


def _choose(distances: np.ndarray, num_corrupt: int) -> list[int]:
    remaining = np.arange(len(distances))
    chosen: list[int] = []
    for _ in range(len(distances) - 2 * num_corrupt):
        num_neighbours = max(len(remaining) - num_corrupt - 2, 1)
        scores = krum_scores(distances[np.ix_(remaining, remaining)], num_neighbours)
        best = int(np.argmin(scores))
        chosen.append(int(remaining[best]))
        remaining = np.delete(remaining, best)
    return chosen
