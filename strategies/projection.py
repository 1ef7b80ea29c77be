"""Exact projections onto convex sets: Π_C of the server's step (Data and Diggavi, Algorithm 1)."""

from typing import Literal, get_args

import torch
from torch import Tensor

ConvexSet = Literal["ball", "box", "simplex"]
Center = Literal["initial", "origin"]
SETS: tuple[str, ...] = get_args(ConvexSet)
CENTERS: tuple[str, ...] = get_args(Center)


def project(point: Tensor, onto: ConvexSet, size: float, center: Tensor) -> Tensor:
    """The nearest point of the set, [d] in the dtype of `point` [d], computed in float64; `point`
    itself where it is in the set, bit for bit.

    `ball`: ‖w − center‖ ≤ size. `box`: |w_j − center_j| ≤ size in every coordinate. `simplex`:
    w ≥ 0 and Σ w = size, wherever `center` is; the sum then holds to rounding. A point that is not
    finite stays as it is, for the caller to refuse.
    """
    if not bool(torch.isfinite(point).all()):
        return point
    if onto == "simplex":
        return _onto_simplex(point, size)
    offset = (point - center).double()
    if onto == "box":
        inside = offset.abs() <= size
        edge = center.double() + offset.clamp(-size, size)
        return torch.where(inside, point, edge.to(point.dtype))
    norm = float(torch.linalg.vector_norm(offset))
    if norm <= size:
        return point
    return (center.double() + offset * (size / norm)).to(point.dtype)


def _onto_simplex(point: Tensor, size: float) -> Tensor:
    """max(w − θ, 0), θ such that the sum is `size`: with w sorted from the largest on, θ is
    (Σ_{j ≤ k} w_j − size)/k for the last k at which w_k is above that (Held et al., 1974)."""
    # A shift of all coordinates changes θ alone: without it `size` is lost beside large ones.
    wide = point.double()
    wide = wide - wide.max()
    largest_first = wide.sort(descending=True).values
    counts = torch.arange(1, len(wide) + 1, dtype=torch.float64)
    thresholds = (largest_first.cumsum(0) - size) / counts
    # The first always is, but for rounding.
    last = max(0, int((largest_first > thresholds).sum()) - 1)
    projected = (wide - thresholds[last]).clamp(min=0.0).to(point.dtype)
    return point if torch.equal(projected, point) else projected
