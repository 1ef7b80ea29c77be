"""Stochastic gradient Hamiltonian Monte Carlo (Chen et al., 2014) in a federation, with the noise
geometry of FA-LD: in each of a round's K steps, with the friction α_k, α_0 = 1 and then α,

    v ← (1 − α_k) v − η (1 − α_k/2) ∇̃f^c(θ) + √(ητ α_k (2 − α_k)) (ρ ξ_k + √((1 − ρ²)/w_c) ξ^c_k)
    θ ← θ + v

w_c being what the client weighs in the round, so that the round's noise is √(ητ α_k (2 − α_k)) of
N(0, I) whoever takes part. The momentum is drawn afresh in a round's first step, from N(0, ητ I):
nothing but θ travels, and a client that is away, or new, has none that is out of date. So it lasts
no longer than K steps, and K around 1/α or more makes use of it. A step is one of leapfrog with the
friction in the middle of its kick (splitting ABOBA; Leimkuhler and Matthews, 2013): where f is
½θᵀAθ and all clients have that gradient, θ has the covariance τ(A − ηA²/4)⁻¹ for any K and α. With
K = 1 it is SGLD with the step η/2.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pydantic import Field
from torch import Tensor

from blackthorn.settings.config import RunConfig
from blackthorn.settings.declaration import KeyGroup

from .attestation import SentRule
from .fed_langevin import FedLangevin, Langevin, LangevinSteps, LocalLangevin
from .learning_rate import LangevinRate, step_size
from .local_rule import LocalRule, LocalSGD, LocalSteps, RoundOf
from .rounds import RoundContext


class SghmcOptions(KeyGroup):
    """α, how much of the momentum is drawn anew at a step."""

    friction: float = Field(0.1, gt=0, le=1)


@dataclass(frozen=True, eq=False)
class LocalSghmc(LocalLangevin):
    """A round's local steps of B clients; `velocity` v [d] by client, from one step to the next."""

    friction: float
    velocity: dict[int, Tensor] = field(default_factory=dict)

    def move(
        self, params: Tensor, gradients: Tensor, step: int, clients: Sequence[int], start: Tensor
    ) -> None:
        """One step in place on ``params`` [R, d], as `LocalLangevin.move`."""
        del start
        of = self.langevin
        eta = step_size(self.first_step_size, self.strong_convexity, step)
        alpha = 1.0 if step == 0 else self.friction
        energy = of.energy_gradient(params, gradients, self.total_examples)
        kick = energy.mul_(-eta * (1 - alpha / 2))
        # Langevin's scales are of the variance 2ητ.
        scale = math.sqrt(alpha * (2 - alpha) / 2)
        if of.shared_fraction > 0:
            shared = self._shared(params, step, clients).to(params.device)
            kick.add_(shared, alpha=scale * of.shared_scale(eta))
        if of.shared_fraction < 1:
            own = of.own_scale(eta, self.share[list(clients)]).to(params)[:, None]
            kick.addcmul_(self._own(params, clients).to(params.device), own, value=scale)
        for row, client in enumerate(clients):
            if step:
                kick[row].add_(self.velocity[client], alpha=1 - alpha)
            self.velocity[client] = kick[row]
        params.add_(kick)


@dataclass(frozen=True)
class SghmcSteps(LangevinSteps):
    """A client's K steps are SGHMC's; it is told its weight in the round, n and the shared seed."""

    name: ClassVar[str] = "sghmc"

    # Without a default it could not follow those that have one.
    friction: float = 0.1

    def steps(self, sgd: LocalSGD, num_clients: int, round_of: RoundOf) -> LocalSteps:
        """Raises ValueError where a client was not told its weight."""
        base = super().steps(sgd, num_clients, round_of)
        return LocalSghmc(**vars(base), friction=self.friction)


class FedSghmc(FedLangevin):
    """θ ← Σ w_c θ^c after K steps with momentum each; every θ is a step of the chain.

    `step_size` η is the square of leapfrog's: η/2 is Langevin's. `friction` α in (0, 1]. The other
    options are those of FedLangevin. Raises ValueError for a friction out of range.
    """

    Options = SghmcOptions
    share_of_noise = "round"

    def __init__(
        self, step_size: float | LangevinRate, *, friction: float = 0.1, **options: Any
    ) -> None:
        super().__init__(step_size, **options)
        self._friction = SghmcOptions(friction=friction).friction

    @classmethod
    def configured_rule(cls, config: RunConfig, local_lr: float, asked: SentRule) -> LocalRule:
        """The steps that the run's friction, temperature, noise, prior and step size ask for."""
        del asked
        rate, friction = LangevinRate.of(config), cls.option_values(config)["friction"]
        return SghmcSteps.of(Langevin.of(config), rate, local_lr, friction=friction)

    def local_rule(self, context: RoundContext) -> LocalRule:
        """The round's first step size, how it decays, α, τ, ρ and λ."""
        return SghmcSteps.of(
            self._langevin, self._step_sizes, context.local_lr, friction=self._friction
        )
