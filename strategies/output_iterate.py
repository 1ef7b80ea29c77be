"""Which iterate a run hands out: theorems speak of a random one or of a mean, not of the last."""

import math
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from flwr.app import Array, ArrayRecord

from blackthorn.randomness import Stream, generator_of
from blackthorn.settings.catalogue import WEIGHTED

from .judging import Judge

Rule = Literal["last", "random-weighted", "uniform", "best", "uniform-average", "weighted-average"]
AVERAGES = ("uniform-average", "weighted-average")


@dataclass(frozen=True)
class OutputIterate:
    """`last`: w_{T+1}. `uniform`: w_t, t uniform on 1..T (Yang et al., section 2; Das et al.,
    Algorithm 1, line 13). `random-weighted`: w_t with probability ∝ (1 − μ η_g η_l K/2)^{1−t}
    (Yang et al., Theorems 1 and 3); `contraction` is μ η_g η_l K/2. `uniform-average` and
    `weighted-average`: the mean of w_1 .. w_T with the same weights, which is what the random one
    is on average. `best`: the evaluated iterate that is best by
    `judge`; the last, where no evaluation has a finite figure.

    w_t is the model with which round t begins, so w_1 is the initial one. A random choice is made
    before the run, from the seed. Raises ValueError where the contraction is not in (0, 1).
    """

    rule: Rule = "last"
    contraction: float = 0.0
    judge: Judge = field(default_factory=Judge)

    def __post_init__(self) -> None:
        object.__setattr__(self, "contraction", float(self.contraction))
        if self.rule in WEIGHTED and not 0 < self.contraction < 1:
            raise ValueError(
                f"mu * eta_g * eta_l * K / 2 = {self.contraction:g} is not allowed with "
                f"{self.rule}: greater than 0 and less than 1"
            )

    def draw(self, num_rounds: int, seed: int) -> int | None:
        """The round t in 1..T with whose first model w_t the run ends; None: not a fixed one."""
        if self.rule not in ("uniform", "random-weighted"):
            return None
        drawn = generator_of(Stream.OUTPUT_ITERATE, seed)
        return int(drawn.choice(np.arange(1, num_rounds + 1), p=self.weights(num_rounds)))

    def weights(self, num_rounds: int) -> np.ndarray:
        """Probabilities of t = 1..T for the random rules, float64 [T]: the weights of the means."""
        if self.rule not in WEIGHTED:
            return np.full(num_rounds, 1 / num_rounds)
        # Relative to the largest, (1 − c)^{T−t}: the weights themselves would overflow.
        weights = np.exp(np.arange(num_rounds)[::-1] * math.log1p(-self.contraction))
        return weights / weights.sum()

    def newest_share(self, num_seen: int) -> float:
        """The weight of w_t in the mean of w_1 .. w_t, t = `num_seen`, ∝ (1 − c)^{1−t}."""
        if self.rule not in WEIGHTED:
            return 1 / num_seen
        return self.contraction / -math.expm1(num_seen * math.log1p(-self.contraction))


class _RunningMean:
    """The mean of models, in float64 whatever their dtype: a sum of T float32 terms would lose
    what the last ones add. Entries that are no floating-point numbers are the newest model's."""

    def __init__(self, output: OutputIterate) -> None:
        self._output = output
        self._seen = 0
        self.means: dict[str, np.ndarray] = {}
        self._newest = ArrayRecord()

    def add(self, arrays: ArrayRecord) -> None:
        """The next iterate."""
        self._seen += 1
        share, self._newest = self._output.newest_share(self._seen), arrays
        for name, array in arrays.items():
            value = array.numpy()
            if np.issubdtype(value.dtype, np.floating):
                wide = value.astype(np.float64)
                mean = self.means.setdefault(name, np.zeros_like(wide))
                self.means[name] = mean + share * (wide - mean)

    def arrays(self) -> ArrayRecord:
        """The mean, in the models' dtypes."""
        found = {name: array.numpy() for name, array in self._newest.items()}
        means = {name: mean.astype(found[name].dtype) for name, mean in self.means.items()}
        return ArrayRecord({name: Array(v) for name, v in {**found, **means}.items()})

    def restore(self, seen: int, means: Mapping[str, np.ndarray], newest: ArrayRecord) -> None:
        """Go on from another's."""
        self._seen, self._newest = seen, newest
        self.means = {name: np.array(mean) for name, mean in means.items()}


class IterateKeeper:
    """Keeps the iterate that a run hands out, while the iterates pass by."""

    def __init__(self, output: OutputIterate, num_rounds: int, seed: int) -> None:
        self._rule, self._judge = output.rule, output.judge
        self._num_rounds = num_rounds
        self._mean = _RunningMean(output) if output.rule in AVERAGES else None
        drawn = output.draw(num_rounds, seed)
        # w_t is the model after t - 1 rounds.
        self._wanted = None if drawn is None else drawn - 1
        self._best: dict[str, float] | None = None
        self._kept = ArrayRecord()
        self.server_round = 0

    @property
    def arrays(self) -> ArrayRecord:
        """The iterate, or the mean of those that were seen."""
        return self._kept if self._mean is None else self._mean.arrays()

    def see(self, server_round: int, arrays: ArrayRecord, metrics: dict[str, float]) -> None:
        """The model after `server_round` rounds and its evaluation (empty: none)."""
        if self._mean is not None:
            # w_{T+1} is the model of no round.
            if server_round < self._num_rounds:
                self._mean.add(arrays)
                self._kept, self.server_round = arrays, server_round
        elif self._keeps(server_round, metrics):
            self._kept, self.server_round = arrays, server_round
            if self._judge.prefers(metrics, None):
                self._best = metrics

    @property
    def is_judged(self) -> bool:
        """Whether some evaluation has told how good a model is."""
        return self._best is not None

    def means(self) -> dict[str, np.ndarray]:
        """What `restore` needs of a mean, by the entries' names, float64; empty for other rules."""
        return {} if self._mean is None else dict(self._mean.means)

    def values(self) -> dict[str, Any]:
        """What `restore` needs beside the arrays, in JSON's types."""
        return {"server_round": self.server_round, "wanted": self._wanted, "best": self._best}

    def restore(
        self,
        arrays: ArrayRecord,
        values: Mapping[str, Any],
        means: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Go on from `arrays`, `values` and `means` of another keeper; what it drew stays drawn."""
        self._kept, self.server_round = arrays, values["server_round"]
        self._wanted, self._best = values["wanted"], copy(values["best"])
        if self._mean is not None:
            self._mean.restore(self.server_round + 1, means or {}, arrays)

    def _keeps(self, server_round: int, metrics: dict[str, float]) -> bool:
        if self._wanted is not None:
            # The ones before it too: a run may end before its last round.
            return server_round <= self._wanted
        return (
            self._rule == "last" or self._best is None or self._judge.prefers(metrics, self._best)
        )
