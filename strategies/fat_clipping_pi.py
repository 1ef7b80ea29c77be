"""FAT-Clipping per iteration (Yang et al., Algorithm 3)."""

from typing import Unpack

import torch

from .base import FederatedStrategy, StrategyOptions
from .bounding import NormBound, clip
from .local_rule import BOUND, CLIP_GRADIENT, LOCAL_STEPS, LocalRule
from .rounds import RoundContext
from .update_clipping import ClipNorm, Units


class FatClippingPI(FederatedStrategy):
    """w ← w − η_g η_l (1/|S_t|) Σ u_i, where every local step's gradient was clipped to λ.

    The clients clip before each of their `local_steps` K steps, and say so: a reply that does not
    attest the rule does not count. What the server can enforce of it is the consequence
    ‖u_i‖ ≤ K λ, and it does. `clip_norm` is λ, in `clip_units`. The other options are those of
    StrategyOptions.
    """

    needs_attestation = True

    def __init__(
        self,
        clip_norm: float,
        local_steps: int,
        *,
        clip_units: Units = "gradient",
        **options: Unpack[StrategyOptions],
    ) -> None:
        super().__init__(**options)
        if local_steps < 1:
            raise ValueError(f"local_steps = {local_steps} is not allowed: at least 1")
        self._clip_norm = ClipNorm(clip_norm, clip_units)
        self._local_steps = local_steps

    def local_rule(self, context: RoundContext) -> LocalRule:
        """Each of K gradients is clipped to λ."""
        bound = self._clip_norm.in_gradient_units(context.local_lr)
        return LocalRule(CLIP_GRADIENT, {BOUND: bound, LOCAL_STEPS: self._local_steps})

    def norm_bound(self, context: RoundContext) -> NormBound:
        """K λ in gradient units; K roundings, as the steps are added to the model one by one."""
        bound = self._clip_norm.in_gradient_units(context.local_lr)
        return NormBound(self._local_steps * bound, self._local_steps)

    def bound(self, updates: torch.Tensor, context: RoundContext) -> torch.Tensor:
        """clip(u_i, K λ) of every row of `updates` [K, d]."""
        return clip(updates, self.norm_bound(context).norm)
