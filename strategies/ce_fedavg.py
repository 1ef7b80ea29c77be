"""Clipping-enabled FedAvg (Zhang et al., Algorithm 2)."""

from typing import Unpack

from .fat_clipping_pr import FatClippingPR
from .frame import FrameOptions
from .update_clipping import Units


class CEFedAvg(FatClippingPR):
    """w ← w + η_g (1/|P_t|) Σ clip(Δ_i, c), Δ_i = w_i − w_t: parameter units by default.

    The same map as FAT-Clipping-PR up to the unit of the threshold. `clip_norm` is c. The other
    options are those of FrameOptions.
    """

    def __init__(
        self, clip_norm: float, *, clip_units: Units = "parameter", **frame: Unpack[FrameOptions]
    ) -> None:
        super().__init__(clip_norm, clip_units=clip_units, **frame)
