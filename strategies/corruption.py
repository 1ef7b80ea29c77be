"""How many corrupt clients a rule assumes among the replies of a round."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class CorruptionBound:
    """Either a fixed number b, or ⌊fraction · K⌋ of K replies.

    Raises ValueError unless exactly one is given and the fraction is in [0, 1/2).
    """

    num_corrupt: int | None = None
    fraction: float | None = None

    def __post_init__(self) -> None:
        if (self.num_corrupt is None) == (self.fraction is None):
            raise ValueError("give either num_corrupt or corrupt_fraction")
        if self.num_corrupt is not None and self.num_corrupt < 0:
            raise ValueError(f"num_corrupt = {self.num_corrupt} is not allowed: at least 0")
        if self.fraction is not None and not 0 <= self.fraction < 0.5:
            raise ValueError(f"corrupt_fraction = {self.fraction} is not allowed: 0 to 0.5")

    def among(self, replies: int) -> int:
        """b for `replies` replies."""
        if self.num_corrupt is not None:
            return self.num_corrupt
        # 0.29 * 100 is 28.999999999999996 in binary: the user means 29.
        return math.floor((self.fraction or 0.0) * replies + 1e-9)
