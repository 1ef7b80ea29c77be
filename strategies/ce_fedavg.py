"""Clipping-enabled FedAvg (Zhang et al., Algorithm 2)."""

from typing import Unpack

from .base import StrategyOptions
from .fat_clipping_pr import FatClippingPR
from .update_clipping import Units


class CEFedAvg(FatClippingPR):
    """w ← w + η_g (1/|P_t|) Σ clip(Δ_i, c), Δ_i = w_i − w_t: parameter units by default.

    The same map as FAT-Clipping-PR up to the unit of the threshold. `clip_norm` is c. The other
    options are those of StrategyOptions.
    """

    def __init__(
        self,
        clip_norm: float,
        *,
        clip_units: Units = "parameter",
        **options: Unpack[StrategyOptions],
    ) -> None:
        super().__init__(clip_norm, clip_units=clip_units, **options)
