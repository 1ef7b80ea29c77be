"""What the updates of a round look like: lengths, angles, concentration, clipping and tails.

Norms, angles and their concentration are those of Zhang et al., Figures 1 to 3, the clipping
factor that of their section 3; the tail index is that of Yang et al., Figures 1 and 2. All of
them read single clients' updates: none of them is private.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .bounding import row_norms
from .tail_index import inverse_tail_index

# Samples per block sum, and the fewest clients that fill four blocks: with fewer blocks the
# median they are centred by follows the samples themselves, and the sums come out too short.
TAIL_BLOCK_SIZE = 5
TAIL_LEAST_CLIENTS = 4 * TAIL_BLOCK_SIZE
# Any coordinates of a stable vector are a stable vector of the same index.
TAIL_COORDINATES = 1024

# A client that clips arrives at the bound only up to the rounding of its model.
_AT_BOUND = 1 - 1e-3
# Rows are widened to float64 a block at a time: 2^20 numbers are 8 MiB.
_BLOCK_NUMBERS = 1 << 20


@dataclass(frozen=True, eq=False)
class UpdateMeasures:
    """Measures of K updates u_i in gradient units, Δ_i = −η_l u_i in parameter units.

    `norms` ‖u_i‖ and `parameter_norms` ‖Δ_i‖, float64 [K]. `angles` to the last global update,
    float64 [K], in degrees from 0 to 180, NaN where one of the two is zero or there is none.
    `variation`: the norms' coefficient of variation, their (population) standard deviation over
    their mean, NaN where that is 0. `clipping_factor`: the mean of c / max(c, ‖u_i‖), 1 where
    nothing is clipped, with the norm before the client's own clipping where it told of it.
    `share_at_bound`: the share of the updates that arrived as long as the bound (less a
    thousandth) or longer, clipped by whomever.
    """

    norms: Tensor
    parameter_norms: Tensor
    angles: Tensor
    variation: float
    clipping_factor: float
    share_at_bound: float


def measure_updates(
    updates: Tensor,
    local_lr: float,
    last_update: Tensor | None = None,
    bound: float = math.inf,
    claimed_norms: Tensor | None = None,
) -> UpdateMeasures:
    """Measures of `updates` u [K, d] (float32 or float64, gradient units, before bounding).

    `local_lr` is η_l; `last_update` [d] the last round's aggregate, with the sign of the u_i (in
    any unit); `bound` c in gradient units, infinity where nothing is clipped; `claimed_norms`
    float64 [K] what the clients say ‖u_i‖ was before they clipped it themselves, NaN where they
    say nothing (a claim counts where it is longer than what arrived). O(K d) time; memory
    of one block. Raises ValueError for updates that are not float [K, d] with K >= 1.
    """
    if updates.ndim != 2 or len(updates) == 0:
        raise ValueError(f"updates must have the shape [K, d], K >= 1: got {list(updates.shape)}")
    norms = row_norms(updates)
    unclipped = norms if claimed_norms is None else torch.fmax(norms, claimed_norms)
    mean = float(norms.mean())
    return UpdateMeasures(
        norms=norms,
        parameter_norms=norms * local_lr,
        angles=_angles(updates, norms, last_update),
        variation=float(norms.std(correction=0)) / mean if mean > 0 else math.nan,
        clipping_factor=_mean_clipping_factor(unclipped, bound),
        share_at_bound=float((norms >= bound * _AT_BOUND).double().mean()),
    )


def _angles(updates: Tensor, norms: Tensor, last_update: Tensor | None) -> Tensor:
    """arccos(⟨u_i, v⟩ / (‖u_i‖ ‖v‖)) in degrees, float64 [K]."""
    length = float(row_norms(last_update)) if last_update is not None else 0.0
    if last_update is None or not 0 < length < math.inf:
        return torch.full_like(norms, torch.nan)
    direction = last_update.double() / length
    rows = max(1, _BLOCK_NUMBERS // len(direction))
    projections = torch.cat([block.double() @ direction for block in updates.split(rows)])
    # 0/0 is NaN, as it should be; rounding must not push a cosine beyond 1.
    return torch.rad2deg(torch.acos((projections / norms).clamp(-1.0, 1.0)))


def _mean_clipping_factor(norms: Tensor, bound: float) -> float:
    return 1.0 if bound == math.inf else float((bound / norms.clamp(min=bound)).mean())


def inverse_noise_index(updates: Tensor, generator: np.random.Generator) -> float:
    """1/α̂ of the noise u_i − median(u) in `updates` [K, d]; NaN where it cannot be told.

    The clients are the samples, as vectors, so that what differs between them by their data
    counts as noise too. Blocks of TAIL_BLOCK_SIZE; at least TAIL_LEAST_CLIENTS clients, and then
    still a rough figure: pool it over rounds. `generator` deals the clients to the blocks, since
    neighbours in a partition may hold like data, and draws TAIL_COORDINATES coordinates where
    there are more. NaN also for updates that are all alike or not finite.
    """
    num_clients, dimension = updates.shape
    if num_clients < TAIL_LEAST_CLIENTS:
        return math.nan
    rows = torch.from_numpy(generator.permutation(num_clients))
    if dimension > TAIL_COORDINATES:
        columns = generator.choice(dimension, TAIL_COORDINATES, replace=False)
        updates = updates.index_select(1, torch.from_numpy(np.sort(columns)))
    try:
        return inverse_tail_index(updates[rows], TAIL_BLOCK_SIZE)
    except ValueError:
        return math.nan


def pooled_tail_index(estimates: Iterable[tuple[float, int]]) -> float:
    """α̂ from several rounds' (1/α̂, number of clients); NaN where none of them has an estimate.

    The mean of the 1/α̂, weighted by the clients. Every round was centred and scaled by itself, so
    the rounds may differ in the size and place of their noise, though not in its law. Infinity
    where the mean is not positive, as for no stable law.
    """
    known = [(inverse, clients) for inverse, clients in estimates if not math.isnan(inverse)]
    if not known:
        return math.nan
    total = sum(inverse * clients for inverse, clients in known)
    return sum(clients for _, clients in known) / total if total > 0 else math.inf
