"""The local learning rate η_l over the rounds."""

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class LocalRate:
    """η_l starts at `initial` and is multiplied by `decay` after a round.

    `when = "every-round"`: after each round. `when = "plateau"`: after a round in which the test
    accuracy rose by less than `threshold` (Data and Diggavi, section VI: 0.96 and 0.001).
    Raises ValueError for a rate that is not positive, or a decay outside (0, 1].
    """

    initial: float = 1.0
    decay: float = 1.0
    when: Literal["every-round", "plateau"] = "every-round"
    threshold: float = 0.001

    def __post_init__(self) -> None:
        if not 0 < self.initial < math.inf:
            raise ValueError(f"local rate = {self.initial} is not allowed: positive and finite")
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay = {self.decay} is not allowed: greater than 0, at most 1")
        if self.when not in ("every-round", "plateau"):
            raise ValueError(f"decay when {self.when!r} is not allowed: every-round or plateau")

    def at_least(self, rounds: int) -> float:
        """A rate that none of the first `rounds` rounds is known to be below."""
        decays = rounds - 1 if self.when == "every-round" else 0
        return self.initial * self.decay**decays

    def after_round(self, rate: float, gained: float | None) -> float:
        """Rate of the next round; `gained` is the accuracy gained, None where it is not known."""
        if self.when == "every-round":
            return rate * self.decay
        return rate * self.decay if gained is not None and gained < self.threshold else rate
