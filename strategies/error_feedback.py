"""Clipping with error feedback (Clip21, arXiv 2305.18929; smoothed as in arXiv 2310.16920): what is
clipped is how far an update is from what is known of its client, so that clipping does not move the
point at which a run ends."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self, Unpack

import torch
from torch import Tensor

from blackthorn.settings.config import RunConfig
from blackthorn.settings.declaration import KeyGroup
from blackthorn.settings.derived import clip_units

from .aggregation import Aggregate
from .attestation import SentRule
from .base import FederatedStrategy
from .bounding import ClipNorm, Units, check_bound, clip, row_norms
from .enrolment import Client
from .local_rule import LocalRule, RoundOf
from .options import StrategyOptions
from .participation import CohortPlan
from .rounds import RoundContext


class ErrorFeedbackOptions(KeyGroup):
    """Whether the clients shorten smoothly in place of clipping."""

    smooth: bool = False


@dataclass(frozen=True)
class ClipDifference(LocalRule):
    """u_i becomes m_i + clip(u_i − m_i, C), C = `bound`, m_i the memory that the server keeps for
    the client and sends it. `smooth`: z C/√(‖z‖² + C²) in place of clip(z, C), as short and of the
    same slope at 0."""

    name: ClassVar[str] = "clip-difference"

    bound: float
    smooth: int | None = None

    def check_range(self, local_lr: float) -> None:
        """Raises ValueError where float32 does not hold the bound in both units."""
        check_bound(self.bound, local_lr)

    def on_update(
        self, start: Tensor, trained: Tensor, local_lr: float, round_of: RoundOf
    ) -> Tensor:
        """w_t − η_l (m_i + clip(u_i − m_i, C)) of the clients' models `trained` [B, d]."""
        memories = [round_of(row).memory for row in range(len(trained))]
        if any(memory is None or memory.shape != start.shape[-1:] for memory in memories):
            raise ValueError("the server sent no memory of the model's size")
        known = local_lr * torch.stack([m.to(trained) for m in memories if m is not None])
        difference, bound = start - trained - known, local_lr * self.bound
        if not self.smooth:
            return start - known - clip(difference, bound)
        factors = bound / (row_norms(difference) ** 2 + bound**2).sqrt()
        return start - known - (factors[:, None] * difference).to(trained)


class ErrorFeedback(FederatedStrategy):
    """m_i ← m_i + clip(u_i − m_i, C) for i ∈ S_t; w ← w − η_g η_l (1/m) Σ m_i, over all m clients.

    The memories m_i (0 at first) are the server's; a client is sent its own with every round, and
    what it answers is clipped against that again, so that nothing goes apart: a client that is not
    drawn, fails or starts anew has the memory that it had, which counts on; the mean is over all
    that ever enrolled. `clip_norm` is C in `clip_units`, the memories', too; with `smooth` a
    reply has to attest it. The server keeps m d numbers. The other options are those of
    StrategyOptions; the rule is the plain mean.
    """

    Options = ErrorFeedbackOptions

    def __init__(
        self,
        clip_norm: float,
        *,
        clip_units: Units = "gradient",
        smooth: bool = False,
        **options: Unpack[StrategyOptions],
    ) -> None:
        if options.setdefault("identity", "query") == "node":
            raise ValueError("identity = 'node' is not allowed: a memory is a client's, by its id")
        super().__init__(**options)
        self._clip_norm = ClipNorm(clip_norm, clip_units)
        # What is no longer than C the server cannot tell from what was clipped.
        self._smooth = self.needs_attestation = smooth
        self._memories: dict[int, Tensor] = {}

    @classmethod
    def build(cls, config: RunConfig, options: StrategyOptions) -> Self:
        """With the run's clip-norm and algorithm-options."""
        own: dict[str, Any] = cls.option_values(config)
        return cls(config.clip_norm, clip_units=clip_units(config), **own, **options)

    @classmethod
    def configured_rule(cls, config: RunConfig, local_lr: float, asked: SentRule) -> LocalRule:
        """The difference is clipped to C."""
        del asked
        return _rule(ClipNorm.of(config), cls.option_values(config)["smooth"], local_lr)

    def local_rule(self, context: RoundContext) -> LocalRule:
        """The difference is clipped to C."""
        return _rule(self._clip_norm, self._smooth, context.local_lr)

    def draw_cohort(self, clients: Sequence[int], context: RoundContext) -> CohortPlan:
        """The participation's, each with its memory."""
        plan = super().draw_cohort(clients, context)
        return replace(plan, memories={c: self._memory(c, context) for c in plan.clients})

    def combine(self, updates: Tensor, weights: Tensor, context: RoundContext) -> Aggregate:
        """(1/m) Σ m_i after the memories of the `accepted` have followed their updates [K, d]."""
        del weights
        known = torch.stack([self._memory(client, context) for client in context.accepted])
        bound = self._clip_norm.in_gradient_units(context.local_lr)
        followed = known + clip(updates - known, bound)
        followed = torch.where(torch.isfinite(followed).all(dim=1, keepdim=True), followed, known)
        scale = self._clip_norm.scale(context.local_lr)
        self._memories |= zip(context.accepted, scale * followed, strict=True)
        # By id: a restored run has read them in another order, which would move the last bits.
        memories = [memory for _, memory in sorted(self._memories.items())]
        total = torch.stack(memories).double().sum(dim=0)
        enrolled = len(context.population)
        vector = (total / (enrolled * scale)).to(updates.dtype)
        shares = torch.full((len(updates),), 1 / enrolled, dtype=torch.float64)
        return Aggregate(vector, shares, torch.ones(len(updates), dtype=torch.bool), 0)

    def on_enrolment(self, clients: Sequence[Client]) -> None:
        """A run begins without memories."""
        del clients
        self._memories = {}

    def own_values(self) -> dict[str, Any]:
        """The memories [d] by client, in the units of clip-norm."""
        return {str(client): memory.numpy() for client, memory in self._memories.items()}

    def restore_own(self, values: Mapping[str, Any]) -> None:
        """The memories go on."""
        self._memories = {int(client): torch.tensor(m) for client, m in values.items()}

    def _memory(self, client: int, context: RoundContext) -> Tensor:
        """m_i [d] in gradient units, in the model's dtype."""
        known = self._memories.get(client, torch.zeros_like(context.model))
        return known / self._clip_norm.scale(context.local_lr)


def _rule(clip_norm: ClipNorm, smooth: bool, local_lr: float) -> LocalRule:
    return ClipDifference(clip_norm.in_gradient_units(local_lr), 1 if smooth else None)
