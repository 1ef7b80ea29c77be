"""Model clipping, the baseline that Claim 2.1 of Zhang et al. warns of."""

from typing import Unpack

import torch

from .base import FederatedStrategy, StrategyOptions
from .bounding import clip
from .local_rule import BOUND, CLIP_MODEL, LocalRule
from .rounds import RoundContext
from .update_clipping import ClipNorm


class ModelClipping(FederatedStrategy):
    """w ← mean of clip(w_i, c): the local *models* are clipped, not what they learned.

    `clip_norm` is c, in parameter units. Here for comparison only: it pulls the model to the
    origin. The other options are those of StrategyOptions.
    """

    def __init__(self, clip_norm: float, **options: Unpack[StrategyOptions]) -> None:
        super().__init__(**options)
        self._clip_norm = ClipNorm(clip_norm, "parameter").value

    def local_rule(self, context: RoundContext) -> LocalRule:
        """The model is clipped to c."""
        del context
        return LocalRule(CLIP_MODEL, {BOUND: self._clip_norm})

    def bound(self, updates: torch.Tensor, context: RoundContext) -> torch.Tensor:
        """(w_t − clip(w_i, c))/η_l for every row of `updates` [K, d]."""
        model, local_lr = context.model, context.local_lr
        local_models = model - local_lr * updates
        return (model - clip(local_models, self._clip_norm)) / local_lr
