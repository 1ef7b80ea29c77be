"""A threshold C that follows a quantile of the updates' lengths (Andrew et al., arXiv 1905.03871).

    b~_t = 1/2 + (1/r) [ Σ_{i ∈ S_t} (1[‖u_i‖ ≤ C_t] − 1/2) + N(0, σ_b²) ],  σ_b = r/20
    C_{t+1} = C_t exp(−η_C (b~_t − γ))

A client moves the count by 1/2, and the sum of the bounded updates by C_t. Both together are one
Gaussian of multiplier z where the updates' own is z_Δ = (z^−2 − (2 σ_b)^−2)^(−1/2).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from .bounding import ClipNorm, row_norms
from .noise import Randomness, on_grid
from .release import real, take_over

# σ_b as a part of r.
_COUNT_NOISE = 1 / 20
# Beyond, no threshold is of use, and float32 has none.
_LEAST, _MOST = 1e-12, 1e12
# How much longer than C a client leaves its update: whether it was is the server's to see.
SLACK = 2.0


@dataclass(frozen=True)
class AdaptiveThreshold:
    """`quantile` γ: the part of the updates that is to be shorter than C. `rate` η_C: how fast C
    follows. Raises ValueError for values out of range."""

    quantile: float = 0.5
    rate: float = 0.2

    def __post_init__(self) -> None:
        take_over(self, real, "quantile", "rate")
        if not 0 < self.quantile < 1:
            raise ValueError(f"quantile = {self.quantile} is not allowed: between 0 and 1")
        if not 0 < self.rate <= 10:
            raise ValueError(f"rate = {self.rate} is not allowed: above 0, at most 10")

    def next(self, threshold: float, share: float) -> float:
        """C_{t+1} from C_t and b~_t."""
        return min(max(threshold * math.exp(-self.rate * (share - self.quantile)), _LEAST), _MOST)


def count_deviation(cohort_size: float) -> float:
    """σ_b."""
    return cohort_size * _COUNT_NOISE


def update_multiplier(noise_multiplier: float, cohort_size: float) -> float:
    """z_Δ > z, of the noise on the updates. Raises ValueError where the count's noise alone would
    cost more than z: σ_b ≤ z/2."""
    count = 2 * count_deviation(cohort_size)
    if not count > noise_multiplier:
        raise ValueError(
            f"a cohort of {cohort_size:g} is too small for an adaptive threshold with "
            f"noise_multiplier = {noise_multiplier:.4g}: the count of updates below it, with noise "
            f"of r/20, costs more than that by itself; above {10 * noise_multiplier:.4g} clients a "
            "round, or leave the threshold fixed"
        )
    return (noise_multiplier**-2 - count**-2) ** -0.5


@dataclass
class Threshold:
    """C of a run, which moves where its plan says so."""

    clip_norm: ClipNorm
    adaptive: AdaptiveThreshold | None
    cohort_size: float

    @property
    def slack(self) -> float:
        """In how many C a client keeps its update."""
        return 1.0 if self.adaptive is None else SLACK

    def noised_share(
        self, updates: torch.Tensor, bound: float, randomness: Randomness
    ) -> torch.Tensor:
        """b~ [1], float64, of the clients' updates [K, d], not bounded yet; one that is not finite
        is longer than any threshold; `bound` is C in their unit. [0] where C stays."""
        if self.adaptive is None:
            return torch.zeros(0, dtype=torch.float64)
        below = (row_norms(updates) <= bound).double() - 0.5
        deviation = count_deviation(self.cohort_size)
        total = below.sum() + float(randomness.normal(1)[0]) * deviation
        return (0.5 + on_grid(total, deviation) / self.cohort_size).reshape(1)

    def follow(self, share: torch.Tensor) -> None:
        """C of the next round, from b~ [1]; [0] where it stays."""
        if self.adaptive is not None:
            moved = self.adaptive.next(self.clip_norm.value, float(share[0]))
            self.clip_norm = replace(self.clip_norm, value=moved)

    def told(self) -> dict[str, float]:
        """C, in its own unit, where it moves; also the state's."""
        return {} if self.adaptive is None else {"clip_norm": self.clip_norm.value}

    def restore(self, values: Mapping[str, Any]) -> None:
        """Go on from what was `told` for a state."""
        if self.adaptive is not None and "clip_norm" in values:
            self.clip_norm = replace(self.clip_norm, value=float(values["clip_norm"]))
