"""FAT-Clipping per round (Yang et al., Algorithm 2)."""

from typing import Unpack

import torch

from .base import FederatedStrategy, StrategyOptions
from .bounding import NormBound, clip
from .local_rule import BOUND, CLIP_UPDATE, LocalRule
from .rounds import RoundContext
from .update_clipping import ClipNorm, Units


class FatClippingPR(FederatedStrategy):
    """w ← w − η_g η_l (1/|S_t|) Σ clip(u_i, λ), u_i the client's sum of K gradients.

    An honest client clips what it sends; the server clips again and reports who did not.
    `clip_norm` is λ, in `clip_units`. The other options are those of StrategyOptions.
    """

    def __init__(
        self,
        clip_norm: float,
        *,
        clip_units: Units = "gradient",
        **options: Unpack[StrategyOptions],
    ) -> None:
        super().__init__(**options)
        self._clip_norm = ClipNorm(clip_norm, clip_units)

    def local_rule(self, context: RoundContext) -> LocalRule:
        """The update is clipped to λ."""
        return LocalRule(CLIP_UPDATE, {BOUND: self.norm_bound(context).norm})

    def norm_bound(self, context: RoundContext) -> NormBound:
        """λ in gradient units."""
        return NormBound(self._clip_norm.in_gradient_units(context.local_lr))

    def bound(self, updates: torch.Tensor, context: RoundContext) -> torch.Tensor:
        """clip(u_i, λ) of every row of `updates` [K, d]."""
        return clip(updates, self.norm_bound(context).norm)
