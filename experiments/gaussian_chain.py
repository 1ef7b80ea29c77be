"""The exact moments of FA-LD's chain on quadratic energies: a linear recursion, no sampling.

Client c's local steps are an affine map of the model, θ_c = M_c θ + r_c + noise, and the server
forms Σ_c W_c θ_c with weights W that do not depend on θ. Mean and covariance of θ then follow from
E[W] and E[W Wᵀ] alone (Deng et al., Algorithms 1 to 3). With full participation the law is
Gaussian; with partial participation it is a mixture of Gaussians, of which these are the moments.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np


@dataclass(frozen=True)
class Energies:
    """f^c(θ) = ½ θᵀA_cθ − b_cᵀθ of every client: `a` [N, d, d], `b` [N, d], shares `p` [N]."""

    a: np.ndarray
    b: np.ndarray
    p: np.ndarray

    @property
    def posterior(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and covariance of π ∝ exp(−f), f = Σ p_c f^c, at temperature 1."""
        covariance = np.linalg.inv(np.einsum("c,cij->ij", self.p, self.a))
        return covariance @ (self.p @ self.b), covariance

    @property
    def smoothness(self) -> float:
        """L, the largest eigenvalue of any A_c."""
        return float(np.linalg.eigvalsh(self.a).max())

    @property
    def convexity(self) -> float:
        """m, the smallest eigenvalue of any A_c."""
        return float(np.linalg.eigvalsh(self.a).min())


def energies(
    rows: Sequence[np.ndarray], targets: Sequence[np.ndarray], prior_precision: float
) -> Energies:
    """Those of Bayesian linear regression with unit noise: client c has rows [n_c, d] and targets
    [n_c], and f^c = ℓ^c/p_c + ½ λ‖θ‖²."""
    counts = np.array([len(own) for own in targets])
    p = counts / counts.sum()
    d = rows[0].shape[1]
    a = [x.T @ x / s + prior_precision * np.eye(d) for x, s in zip(rows, p, strict=True)]
    b = [x.T @ y / s for x, y, s in zip(rows, targets, p, strict=True)]
    return Energies(np.array(a), np.array(b), p)


@dataclass(frozen=True)
class Participation:
    """E[W] [N] and E[W Wᵀ] [N, N] of the weights that the server gives to the clients' models."""

    mean: np.ndarray
    second: np.ndarray


def full(p: np.ndarray) -> Participation:
    """Everybody, weighted by share."""
    return Participation(p, np.outer(p, p))


def scheme_1(p: np.ndarray, draws: int) -> Participation:
    """S draws with replacement by share: W_c is the number of draws of c over S."""
    return Participation(p, np.outer(p, p) + (np.diag(p) - np.outer(p, p)) / draws)


def scheme_2(num_clients: int, draws: int) -> Participation:
    """S of N without replacement, each 1/S."""
    n, s = num_clients, draws
    pair = (s - 1) / (s * n * (n - 1)) if n > 1 else 0.0
    second = np.full((n, n), pair)
    np.fill_diagonal(second, 1 / (s * n))
    return Participation(np.full(n, 1 / n), second)


@dataclass(frozen=True)
class Chain:
    """A round of the chain: M [N, d, d], r [N, d], and the noises' covariances, `own` [N, d, d] of
    every client and `shared` [N, N, d, d] of every pair."""

    matrices: np.ndarray
    offsets: np.ndarray
    own: np.ndarray
    shared: np.ndarray
    participation: Participation


def chain(
    of: Energies, step_sizes: Sequence[float], rho: float, participation: Participation
) -> Chain:
    """A round of local steps with `step_sizes` [K] at temperature 1 and shared noise ρ:

    θ ← θ − η(A_cθ − b_c) + √(2ηρ²) ξ_k + √(2η(1 − ρ²)/p_c) ξ^c_k.
    """
    d = of.b.shape[1]
    one = np.eye(d)
    steps = [one - eta * of.a for eta in step_sizes]
    # What is left at the end of the round of what step k has added: the product of all later ones.
    later = [
        reduce(lambda after, step: step @ after, steps[k + 1 :], np.broadcast_to(one, of.a.shape))
        for k in range(len(steps))
    ]
    pushes = zip(later, step_sizes, strict=True)
    offsets = sum(eta * np.einsum("cij,cj->ci", rest, of.b) for rest, eta in pushes)
    shared = sum(
        2 * eta * rho**2 * np.einsum("cij,ekj->ceik", rest, rest)
        for rest, eta in zip(later, step_sizes, strict=True)
    )
    own = sum(
        2 * eta * (1 - rho**2) * np.einsum("cij,ckj->cik", rest, rest)
        for rest, eta in zip(later, step_sizes, strict=True)
    )
    return Chain(
        steps[0] if len(steps) == 1 else np.array(reduce(lambda a, b: b @ a, steps)),
        np.asarray(offsets),
        np.asarray(own) / of.p[:, None, None],
        np.asarray(shared),
        participation,
    )


Moments = tuple[np.ndarray, np.ndarray]


def after_round(of: Chain, mean: np.ndarray, covariance: np.ndarray) -> Moments:
    """Mean and covariance of θ one round later."""
    weights = of.participation
    moved = np.einsum("cij,j->ci", of.matrices, mean) + of.offsets
    new_mean = weights.mean @ moved
    # E[θ_c θ_eᵀ] of every pair of clients.
    pairs = np.einsum("cij,jk,elk->ceil", of.matrices, covariance, of.matrices)
    pairs = pairs + np.einsum("ci,ej->ceij", moved, moved) + of.shared
    second = np.einsum("ce,ceij->ij", weights.second, pairs)
    second += np.einsum("cc,cij->ij", weights.second, of.own)
    return new_mean, second - np.outer(new_mean, new_mean)


def stationary(of: Chain) -> Moments:
    """The moments that a round leaves as they are."""
    d = len(of.offsets[0])
    drift = np.einsum("c,cij->ij", of.participation.mean, of.matrices)
    offset = of.participation.mean @ of.offsets
    mean = np.linalg.solve(np.eye(d) - drift, offset)
    operator = np.einsum("ce,cij,ekl->ikjl", of.participation.second, of.matrices, of.matrices)
    _, constant = after_round(of, mean, np.zeros((d, d)))
    size = d * d
    solved = np.linalg.solve(np.eye(size) - operator.reshape(size, size), constant.reshape(size))
    return mean, solved.reshape(d, d)
