"""DP-NormFedAvg: normalisation in place of clipping (Das et al., Algorithm 2)."""

import torch

from .bounding import normalize
from .local_rule import NORMALIZE_UPDATE
from .private_averaging import PrivateAveraging


class DPNormFedAvg(PrivateAveraging):
    """w ← w − η_g η_l v, v ← β v + (1/r) [ Σ C u_i/‖u_i‖ + N(0, (z C)² I) ], norm(0) = 0.

    Takes a PrivacyPlan, the path of the ledger, and the options of StrategyOptions.
    """

    constraint = NORMALIZE_UPDATE

    def constrain(self, updates: torch.Tensor, bound: float) -> torch.Tensor:
        """norm(u_i, C) of every row of `updates` [K, d]."""
        return normalize(updates, bound)
