"""How far clients are from the others, round by round, and which of them that convicts.

A filter's selection is no evidence: an attacker who knows the rule has it remove honest clients
alone. Here every client is one observation, its mean score over its rounds, against the law of all
the others': clients whose data are unlike are far from the others in every round, so that rounds
do not count as so many observations.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from blackthorn.settings.robustness_checks import FEWEST_ROUNDS

from .aggregation.aggregate import as_updates, weighted_sum
from .aggregation.gram import distances_to, gram_matrix

# What a client is scored by in a round, each the larger the worse.
SCORES = ("distance", "against", "axis")
# Clients of FEWEST_ROUNDS rounds or more below which nothing is said.
FEWEST_CLIENTS = 8
# Probability with which a run without liars accuses anybody at all.
LEVEL = 0.01

_WEISZFELD = 20
_SIMULATIONS = 40_000
# Of a normal law: its deviation by the median of absolute deviations.
_NORMAL = 1.4826
# What scores may be at most, so that no mean over rounds hangs on one.
_MOST = 20.0


def round_scores(updates: Any) -> np.ndarray:
    """Scores [K, 3] of a round's updates [K, d], float64, after SCORES:

    * log of the distance to the geometric median, over the median distance;
    * minus the projection on that median, in units of its length: 1 is straight against it;
    * log of K times the share of the mass of the covariance's top eigenvector.

    Scaling all updates changes none of them. Raises ValueError for K = 0 or unusable updates.
    """
    values = as_updates(updates)
    # About some point of its own: good for distances alone.
    gram = gram_matrix(values)
    count = len(gram)
    centre = np.full(count, 1 / count)
    for _ in range(_WEISZFELD):
        distances = distances_to(gram, centre)
        if distances.max() == 0:
            return np.zeros((count, len(SCORES)))
        nearness = 1 / np.maximum(distances, 1e-9 * distances.max())
        centre = nearness / nearness.sum()
    distances = distances_to(gram, centre)
    typical = np.median(distances)
    far = np.log(np.maximum(distances, 1e-12) / typical) if typical > 0 else np.zeros(count)
    median = weighted_sum(values.to(torch.float64), centre)
    length = float(median @ median)
    products = np.array([float(row.to(torch.float64) @ median) for row in values])
    against = -products / length if length > 0 else np.zeros(count)
    means = gram.mean(axis=0)
    centred = gram - means - means[:, None] + means.mean()
    shares = np.linalg.eigh(centred)[1][:, -1] ** 2
    axis = np.log(np.maximum(count * shares, 1e-3))
    return np.clip(np.stack([far, against, axis], axis=1), -_MOST, _MOST)


def p_values(scores: Mapping[int, Sequence[Sequence[float]]]) -> dict[int, float]:
    """By client the probability that any of as many honest clients scores as badly.

    `scores` has of each client its rounds' scores [T_i, 3]. For every score the clients' means are
    taken for draws from one normal law, whose centre and deviation are the median and the median
    of absolute deviations, which a minority of liars cannot move far. p is that of the largest
    deviation among all clients, by simulation, so that it is corrected for their number, and three
    times the smallest of a client's scores. 1.0 for all where FEWEST_CLIENTS or FEWEST_ROUNDS are
    not reached; clients with fewer rounds are left out.
    """
    means = {
        client: np.mean(np.asarray(rows, dtype=np.float64), axis=0)
        for client, rows in scores.items()
        if len(rows) >= FEWEST_ROUNDS
    }
    if len(means) < FEWEST_CLIENTS:
        return dict.fromkeys(means, 1.0)
    table = np.stack(list(means.values()))
    worst = np.max(_deviations(table), axis=1)
    null = _largest_deviations(len(table))
    # One more than were simulated: what was seen is one of those that might have been.
    above = _SIMULATIONS - np.searchsorted(null, worst, side="left")
    adjusted = np.minimum(1.0, len(SCORES) * (above + 1) / (_SIMULATIONS + 1))
    return dict(zip(means, adjusted.tolist(), strict=True))


def _deviations(table: np.ndarray) -> np.ndarray:
    """How many deviations each of the columns' values [n, s] is above the column's median."""
    off = table - np.median(table, axis=0)
    spread = _NORMAL * np.median(np.abs(off), axis=0)
    return np.divide(off, spread, out=np.zeros_like(off), where=spread > 0)


@lru_cache(maxsize=8)
def _largest_deviations(count: int) -> np.ndarray:
    """The largest deviation among `count` draws of a normal law, simulated and sorted."""
    drawn = np.random.default_rng(0).standard_normal((_SIMULATIONS, count))
    off = drawn - np.median(drawn, axis=1, keepdims=True)
    spread = _NORMAL * np.median(np.abs(off), axis=1)
    return np.sort(off.max(axis=1) / spread)
