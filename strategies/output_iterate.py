"""Which iterate a run hands out: the theorems speak of a random one, not of the last."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from flwr.app import ArrayRecord

from blackthorn.randomness import Stream, generator_of

Rule = Literal["last", "random-weighted", "uniform", "best"]


@dataclass(frozen=True)
class OutputIterate:
    """`last`: w_{T+1}. `uniform`: w_t, t uniform on 1..T (Yang et al., section 2; Das et al.,
    Algorithm 1, line 13). `random-weighted`: w_t with probability ∝ (1 − μ η_g η_l K/2)^{1−t}
    (Yang et al., Theorems 1 and 3); `contraction` is μ η_g η_l K/2. `best`: the evaluated iterate
    of the highest accuracy (of the lowest loss where there is no accuracy).

    w_t is the model with which round t begins, so w_1 is the initial one. A random choice is made
    before the run, from the seed. Raises ValueError where the contraction is not in (0, 1).
    """

    rule: Rule = "last"
    contraction: float = 0.0

    def __post_init__(self) -> None:
        if self.rule == "random-weighted" and not 0 < self.contraction < 1:
            raise ValueError(
                f"mu * eta_g * eta_l * K / 2 = {self.contraction:g} is not allowed with "
                "random-weighted: greater than 0 and less than 1"
            )

    def draw(self, num_rounds: int, seed: int) -> int | None:
        """The round t in 1..T with whose first model w_t the run ends; None: not a fixed one."""
        if self.rule not in ("uniform", "random-weighted"):
            return None
        drawn = generator_of(Stream.OUTPUT_ITERATE, seed)
        return int(drawn.choice(np.arange(1, num_rounds + 1), p=self.weights(num_rounds)))

    def weights(self, num_rounds: int) -> np.ndarray:
        """Probabilities of t = 1..T for the random rules, float64 [T]."""
        if self.rule == "uniform":
            return np.full(num_rounds, 1 / num_rounds)
        # Relative to the largest, (1 − c)^{T−t}: the weights themselves would overflow.
        weights = np.exp(np.arange(num_rounds)[::-1] * math.log1p(-self.contraction))
        return weights / weights.sum()


class IterateKeeper:
    """Keeps the iterate that a run hands out, while the iterates pass by."""

    def __init__(self, output: OutputIterate, num_rounds: int, seed: int) -> None:
        self._rule = output.rule
        drawn = output.draw(num_rounds, seed)
        # w_t is the model after t - 1 rounds.
        self._wanted = None if drawn is None else drawn - 1
        self._best: dict[str, float] | None = None
        self.arrays = ArrayRecord()
        self.server_round = 0

    def see(self, server_round: int, arrays: ArrayRecord, metrics: dict[str, float]) -> None:
        """The model after `server_round` rounds and its evaluation (empty: none)."""
        if self._keeps(server_round, metrics):
            self.arrays, self.server_round = arrays, server_round
            self._best = metrics or self._best

    def values(self) -> dict[str, Any]:
        """What `restore` needs beside the arrays, in JSON's types."""
        return {"server_round": self.server_round, "wanted": self._wanted, "best": self._best}

    def restore(self, arrays: ArrayRecord, values: Mapping[str, Any]) -> None:
        """Go on from `arrays` and `values` of another keeper; what it drew stays drawn."""
        self.arrays, self.server_round = arrays, values["server_round"]
        self._wanted, self._best = values["wanted"], values["best"]

    def _keeps(self, server_round: int, metrics: dict[str, float]) -> bool:
        if self._wanted is not None:
            # The ones before it too: a run may end before its last round.
            return server_round <= self._wanted
        return self._rule == "last" or self._best is None or is_better(metrics, self._best)


def is_better(metrics: dict[str, float], best: dict[str, float] | None) -> bool:
    """Whether an evaluation beats the best so far: higher accuracy, else lower loss."""
    score, beaten = _score(metrics), -math.inf if best is None else _score(best)
    return math.isfinite(score) and (math.isnan(beaten) or score > beaten)


def _score(metrics: dict[str, float]) -> float:
    return metrics["accuracy"] if "accuracy" in metrics else -metrics.get("loss", math.inf)
