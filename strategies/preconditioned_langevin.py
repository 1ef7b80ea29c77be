"""Preconditioned Langevin steps, as pSGLD's (Li et al., 2016) by RMSProp, in a federation:

    θ ← θ − η G ∇̃f^c(θ) + √G (√(2ητρ²) ξ_k + √(2η(1 − ρ²)τ/w_c) ξ^c_k)

G is diagonal and the server's, the same for all clients. It learns it in the first rounds, in which
nobody adds noise: V ← β V + (1 − β) Σ w_c u_c², u_c the clients' updates, coordinate by coordinate
(not the square of their mean, which goes to 0 where the chain is to be), and from then on it stays

    G_i = (1 + δ)/(√(V_i/max V) + δ),  from 1 for the coordinate of the largest V to (1 + δ)/δ,

so that `local-lr` is what that coordinate moves by, and the chain that follows has one law, with no
term for what G changes by: for a Gaussian posterior its covariance is τ A⁻¹ as η → 0, whatever G.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from blackthorn.settings.config import RunConfig
from blackthorn.settings.declaration import KeyGroup

from .aggregation import Aggregate
from .attestation import SentRule
from .enrolment import Client
from .fed_langevin import FedLangevin, Langevin, LangevinSteps, LocalLangevin
from .learning_rate import LangevinRate, step_size
from .local_rule import LocalRule, LocalSGD, LocalSteps, RoundOf
from .participation import CohortPlan
from .rounds import RoundContext

_SQUARES = "squares"


class PreconditionedOptions(KeyGroup):
    """In how many rounds G is learnt, β, and δ."""

    warm_up: int = Field(20, ge=1)
    decay: float = Field(0.9, ge=0, lt=1)
    damping: float = Field(0.1, gt=0)


@dataclass(frozen=True, eq=False)
class LocalPreconditioned(LocalLangevin):
    """A round's local steps of B clients, `preconditioners` G [B, d]."""

    preconditioners: Tensor

    def move(
        self, params: Tensor, gradients: Tensor, step: int, clients: Sequence[int], start: Tensor
    ) -> None:
        """One step in place on ``params`` [R, d], as `LocalLangevin.move`: FA-LD's from 0 along
        √G ∇̃f^c, times √G."""
        del start
        of, device = self.langevin, params.device
        root = self.preconditioners[list(clients)].to(params).sqrt()
        moved = torch.zeros_like(params)
        of.step(
            moved,
            root * of.energy_gradient(params, gradients, self.total_examples),
            step_size(self.first_step_size, self.strong_convexity, step),
            self.share[list(clients)].to(device),
            self._shared(params, step, clients).to(device) if of.shared_fraction > 0 else None,
            self._own(params, clients).to(device) if of.shared_fraction < 1 else None,
        )
        params.addcmul_(root, moved)


@dataclass(frozen=True)
class PreconditionedSteps(LangevinSteps):
    """A client's K steps are FA-LD's with the preconditioner G that is its memory."""

    name: ClassVar[str] = "preconditioned"

    def steps(self, sgd: LocalSGD, num_clients: int, round_of: RoundOf) -> LocalSteps:
        """Raises ValueError where a client was not told its weight, or sent no G above 0."""
        sent = [round_of(row).memory for row in range(num_clients)]
        known = [memory for memory in sent if memory is not None and bool((memory > 0).all())]
        if len(known) < num_clients:
            raise ValueError("the server sent no preconditioner of numbers above 0")
        base = super().steps(sgd, num_clients, round_of)
        return LocalPreconditioned(**vars(base), preconditioners=torch.stack(known))


class PreconditionedLangevin(FedLangevin):
    """FA-LD with a diagonal preconditioner that the server learns in the first `warm_up` rounds.

    Those are descents without noise, and no samples: burn-in is no shorter. `decay` β in [0, 1) and
    `damping` δ > 0 as above. The other options are those of FedLangevin.
    Raises ValueError for values out of range.
    """

    Options = PreconditionedOptions
    share_of_noise = "round"

    def __init__(
        self,
        step_size: float | LangevinRate,
        *,
        warm_up: int = 20,
        decay: float = 0.9,
        damping: float = 0.1,
        **options: Any,
    ) -> None:
        super().__init__(step_size, **options)
        self._own = PreconditionedOptions(warm_up=warm_up, decay=decay, damping=damping)
        self._squares = torch.empty(0)

    @classmethod
    def check_examples(cls, config: RunConfig, counts: Mapping[int, int]) -> None:
        """Raises ValueError where rounds without noise would be samples."""
        super().check_examples(config, counts)
        warm_up = cls.option_values(config)["warm_up"]
        if config.burn_in < warm_up:
            raise ValueError(
                f"burn-in = {config.burn_in} is not allowed with warm-up = {warm_up}: at least "
                "that, since rounds that learn the preconditioner have no noise"
            )

    @classmethod
    def configured_rule(cls, config: RunConfig, local_lr: float, asked: SentRule) -> LocalRule:
        """The steps that the run asks for: with the server's G, or in its warm-up, which it says,
        without noise."""
        kind = LangevinSteps if asked.name == LangevinSteps.name else PreconditionedSteps
        return _rule(kind, Langevin.of(config), LangevinRate.of(config), local_lr)

    def local_rule(self, context: RoundContext) -> LocalRule:
        """Descent in the warm-up, then FA-LD's steps with G."""
        kind = LangevinSteps if self._warms_up(context) else PreconditionedSteps
        return _rule(kind, self._langevin, self._step_sizes, context.local_lr)

    def draw_cohort(self, clients: Sequence[int], context: RoundContext) -> CohortPlan:
        """The scheme's; after the warm-up each is sent G."""
        plan = super().draw_cohort(clients, context)
        if self._warms_up(context):
            return plan
        g = self._preconditioner(context.model)
        return replace(plan, memories=dict.fromkeys(plan.clients, g))

    def combine(self, updates: Tensor, weights: Tensor, context: RoundContext) -> Aggregate:
        """The mean of the clients' models; in the warm-up V follows their updates [K, d]."""
        if self._warms_up(context):
            squares = weights @ updates.double().square()
            beta = self._own.decay if len(self._squares) else 0.0
            before = self._squares if len(self._squares) else torch.zeros_like(squares)
            self._squares = beta * before + (1 - beta) * squares
        return super().combine(updates, weights, context)

    def on_enrolment(self, clients: Sequence[Client]) -> None:
        """The population; a run begins without V."""
        super().on_enrolment(clients)
        self._squares = torch.empty(0)

    def own_values(self) -> dict[str, Any]:
        """FA-LD's, and V [d], float64."""
        return {**super().own_values(), _SQUARES: self._squares.numpy()}

    def restore_own(self, values: Mapping[str, Any]) -> None:
        """The same posterior, noise and preconditioner."""
        super().restore_own(values)
        self._squares = torch.tensor(np.asarray(values[_SQUARES]))

    def _warms_up(self, context: RoundContext) -> bool:
        return context.server_round <= self._own.warm_up

    def _preconditioner(self, model: Tensor) -> Tensor:
        """G [d] in the model's dtype; 1 where no update has been seen, or none moved."""
        largest = self._squares.max() if len(self._squares) else torch.tensor(0.0)
        if not largest > 0:
            return torch.ones_like(model)
        delta = self._own.damping
        return ((1 + delta) / ((self._squares / largest).sqrt() + delta)).to(model.dtype)


def _rule(
    kind: type[LangevinSteps], langevin: Langevin, rate: LangevinRate, local_lr: float
) -> LangevinSteps:
    quiet = replace(langevin, temperature=0.0) if kind is LangevinSteps else langevin
    return kind.of(quiet, rate, local_lr)
