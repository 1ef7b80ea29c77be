"""The exact law of FA-LD on quadratic energies, without sampling.

A client's K local steps are an affine map of the model and of the 2K noise vectors:

    θ_c = M_c θ + r_c + Σ_j O_cj ξ^c_j + Σ_j H_cj ξ_j

`expected_map` writes it down from the algorithm box; `implemented_map` reads it off our code, by
feeding it unit vectors in place of noise. The law of θ after a round, averaged with any weights,
then follows by linear algebra.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from blackthorn.client_app.training import train_clients
from blackthorn.settings.config import RunConfig
from blackthorn.strategies import fed_langevin
from blackthorn.strategies.fed_langevin import Langevin, LocalLangevin
from blackthorn.tasks.bayes_linear import heterogeneous_clients
from blackthorn.tasks.datasets import Examples
from blackthorn.tasks.flat_model import FlatModel
from blackthorn.tasks.least_squares import LinearForm, half_squared_error
from blackthorn.tasks.shards import ExampleShard

Cohort = tuple[float, np.ndarray]  # its probability, and the weights [N] of the clients' models
UNUSED = np.random.default_rng(0)


@dataclass(frozen=True)
class ClientMap:
    """M [d, d], r [d], and the responses to own and shared noise, [K, d, d] each."""

    matrix: np.ndarray
    offset: np.ndarray
    own: np.ndarray
    shared: np.ndarray


@dataclass(frozen=True)
class Data:
    """The rows x [n_c, d] and targets y [n_c] of every client, float64."""

    x: list[np.ndarray]
    y: list[np.ndarray]
    prior_precision: float = 0.0

    @property
    def total(self) -> int:
        return sum(map(len, self.y))

    @property
    def share(self) -> np.ndarray:
        return np.array([len(y) for y in self.y]) / self.total

    @property
    def dimension(self) -> int:
        return self.x[0].shape[1]

    def energy(self) -> tuple[np.ndarray, np.ndarray]:
        """A and b of f(θ) = ½ θᵀAθ − bᵀθ: the total negative log-posterior."""
        a = self.prior_precision * np.eye(self.dimension)
        b = np.zeros(self.dimension)
        for x, y in zip(self.x, self.y, strict=True):
            a, b = a + x.T @ x, b + x.T @ y
        return a, b

    def client_energy(self, client: int) -> tuple[np.ndarray, np.ndarray]:
        """A_c and b_c of f^c = ℓ^c/p_c − ln prior."""
        x, y, p = self.x[client], self.y[client], self.share[client]
        return x.T @ x / p + self.prior_precision * np.eye(self.dimension), x.T @ y / p


def data_of(config: RunConfig) -> Data:
    """What the clients of a run of bayes-linear hold."""
    x, y = heterogeneous_clients(
        config.num_clients,
        config.examples_per_client,
        config.problem_dimension,
        noise_scale=config.noise_scale,
        heterogeneity=config.heterogeneity,
        imbalance=config.imbalance,
        seed=config.seed,
    )
    return Data(x, y, config.prior_precision)


def draw_data(
    counts: Sequence[int], dimension: int, *, spread: float, precision: float = 0.0, seed: int = 5
) -> Data:
    """Clients whose curvatures and optima differ by `spread`; 0: the same law, other rows."""
    generator = np.random.default_rng(seed)
    xs, ys = [], []
    for count in counts:
        scale = np.exp(spread * generator.uniform(-1, 1, dimension))
        x = scale * generator.standard_normal((count, dimension))
        xs.append(x)
        ys.append(
            x @ (1 + spread * generator.standard_normal(dimension))
            + generator.standard_normal(count)
        )
    return Data(xs, ys, precision)


def expected_map(
    data: Data, client: int, eta: float, steps: int, tau: float, rho: float
) -> ClientMap:
    """θ ← θ − η(A_cθ − b_c) + √(2ητρ²) ξ_k + √(2η(1−ρ²)τ/p_c) ξ^c_k, K times."""
    a, b = data.client_energy(client)
    d = data.dimension
    one = np.eye(d) - eta * a
    matrix, offset = np.eye(d), np.zeros(d)
    for _ in range(steps):
        matrix, offset = one @ matrix, one @ offset + eta * b
    powers = np.stack([np.linalg.matrix_power(one, steps - 1 - j) for j in range(steps)])
    return ClientMap(
        matrix,
        offset,
        math.sqrt(2 * eta * (1 - rho**2) * tau / data.share[client]) * powers,
        math.sqrt(2 * eta * tau * rho**2) * powers,
    )


class Scripted:
    """In place of a client's generator: gives the vectors of `script` [K, d], one a step."""

    def __init__(self, script: np.ndarray) -> None:
        self._script = iter(script)

    def standard_normal(self, *, dtype: type, out: np.ndarray) -> None:
        assert dtype is np.float64
        out[:] = next(self._script)


def implemented_map(
    data: Data,
    client: int,
    eta: float,
    steps: int,
    tau: float,
    rho: float,
    kind: Callable[..., LocalLangevin] = LocalLangevin,
) -> ClientMap:
    """The same, read off `train_clients` with LocalLangevin, or steps of another `kind`: one row
    for every unit vector."""
    d, k = data.dimension, steps
    rows = 1 + d + 2 * k * d
    start, own, shared = np.zeros((rows, d)), np.zeros((rows, k, d)), np.zeros((rows, k, d))
    start[1 : 1 + d] = np.eye(d)
    own[1 + d : 1 + d + k * d] = np.eye(k * d).reshape(-1, k, d)
    shared[1 + d + k * d :] = np.eye(k * d).reshape(-1, k, d)
    ended = run_rows(data, [client] * rows, start, own, shared, eta, tau, rho, kind)
    offset = ended[0]
    response = (ended - offset)[1:]
    return ClientMap(
        response[:d].T,
        offset,
        response[d : d + k * d].reshape(k, d, d).swapaxes(1, 2),
        response[d + k * d :].reshape(k, d, d).swapaxes(1, 2),
    )


def run_rows(
    data: Data,
    clients: Sequence[int],
    start: np.ndarray,
    own: np.ndarray,
    shared: np.ndarray,
    eta: float,
    tau: float,
    rho: float,
    kind: Callable[..., LocalLangevin] = LocalLangevin,
) -> np.ndarray:
    """Our local training of clients[b] from start[b] [d] with given noises [B, K, d]."""
    spec = kind(
        Langevin(tau, rho, data.prior_precision),
        steps=own.shape[1],
        batch_size=0,
        first_step_size=eta,
        strong_convexity=0.0,
        server_round=1,
        total_examples=data.total,
        share=torch.from_numpy(data.share[list(clients)]),
        shared_seeds=range(len(clients)),
        own_noise=[Scripted(script) for script in own],
    )

    def scripted(seed: int, _round: int, step: int, *_of_what: object) -> torch.Tensor:
        return torch.from_numpy(shared[seed, step])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fed_langevin, "shared_noise", scripted)
        shards = shards_of(data)
        trained, _ = train_clients(
            FlatModel(LinearForm(data.dimension, 0.0), half_squared_error),
            torch.from_numpy(start),
            [shards[client] for client in clients],
            spec,
            [UNUSED] * len(clients),
        )
    return trained.numpy()


def shards_of(data: Data) -> list[ExampleShard]:
    return [
        ExampleShard(Examples(torch.from_numpy(x), torch.from_numpy(y)))
        for x, y in zip(data.x, data.y, strict=True)
    ]


# The law of the chain.


def averaged(
    maps: Sequence[ClientMap], weights: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """M, r and the noise's covariance of Σ_c weights_c θ_c: own noises are independent."""
    matrix = sum(w * m.matrix for w, m in zip(weights, maps, strict=True))
    offset = sum(w * m.offset for w, m in zip(weights, maps, strict=True))
    common = sum(w * m.shared for w, m in zip(weights, maps, strict=True))
    noise = np.einsum("kij,klj->il", common, common)
    for w, m in zip(weights, maps, strict=True):
        noise = noise + w**2 * np.einsum("kij,klj->il", m.own, m.own)
    return matrix, offset, noise


def next_moments(
    maps: Sequence[ClientMap], cohorts: Sequence[Cohort], mean: np.ndarray, covariance: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and covariance of θ after one more round, over cohorts and noise."""
    second = covariance + np.outer(mean, mean)
    new_mean, new_second = np.zeros_like(mean), np.zeros_like(second)
    for probability, weights in cohorts:
        m, r, noise = averaged(maps, weights)
        moved = m @ mean
        cross = np.outer(moved, r)
        new_mean += probability * (moved + r)
        new_second += probability * (m @ second @ m.T + cross + cross.T + np.outer(r, r) + noise)
    return new_mean, new_second - np.outer(new_mean, new_mean)


def stationary(
    maps: Sequence[ClientMap], cohorts: Sequence[Cohort]
) -> tuple[np.ndarray, np.ndarray]:
    """The moments that a round leaves as they are, by solving for them."""
    d = len(maps[0].offset)
    drift, offset = np.zeros((d, d)), np.zeros(d)
    for probability, weights in cohorts:
        m, r, _ = averaged(maps, weights)
        drift, offset = drift + probability * m, offset + probability * r
    mean = np.linalg.solve(np.eye(d) - drift, offset)
    operator, constant = np.zeros((d * d, d * d)), np.zeros((d, d))
    for probability, weights in cohorts:
        m, r, noise = averaged(maps, weights)
        shift = m @ mean + r - mean
        operator += probability * np.kron(m, m)
        constant += probability * (noise + np.outer(shift, shift))
    covariance = np.linalg.solve(np.eye(d * d) - operator, constant.reshape(-1)).reshape(d, d)
    return mean, covariance


def full(share: np.ndarray) -> list[Cohort]:
    return [(1.0, share)]


def with_replacement(share: np.ndarray, draws: int) -> list[Cohort]:
    """All sequences of draws by p_c: θ is the mean over the draws."""
    n = len(share)
    return [
        (float(np.prod(share[list(drawn)])), np.bincount(drawn, minlength=n) / draws)
        for drawn in itertools.product(range(n), repeat=draws)
    ]


def without_replacement(clients: int, draws: int) -> list[Cohort]:
    """All subsets, alike: θ is their mean."""
    subsets = list(_subsets(clients, draws))
    return [
        (1 / len(subsets), np.bincount(subset, minlength=clients) / draws) for subset in subsets
    ]


def _subsets(clients: int, draws: int) -> Iterator[tuple[int, ...]]:
    return itertools.combinations(range(clients), draws)


def w2(
    mean: np.ndarray, covariance: np.ndarray, mean_2: np.ndarray, covariance_2: np.ndarray
) -> float:
    """2-Wasserstein distance of two Gaussians; the trace term from eigenvalues of CC'."""
    eigenvalues = np.linalg.eigvals(covariance @ covariance_2).real
    cross = np.sqrt(np.maximum(eigenvalues, 0)).sum()
    squared = ((mean - mean_2) ** 2).sum() + np.trace(covariance + covariance_2) - 2 * cross
    return math.sqrt(max(0.0, squared))
