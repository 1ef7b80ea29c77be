"""Rules that look at what is learned on trusted data, and so need no honest majority."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..bounding import row_norms
from .aggregate import Aggregate, as_updates, check_num_corrupt, weighted_sum


def fltrust(updates: Any, trusted: Any) -> Aggregate:
    """FLTrust (Cao, Fang, Liu, Gong, NDSS 2021, arXiv 2012.13995, equations 1 to 4).

        c_i = max(0, cos(u_i, u_0)),   Σ c_i (‖u_0‖ / ‖u_i‖) u_i / Σ c_i

    Where every c_i is 0 the answer is a vector of zeros: nobody goes the trusted way, no step.

    Args:
        updates: float [K, d], gradient units.
        trusted: u_0 float [d], what the same local training makes of the trusted data.

    Returns:
        The aggregate; its weights are the c_i / Σ c_i.

    Raises:
        ValueError: for K = 0 or unusable updates.
    """
    values = as_updates(updates)
    anchor = as_updates(torch.as_tensor(trusted)[None])[0].to(torch.float64)
    norms, length = row_norms(values).numpy(), float(torch.linalg.vector_norm(anchor))
    products = np.array([float(row.to(torch.float64) @ anchor) for row in values])
    moves = (norms > 0) & (length > 0)
    scales = np.divide(length, norms, out=np.zeros_like(norms), where=moves)
    cosines = np.divide(products, norms * length, out=np.zeros_like(norms), where=moves)
    shares = np.maximum(cosines, 0.0)
    if shares.sum() > 0:
        shares /= shares.sum()
    vector = weighted_sum(values, shares * scales)
    return Aggregate(vector, torch.from_numpy(shares))


def validated(updates: Any, losses: Any, num_corrupt: int, length: float) -> Aggregate:
    """The mean of the K − b updates that do best on trusted data, none longer than `length`.

    After Zeno (Xie, Koyejo, Gupta, ICML 2019), whose score is also the loss after the step; in
    place of its penalty on lengths they are clipped, before they are scored.

    Args:
        updates: float [K, d], gradient units.
        losses: [K], on the trusted data after a step along each clipped update.
        num_corrupt: b, the assumed number of corrupt rows, from 0 to K − 1.
        length: what an update is clipped to, such as that of the update on the trusted data.

    Returns:
        The aggregate. A loss that is not finite counts as the worst.

    Raises:
        ValueError: for K = 0, unusable updates, or a number of corrupt rows out of range.
    """
    values = as_updates(updates)
    num_rows = len(values)
    check_num_corrupt("validated", num_corrupt, num_rows, "num_corrupt < K", num_rows - 1)
    scores = np.nan_to_num(np.asarray(losses, dtype=np.float64), nan=np.inf)
    best = np.argsort(scores, kind="stable")[: num_rows - num_corrupt]
    shares = np.zeros(num_rows)
    shares[best] = 1 / len(best)
    vector = weighted_sum(values, shares * clipped_to(values, length).numpy())
    return Aggregate(vector, torch.from_numpy(shares))


def clipped_to(updates: Tensor, length: float) -> Tensor:
    """The factors by which the updates [K, d] are shortened to `length`, float64 [K]."""
    norms = row_norms(updates)
    return torch.where(norms > length, length / norms, 1.0)
