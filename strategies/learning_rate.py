"""The local learning rate η_l over the rounds."""

import math
from dataclasses import dataclass
from typing import Literal

from blackthorn.settings.config import RunConfig

from .release import real, take_over


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
        take_over(self, real, "decay", "threshold", initial="local rate")
        if not 0 < self.initial < math.inf:
            raise ValueError(f"local rate = {self.initial} is not allowed: positive and finite")
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay = {self.decay} is not allowed: greater than 0, at most 1")
        if self.when not in ("every-round", "plateau"):
            raise ValueError(f"decay when {self.when!r} is not allowed: every-round or plateau")

    @property
    def first(self) -> float:
        """Rate of the first round."""
        return self.initial

    def at_least(self, rounds: int) -> float:
        """A rate that none of the first `rounds` rounds is known to be below."""
        decays = rounds - 1 if self.when == "every-round" else 0
        return self.initial * self.decay**decays

    def after_round(self, rate: float, gained: float | None, server_round: int = 0) -> float:
        """Rate of the round after `server_round`; `gained` is the accuracy gained, None where it is
        not known."""
        del server_round
        if self.when == "every-round":
            return rate * self.decay
        return rate * self.decay if gained is not None and gained < self.threshold else rate


@dataclass(frozen=True)
class LangevinRate(LocalRate):
    """η_k = 1/(1/η_0 + m k/12), k = 1, 2, … over local steps: Theorem 5.8 with η_0 = 1/(2L).

    ``initial`` is η_0, which no step has, ``strong_convexity`` m (0: the step size is fixed),
    ``local_steps`` K.
    Since 1/η grows by the same amount at every step, the size at the start of a round is all that
    a client has to be told. Raises ValueError for values out of range.
    """

    strong_convexity: float = 0.0
    local_steps: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.decay != 1.0:
            raise ValueError(f"decay = {self.decay} is not allowed: a step size decays by m k/12")
        if not 0 <= self.strong_convexity < math.inf:
            raise ValueError(f"m = {self.strong_convexity} is not allowed: 0 or more")
        if self.local_steps < 1:
            raise ValueError(f"local steps = {self.local_steps} is not allowed: at least 1")

    @classmethod
    def of(cls, config: RunConfig) -> "LangevinRate":
        """The run configuration's."""
        if config.step_size == "cyclical":
            return CyclicalRate(config.local_lr, cycle_rounds=config.cycle_rounds)
        decay = config.strong_convexity if config.step_size == "decaying" else 0.0
        return cls(config.local_lr, strong_convexity=decay, local_steps=config.local_steps)

    @property
    def first(self) -> float:
        """η_1, the first step's."""
        return step_size(self.initial, self.strong_convexity, 1)

    def after_round(self, rate: float, gained: float | None, server_round: int = 0) -> float:
        """The step size K local steps after the step size ``rate``."""
        del gained, server_round
        return step_size(rate, self.strong_convexity, self.local_steps)


@dataclass(frozen=True)
class CyclicalRate(LangevinRate):
    """η of round t is η_0 (1 + cos(π ((t − 1) mod M)/M))/2, M = `cycle_rounds` (Zhang et al., 2020,
    arXiv 1902.03932): large steps, which leave a mode, at a cycle's beginning, small ones, whose
    samples are unbiased, at its end. It is the same in all steps of a round.

    Raises ValueError for a cycle below 2 rounds.
    """

    cycle_rounds: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cycle_rounds < 2 or self.strong_convexity:
            raise ValueError(
                f"cycle rounds = {self.cycle_rounds} is not allowed: at least 2, with no decay"
            )

    def after_round(self, rate: float, gained: float | None, server_round: int = 0) -> float:
        """The step size of the round after `server_round`."""
        del rate, gained
        phase = (server_round % self.cycle_rounds) / self.cycle_rounds
        return self.initial * (1 + math.cos(math.pi * phase)) / 2


def step_size(first: float, strong_convexity: float, step: int) -> float:
    """η ``step`` local steps after η = ``first``: 1/(1/first + m step/12)."""
    if strong_convexity == 0:
        return first
    return 1 / (1 / first + strong_convexity * step / 12)
