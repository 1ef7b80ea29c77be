"""FAT-Clipping per round (Yang et al., Algorithm 2)."""

from typing import Unpack

import torch

from .bounding import clip
from .frame import FederatedStrategy, FrameOptions
from .local_rule import BOUND, CLIP_UPDATE, LocalRule
from .update_clipping import ClipNorm, Units


class FatClippingPR(FederatedStrategy):
    """w ← w − η_g η_l (1/|S_t|) Σ clip(u_i, λ), u_i the client's sum of K gradients.

    An honest client clips what it sends; the server clips again and reports who did not.
    `clip_norm` is λ, in `clip_units`. The other options are those of FrameOptions.
    """

    def __init__(
        self, clip_norm: float, *, clip_units: Units = "gradient", **frame: Unpack[FrameOptions]
    ) -> None:
        super().__init__(**frame)
        self._clip_norm = ClipNorm(clip_norm, clip_units)

    def local_rule(self, local_lr: float) -> LocalRule:
        """The update is clipped to λ."""
        return LocalRule(CLIP_UPDATE, {BOUND: self.norm_bound(local_lr)})

    def norm_bound(self, local_lr: float) -> float:
        """λ in gradient units."""
        return self._clip_norm.in_gradient_units(local_lr)

    def bound(self, updates: torch.Tensor, model: torch.Tensor, local_lr: float) -> torch.Tensor:
        """clip(u_i, λ) of every row of `updates` [K, d]."""
        del model
        return clip(updates, self.norm_bound(local_lr))
