"""The mean of the K − b rows that lie closest together, by their diameter or their covariance.

Both look for the best of all subsets. The diameter's is found by removing rows, which stays cheap
while b is small; the covariance's by going through all of them.
"""

import math
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blackthorn.settings.catalogue import MOST_SUBSETS

from .aggregate import Aggregate, as_updates, check_minority, weighted_sum
from .gram import gram_matrix, squared_distances

# Subsets whose matrices are in memory together: some MB.
_AT_ONCE = 1000


def mda(updates: Any, num_corrupt: int) -> Aggregate:
    """Minimum-diameter averaging (El Mhamdi et al., PODC 2020; Rousseeuw 1985).

    The mean of K − b rows whose largest distance from each other is the smallest possible; where
    several subsets share it, of one of them.

    Args:
        updates: float [K, d], gradient units.
        num_corrupt: b, the assumed number of corrupt rows.

    Returns:
        The aggregate; survivors are the rows that were averaged.

    Raises:
        ValueError: for K = 0, unusable updates, or 2b >= K.
    """
    values = as_updates(updates)
    check_minority("mda", num_corrupt, len(values))
    distances = squared_distances(gram_matrix(values))
    # A subset has a diameter of at most D if removing b rows removes every pair further apart.
    levels = np.unique(distances)
    low, high = 0, len(levels) - 1
    removed: list[int] = []
    while low <= high:
        middle = (low + high) // 2
        cover = _cover(distances > levels[middle], num_corrupt)
        if cover is None:
            low = middle + 1
        else:
            removed, high = cover, middle - 1
    kept = np.delete(np.arange(len(values)), removed)
    # Fewer than b were enough: the others go by how far they are from those that stay.
    for _ in range(num_corrupt - len(removed)):
        within = distances[np.ix_(kept, kept)]
        kept = np.delete(kept, int(np.argmax(within.sum(axis=1))))
    return _mean_of(values, kept)


def smea(updates: Any, num_corrupt: int) -> Aggregate:
    """Smallest maximum eigenvalue averaging (Allouah et al., ICML 2023, "On the Privacy-Robustness-
    Utility Trilemma in Distributed Learning").

    The mean of the K − b rows whose covariance has the smallest largest eigenvalue.

    Args:
        updates: float [K, d], gradient units.
        num_corrupt: b, the assumed number of corrupt rows.

    Returns:
        The aggregate; survivors are the rows that were averaged.

    Raises:
        ValueError: for K = 0, unusable updates, 2b >= K, or more than 20,000 subsets of K − b rows.
    """
    values = as_updates(updates)
    num_rows = len(values)
    check_minority("smea", num_corrupt, num_rows)
    subsets = math.comb(num_rows, num_corrupt)
    if subsets > MOST_SUBSETS:
        raise ValueError(
            f"smea goes through all subsets of K - num_corrupt rows, of which num_corrupt = "
            f"{num_corrupt} with K = {num_rows} leaves {subsets}: at most {MOST_SUBSETS} are "
            "allowed"
        )
    gram = gram_matrix(values)
    kept = np.array([*combinations(range(num_rows), num_rows - num_corrupt)])
    parts = range(0, subsets, _AT_ONCE)
    variances = [_largest_variances(gram, kept[first : first + _AT_ONCE]) for first in parts]
    return _mean_of(values, kept[np.argmin(np.concatenate(variances))])


def _largest_variances(gram: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """λ_max [n] of the covariances of the rows `kept` [n, k], of a Gram matrix about any centre."""
    centred = gram[kept[:, :, None], kept[:, None, :]]
    centred -= centred.mean(axis=1, keepdims=True)
    centred -= centred.mean(axis=2, keepdims=True)
    largest: np.ndarray = np.linalg.eigvalsh(centred / kept.shape[1])[:, -1]
    return largest


def _mean_of(values: Tensor, kept: np.ndarray) -> Aggregate:
    weights = np.zeros(len(values))
    weights[kept] = 1 / len(kept)
    vector = weighted_sum(values, weights)
    return Aggregate(vector, torch.from_numpy(weights), torch.from_numpy(weights > 0))


def _cover(edges: np.ndarray, size: int) -> list[int] | None:
    """At most `size` rows that hold an end of every edge (bool [K, K], symmetric), or None.

    Either the row with the most edges is among them, or all its neighbours are.
    """
    degrees = edges.sum(axis=1)
    busiest = int(np.argmax(degrees))
    if degrees[busiest] == 0:
        return []
    # Each row that goes takes at most so many edges with it.
    if size == 0 or degrees.sum() / 2 > size * degrees[busiest]:
        return None
    with_it = _cover(_without(edges, [busiest]), size - 1)
    if with_it is not None:
        return [busiest, *with_it]
    neighbours = [int(row) for row in np.flatnonzero(edges[busiest])]
    if len(neighbours) > size or len(neighbours) == 1:
        return None
    without_it = _cover(_without(edges, neighbours), size - len(neighbours))
    return None if without_it is None else [*neighbours, *without_it]


def _without(edges: np.ndarray, rows: list[int]) -> np.ndarray:
    left = edges.copy()
    left[rows] = False
    left[:, rows] = False
    return left
