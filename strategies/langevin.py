"""Federated averaging Langevin dynamics (Deng et al., Algorithms 1-6), one local step at a time.

The target is π(θ) ∝ exp(−f(θ)/τ) with the energy f = Σ_c p_c f^c, f^c = ℓ^c/p_c − ln prior, where
ℓ^c is the *sum* of the negative log-likelihood over client c's examples and p_c = n_c/n its share
of all n examples. So f is the total negative log-likelihood minus the log prior, once.

    θ ← θ − η ∇̃f^c(θ) + √(2ητρ²) ξ_k + √(2η(1 − ρ²)τ/p_c) ξ^c_k

ξ_k is the same on every client, ξ^c_k the client's own. Averaged with the weights p_c the noises
have covariance ρ² 2ητ I + Σ p_c² (1 − ρ²) 2ητ/p_c I = 2ητ I, whatever ρ and p.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from .learning_rate import LocalRate

# Largest relative difference of the shares that counts as balanced data.
BALANCE_TOLERANCE = 0.01


@dataclass(frozen=True)
class Langevin:
    """What the local steps of all clients have in common.

    ``temperature`` τ; ``shared_fraction`` ρ in [0, 1], the part of the noise that all clients
    share; ``prior_precision`` λ of the prior N(0, I/λ), 0: the flat prior.
    Raises ValueError for values out of range.
    """

    temperature: float = 1.0
    shared_fraction: float = 0.0
    prior_precision: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature = {self.temperature} is not allowed: 0 or more")
        if not 0 <= self.shared_fraction <= 1:
            raise ValueError(f"shared noise = {self.shared_fraction} is not allowed: 0 to 1")
        if not 0 <= self.prior_precision < math.inf:
            raise ValueError(f"prior precision = {self.prior_precision} is not allowed: 0 or more")

    def energy_gradient(
        self, params: torch.Tensor, mean_gradient: torch.Tensor, total_examples: int
    ) -> torch.Tensor:
        """∇̃f^c [R, d] = n · mean_gradient + λθ: the mean over a batch times n, all clients' number.

        (n/B) Σ_batch ∇l estimates ∇ℓ^c/p_c = (n/n_c) Σ_all ∇l, for any client and batch size B.
        """
        gradient = mean_gradient * total_examples
        return gradient.add_(params, alpha=self.prior_precision)

    def shared_scale(self, step_size: float) -> float:
        """√(2ητρ²), the standard deviation of the shared noise."""
        return self.shared_fraction * math.sqrt(2 * step_size * self.temperature)

    def own_scale(self, step_size: float, share: torch.Tensor) -> torch.Tensor:
        """√(2η(1 − ρ²)τ/p_c) [R] for the shares p_c [R], those of the clients' own noises."""
        variance = 2 * step_size * (1 - self.shared_fraction**2) * self.temperature
        return torch.sqrt(variance / share)

    def step(
        self,
        params: torch.Tensor,
        energy_gradient: torch.Tensor,
        step_size: float,
        share: torch.Tensor,
        shared: torch.Tensor | None,
        own: torch.Tensor | None,
    ) -> None:
        """One local step of R clients, in place on ``params`` [R, d].

        ``share`` p_c [R]; ``shared`` ξ_k [d] (or [R, d], of several chains) and ``own`` ξ^c_k
        [R, d] are standard normal, None where their scale is 0.
        """
        params.add_(energy_gradient, alpha=-step_size)
        if shared is not None:
            params.add_(shared, alpha=self.shared_scale(step_size))
        if own is not None:
            params.addcmul_(own, self.own_scale(step_size, share).to(params.dtype)[:, None])


@dataclass(frozen=True)
class LangevinRate(LocalRate):
    """η_k = 1/(1/η_0 + m k/12), k counted over local steps: Theorem 5.8 with η_0 = 1/(2L).

    ``initial`` is η_0, ``strong_convexity`` m (0: the step size is fixed), ``local_steps`` K.
    Since 1/η grows by the same amount at every step, the size at the start of a round is all that
    a client has to be told. Raises ValueError for values out of range.
    """

    strong_convexity: float = 0.0
    local_steps: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.decay != 1.0:
            raise ValueError(f"decay = {self.decay} is not allowed: a step size decays by m k/12")
        if not 0 <= self.strong_convexity < math.inf:
            raise ValueError(f"m = {self.strong_convexity} is not allowed: 0 or more")
        if self.local_steps < 1:
            raise ValueError(f"local steps = {self.local_steps} is not allowed: at least 1")

    def after_round(self, rate: float, gained: float | None) -> float:
        """The step size K local steps after the step size ``rate``."""
        del gained
        return step_size(rate, self.strong_convexity, self.local_steps)


def step_size(first: float, strong_convexity: float, step: int) -> float:
    """η ``step`` local steps after η = ``first``: 1/(1/first + m step/12)."""
    if strong_convexity == 0:
        return first
    return 1 / (1 / first + strong_convexity * step / 12)


def shares(num_examples: Mapping[int, int]) -> dict[int, float]:
    """p_c = n_c/n by client. Raises ValueError where there are no examples."""
    total = sum(num_examples.values())
    if total < 1:
        raise ValueError("the clients have 0 examples: at least 1 is needed")
    return {client: count / total for client, count in num_examples.items()}


def require_balance(share: Mapping[int, float]) -> None:
    """Raises ValueError where the largest and smallest p_c differ by more than 1 %."""
    small, large = min(share, key=share.__getitem__), max(share, key=share.__getitem__)
    if share[large] > (1 + BALANCE_TOLERANCE) * share[small]:
        raise ValueError(
            f"uniform sampling without replacement needs balanced data: client {large} has "
            f"{share[large] / share[small]:.3g} times the examples of client {small}, allowed "
            f"is {1 + BALANCE_TOLERANCE:g} (with-replacement takes any shares)"
        )
