"""RAGE, the spectral filter of Data and Diggavi (ICML 2021), on Gram matrices.

"Byzantine-Resilient High-Dimensional SGD with Local Iterations on Heterogeneous Data",
Algorithm 2, with the stop rule and the average of its Appendix F.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal, get_args

import numpy as np
import torch
from threadpoolctl import ThreadpoolController
from torch import Tensor

from ..bounding import row_norms
from .aggregate import Aggregate, as_matrix, check_finite, check_num_corrupt, weighted_sum
from .gram import centred_gram_matrix, gram_matrix, plain_gram_matrix

RageStop = Literal["count", "appendix-f", "spectral"]
STOPS: tuple[RageStop, ...] = get_args(RageStop)
AVERAGES = ("uniform", "weighted")

# A weight below this share of the first weight 1/K counts as zero: tied rows differ by rounding.
_ZERO_WEIGHT = 1e-6
# Rows that were this much longer than the rest may have spoilt the centre of the Gram matrix.
_HUGE = 1e6


def rage(
    updates: Any,
    num_corrupt: int,
    *,
    stop: str = "count",
    coordinates: int | None = None,
    generator: np.random.Generator | None = None,
    average: str = "uniform",
    sigma0_squared: float | None = None,
    spectral_constant: float = 11.0,
) -> Aggregate:
    """Filters out the rows that stretch the covariance, then averages the others.

    From w_i = 1/K, with w̄ = w / ‖w‖₁, repeat

        μ = Σ w̄_i u_i,   Σ = Σ w̄_i (u_i − μ)(u_i − μ)ᵀ,   v its principal eigenvector,
        τ_i = ⟨v, u_i − μ⟩²,   w_i ← (1 − τ_i / τ_max) w_i,   τ_max over the rows with w_i > 0.

    A weight below 1e-6/K counts as zero and stays zero. The loop ends early when all the rows
    left are equal (τ_max = 0), or when the next step would leave none.

    Args:
        updates: float [K, d], gradient units.
        num_corrupt: b, the assumed number of corrupt rows.
        stop: "count" ends as soon as b weights are zero; "appendix-f" when more than b are, as in
            the paper's experiments, which removes at least one honest row; "spectral" when
            λ_max(Σ) ≤ C σ0², Algorithm 2's own rule.
        coordinates: run the filter on so many coordinates, drawn at random and the same for all
            rows, and average the survivors in full dimension. By default the filter is exact.
        generator: draws the coordinates; needed when there are fewer than d.
        average: "uniform" over the survivors (Appendix F), or "weighted" by w (line 13).
        sigma0_squared: σ0² > 0, squared gradient units, for stop = "spectral" only. With
            `coordinates` it bounds the covariance of the drawn coordinates.
        spectral_constant: C, at least 11, for stop = "spectral" only.

    Returns:
        The aggregate; its weights are the w of the last iteration, which start at 1/K.

    Raises:
        ValueError: when b >= K/3, for which nothing is guaranteed, for K = 0 or unusable
            updates, or for another argument out of its range.
    """
    values = as_matrix(updates)
    num_rows = len(values)
    check_num_corrupt("rage", num_corrupt, num_rows, "num_corrupt < K/3", (num_rows - 1) // 3)
    if average not in AVERAGES:
        raise ValueError(f"average must be one of {', '.join(AVERAGES)}: got {average!r}")
    bound = variance_bound(stop, sigma0_squared, spectral_constant)
    enough = {"count": num_corrupt, "appendix-f": num_corrupt + 1, "spectral": num_rows}[stop]
    seen = _draw_coordinates(values, coordinates, generator)
    if enough == 0 or seen is not values:
        check_finite(values)
    weights, iterations = _filter(seen, enough, bound)
    survivors = weights > 0
    averaging = weights if average == "weighted" else survivors.astype(np.float64)
    vector = weighted_sum(values, averaging / averaging.sum())
    return Aggregate(vector, torch.from_numpy(weights), torch.from_numpy(survivors), iterations)


def _filter(values: Tensor, enough: int, bound: float) -> tuple[np.ndarray, int]:
    """The filter's loop: stops at `enough` zero weights or at λ_max(Σ) ≤ bound."""
    num_rows = len(values)
    weights = np.full(num_rows, 1 / num_rows)
    alive = np.arange(num_rows)
    iterations = 0
    if enough == 0:
        return weights, iterations
    norms, gram = _norms_and_gram(values)
    with one_blas_thread():
        while num_rows - len(alive) < enough:
            scores, variance = outlier_scores(gram, weights[alive])
            if variance <= bound or scores.max() == 0:
                break
            lower = (1 - scores / scores.max()) * weights[alive]
            lower[lower < _ZERO_WEIGHT / num_rows] = 0
            kept = lower > 0
            if not kept.any():
                break
            weights[alive] = lower
            removed, alive = alive[~kept], alive[kept]
            gram = gram[np.ix_(kept, kept)]
            iterations += 1
            if norms[removed].max() > _HUGE * np.median(norms[alive]):
                gram = gram_matrix(values, rows=alive)
    return weights, iterations


def _norms_and_gram(values: Tensor) -> tuple[np.ndarray, np.ndarray]:
    gram = plain_gram_matrix(values)
    if gram is not None:
        return np.sqrt(np.diag(gram)), gram
    check_finite(values)
    return row_norms(values).numpy(), centred_gram_matrix(values)


def outlier_scores(gram: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, float]:
    """τ_i of the rows and λ_max(Σ), from their Gram matrix about any centre.

    With D = diag(w̄) and G_c the Gram matrix about μ, the K×K matrix A = D^{1/2} G_c D^{1/2} has
    the λ of Σ, and for its unit eigenvector a, τ_i = (G_c D^{1/2} a)_i² / λ.
    """
    # Before _blas, which finds the libraries that are loaded; here, since it takes its time.
    from scipy.linalg import eigh

    shares = weights / weights.sum()
    products = gram @ shares
    centred = gram - products[:, None] - products[None, :] + shares @ products
    root = np.sqrt(shares)
    last = len(gram) - 1
    eigenvalues, vectors = eigh(
        root[:, None] * centred * root[None, :], subset_by_index=[last, last]
    )
    variance = float(eigenvalues[0])
    # Below this, what is left of equal rows is the rounding of G_c.
    if variance <= len(gram) * np.finfo(np.float64).eps * np.diag(gram).max():
        return np.zeros(len(gram)), 0.0
    # Divided before squared: the square of a large row's product overflows.
    return (centred @ (root * vectors[:, 0]) / math.sqrt(variance)) ** 2, variance


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Two threads on a K×K matrix, beside PyTorch's, take many times as long as one."""
    # Before _blas, which finds the libraries that are loaded; here, since it takes its time.
    import scipy.linalg  # noqa: F401

    with _blas().limit(limits=1, user_api="blas"):
        yield


@cache
def _blas() -> ThreadpoolController:
    """Controls the threads of the BLAS libraries in this process; finding them takes a while."""
    return ThreadpoolController()


def variance_bound(stop: str, sigma0_squared: float | None, constant: float) -> float:
    """C σ0² for the spectral stop rule, and 0 (never reached before τ_max = 0) for the others.

    Raises ValueError for another stop rule, and for numbers that it does not have.
    """
    if stop not in STOPS:
        raise ValueError(f"stop = {stop!r} is not allowed: {', '.join(STOPS)}")
    if stop != "spectral":
        if sigma0_squared is not None:
            raise ValueError(f"sigma0_squared is only used by stop = 'spectral': got {stop!r}")
        return 0.0
    if sigma0_squared is None or not 0 < sigma0_squared < float("inf"):
        raise ValueError(f"stop = 'spectral' needs sigma0_squared > 0: got {sigma0_squared}")
    if not 11 <= constant < float("inf"):
        raise ValueError(f"spectral_constant must be at least 11: got {constant}")
    return constant * sigma0_squared


def _draw_coordinates(
    values: Tensor, coordinates: int | None, generator: np.random.Generator | None
) -> Tensor:
    if coordinates is None:
        return values
    if coordinates < 1:
        raise ValueError(f"coordinates must be at least 1: got {coordinates}")
    if coordinates >= values.shape[1]:
        return values
    if generator is None:
        raise ValueError("coordinates needs a generator to draw them: got None")
    drawn = generator.choice(values.shape[1], size=coordinates, replace=False, shuffle=False)
    return values[:, torch.from_numpy(np.sort(drawn))]
