"""DP-FedAvg with clipping (Das et al., Algorithm 1; Zhang et al., Algorithm 3), and DP-NormFedAvg,
which normalises in place of clipping (Das et al., Algorithm 2)."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from .bounded_update import BoundedUpdate, ClipUpdate
from .bounding import normalize
from .private_averaging import PrivateAveraging


class DPFedAvg(PrivateAveraging):
    """w ← w − η_g η_l v, v ← β v + (1/r) [ Σ clip(u_i, C) + N(0, (z C)² I) ].

    In gradient units (Das et al.) or, with ClipNorm(c, "parameter"), in those of CE-FedAvg (Zhang
    et al.). Takes a PrivacyPlan, the path of the ledger, and the options of StrategyOptions.
    """

    bounded = ClipUpdate


@dataclass(frozen=True)
class NormalizeUpdate(BoundedUpdate):
    """g_i = norm(u_i, C) = C u_i/‖u_i‖, and 0 for 0."""

    name: ClassVar[str] = "normalize-update"

    @staticmethod
    def constrain(updates: Tensor, bound: float) -> Tensor:
        """norm(u_i, C) of every row of `updates` [K, d], or of one [d]."""
        return normalize(updates, bound)


class DPNormFedAvg(PrivateAveraging):
    """w ← w − η_g η_l v, v ← β v + (1/r) [ Σ C u_i/‖u_i‖ + N(0, (z C)² I) ], norm(0) = 0.

    Takes a PrivacyPlan, the path of the ledger, and the options of StrategyOptions.
    """

    bounded = NormalizeUpdate
