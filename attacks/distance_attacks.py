"""Attacks that go as far as the spread of the benign updates hides them.

Shejwalkar and Houmansadr, "Manipulating the Byzantine" (NDSS 2021), section IV: all corrupt
clients send mean + gamma p, p a perturbation against the mean, with the largest gamma >= 0 that
keeps the vector as close to the benign updates as these are to each other. The paper searches
for gamma; both conditions are quadratic in it, so that it is written down here. The signature
is that of `vector_attacks`; the benign updates are the colluders' own or, for an omniscient
attacker, the honest clients'.
"""

# ruff: noqa: ARG001  (one signature for all: no attack needs every argument)

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from .vector_attacks import as_updates, benign_updates, same_from_all

Perturbation = Literal["deviation", "unit", "sign"]


def min_max(
    own: Tensor,
    *,
    num_clients: int,
    generator: np.random.Generator,
    honest: Tensor | None = None,
    perturbation: Perturbation = "deviation",
) -> Tensor:
    """Largest distance to a benign update at most that between two benign updates.

    max_i ||v - g_i|| <= max_{i,j} ||g_i - g_j||, v = mean + gamma p, from each corrupt client.
    """
    own = as_updates(own)
    seen = benign_updates(own, honest)
    bound = _squared_distances(seen).max()
    average = seen.mean(dim=0)
    direction = _perturbation(seen, average, perturbation)
    offsets = average - seen
    gammas = _largest_gamma(
        direction.square().sum(), offsets @ direction, bound - offsets.square().sum(dim=1)
    )
    return same_from_all(average + gammas.min() * direction, own)


def min_sum(
    own: Tensor,
    *,
    num_clients: int,
    generator: np.random.Generator,
    honest: Tensor | None = None,
    perturbation: Perturbation = "deviation",
) -> Tensor:
    """Sum of squared distances to the benign updates at most that of any benign update.

    sum_i ||v - g_i||^2 <= max_i sum_j ||g_i - g_j||^2, v = mean + gamma p, from each.
    """
    own = as_updates(own)
    seen = benign_updates(own, honest)
    bound = _squared_distances(seen).sum(dim=1).max()
    average = seen.mean(dim=0)
    direction = _perturbation(seen, average, perturbation)
    # The linear terms cancel: the offsets from the mean sum to zero.
    gamma = _largest_gamma(
        len(seen) * direction.square().sum(),
        torch.zeros((), dtype=torch.float64),
        bound - (average - seen).square().sum(),
    )
    return same_from_all(average + gamma * direction, own)


def _perturbation(seen: Tensor, average: Tensor, kind: Perturbation) -> Tensor:
    """The paper's inverse standard deviation, inverse unit vector or inverse sign, [d]."""
    if kind == "deviation":
        return -seen.std(dim=0, correction=0)
    if kind == "unit":
        length = torch.linalg.vector_norm(average)
        return -average / length if length > 0 else torch.zeros_like(average)
    if kind == "sign":
        return -average.sign()
    raise ValueError(f"perturbation is {kind!r}; allowed are 'deviation', 'unit' and 'sign'")


def _largest_gamma(square: Tensor, linear: Tensor, slack: Tensor) -> Tensor:
    """Largest gamma with square gamma^2 + 2 linear gamma <= slack, 0 without a direction.

    slack >= 0 up to rounding, because the mean lies among the benign updates.
    """
    if square == 0:
        return torch.zeros_like(slack)
    return (-linear + (linear.square() + square * slack.clamp(min=0)).sqrt()) / square


def _squared_distances(seen: Tensor) -> Tensor:
    distances = torch.cdist(seen, seen, compute_mode="donot_use_mm_for_euclid_dist")
    return distances.square()
