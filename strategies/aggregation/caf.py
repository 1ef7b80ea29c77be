"""CAF, the covariance-bound agnostic filter (Allouah, Guerraoui, Stephan, "Towards Trustworthy
Federated Learning with Untrusted Participants", arXiv 2505.01874, Algorithm 2)."""

from typing import Any

import numpy as np
import torch

from .aggregate import Aggregate, as_updates, check_minority, weighted_sum
from .gram import gram_matrix
from .rage import one_blas_thread, outlier_scores


def caf(updates: Any, num_corrupt: int) -> Aggregate:
    """The weighted mean that has the smallest covariance among those of RAGE's iteration.

    From c_i = 1, while Σ c_i > K − 2b:

        μ = Σ c_i u_i / Σ c_i,   λ, v the principal eigenpair of Σ c_i (u_i − μ)(u_i − μ)ᵀ / Σ c_i,
        τ_i = ⟨v, u_i − μ⟩²,   c_i ← (1 − τ_i / τ_max) c_i,

    and the answer is the μ that had the smallest λ: unlike RAGE's, it needs no bound on the honest
    rows' covariance and does not count how many rows it has removed. The iteration ends early when
    all the rows left are equal.

    Args:
        updates: float [K, d], gradient units.
        num_corrupt: b, the assumed number of corrupt rows.

    Returns:
        The aggregate; its weights are the c_i / Σ c_i of the answer. Iterations are all that were
        made.

    Raises:
        ValueError: for K = 0, unusable updates, or 2b >= K.
    """
    values = as_updates(updates)
    num_rows = len(values)
    check_minority("caf", num_corrupt, num_rows)
    gram = gram_matrix(values)
    weights = np.ones(num_rows)
    best, smallest, iterations = weights, np.inf, 0
    with one_blas_thread():
        while iterations == 0 or weights.sum() > num_rows - 2 * num_corrupt:
            alive = np.flatnonzero(weights)
            scores, variance = outlier_scores(gram[np.ix_(alive, alive)], weights[alive])
            if variance < smallest:
                best, smallest = weights, variance
            if scores.max() == 0:
                break
            weights = weights.copy()
            weights[alive] *= 1 - scores / scores.max()
            iterations += 1
    shares = best / best.sum()
    vector = weighted_sum(values, shares)
    return Aggregate(vector, torch.from_numpy(shares), torch.from_numpy(shares > 0), iterations)
