"""Aggregation rules as strategies call them: updates [K, d], weights [K], a generator."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import torch

from . import aggregation
from .aggregation import Aggregate, RoundOfRule
from .aggregation.rage import RageStop, variance_bound


class Aggregator(Protocol):
    """One vector [d] from bounded updates [K, d] in gradient units; `weights` [K] sum to 1.

    Raises ValueError where K replies do not allow the rule's guarantee: the round is skipped.
    """

    def __call__(self, updates: torch.Tensor, weights: torch.Tensor, at: RoundOfRule) -> Aggregate:
        """The round's aggregate."""


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


class Mixing(Protocol):
    """A pre-aggregator: the matrix [n, K], float64, that makes n rows of K updates [K, d].

    At most `num_corrupt` of the new rows may owe anything to corrupt ones that mixing cannot
    bound, so that the rule that follows is given the same number. Raises ValueError where K
    updates do not allow that.
    """

    def __call__(
        self, updates: torch.Tensor, num_corrupt: int, generator: np.random.Generator
    ) -> torch.Tensor:
        """The matrix [n, K], float64; `updates` [K, d] are left as they are."""


@dataclass(frozen=True)
class RobustRule:
    """A rule of `aggregation.RULES` by name, under an assumed number of corrupt clients.

    `options` are the rule's own; `mixing` changes the updates before the rule sees them. The
    round's weights are ignored: what a client says of itself must not give it influence.
    Raises ValueError for a name that is not known.
    """

    name: str
    corruption: CorruptionBound
    options: Mapping[str, Any] = field(default_factory=dict)
    mixing: Mixing | None = None

    def __post_init__(self) -> None:
        aggregation.get(self.name)

    def __call__(
        self,
        updates: torch.Tensor,
        weights: torch.Tensor,  # noqa: ARG002 (see above)
        at: RoundOfRule,
    ) -> Aggregate:
        """The rule's aggregate, its weights and survivors told of the K clients' own updates."""
        # Counted before the mixing: buckets are fewer than clients, and no less corrupt.
        num_corrupt = self.corruption.among(len(updates))
        if self.mixing is None:
            return self.aggregate(updates, num_corrupt, at.generator)
        matrix = self.mixing(updates, num_corrupt, at.generator)
        mixed = self.aggregate(aggregation.mix(updates, matrix), num_corrupt, at.generator)
        return aggregation.trace_back(mixed, matrix)

    def aggregate(
        self,
        updates: torch.Tensor,
        num_corrupt: int,
        generator: np.random.Generator,  # noqa: ARG002 (for rules that draw)
    ) -> Aggregate:
        """The rule itself on `updates` [n, d], mixed already."""
        return aggregation.get(self.name)(updates, num_corrupt, **self.options)


@dataclass(frozen=True)
class OwnRule(RobustRule):
    """A rule of the user's own, function(updates [K, d], num_corrupt) -> vector [d] or Aggregate.

    `name` is how messages call it. Of a plain vector nothing is known of who it owes what to:
    all rows count alike in the report. Raises ValueError for a result that is not finite or has
    another shape: the round is skipped.
    """

    function: Callable[..., Any] = aggregation.mean

    def __post_init__(self) -> None:
        """Any name will do."""

    def aggregate(
        self,
        updates: torch.Tensor,
        num_corrupt: int,
        generator: np.random.Generator,  # noqa: ARG002 (as RobustRule)
    ) -> Aggregate:
        """The function on a copy of `updates` [n, d], which it may change."""
        result = self.function(updates.clone(), num_corrupt)
        if not isinstance(result, Aggregate):
            rows = len(updates)
            try:
                vector = torch.as_tensor(result).detach().to(updates.dtype)
            except (RuntimeError, TypeError, ValueError) as error:
                kind = type(result).__name__
                raise ValueError(f"{self.name} gave {kind}, expected a vector") from error
            weights = torch.full((rows,), 1 / rows, dtype=torch.float64)
            result = Aggregate(vector, weights, torch.ones(rows, dtype=torch.bool))
        shape, expected = tuple(result.vector.shape), tuple(updates.shape[1:])
        if shape != expected:
            raise ValueError(f"{self.name} gave a vector of shape {shape}, expected {expected}")
        wrong = int((~torch.isfinite(result.vector)).sum())
        if wrong:
            raise ValueError(
                f"{self.name} gave a vector of which {wrong} of {len(result.vector)} values "
                "are not finite"
            )
        return result


class RageFilter(RobustRule):
    """Mean of the updates that survive RAGE (Data and Diggavi, Algorithm 2).

    The options are those of the function `rage`.
    Raises ValueError for a fraction of a third or more, and for unknown options.
    """

    def __init__(
        self,
        corruption: CorruptionBound,
        stop: RageStop = "count",
        coordinates: int | None = None,
        average: Literal["uniform", "weighted"] = "uniform",
        mixing: Mixing | None = None,
        *,
        sigma0_squared: float | None = None,
        spectral_constant: float = 11.0,
    ) -> None:
        # The rule itself would refuse these only in a round, which would be skipped for it.
        fraction = corruption.fraction
        if fraction is not None and fraction >= 1 / 3:
            raise ValueError(f"corrupt_fraction = {fraction} is not allowed: less than a third")
        variance_bound(stop, sigma0_squared, spectral_constant)
        if average not in ("uniform", "weighted"):
            raise ValueError(f"average = {average!r} is not allowed: uniform or weighted")
        if coordinates is not None and coordinates < 1:
            raise ValueError(f"coordinates = {coordinates} is not allowed: at least 1")
        options: dict[str, Any] = {"stop": stop, "coordinates": coordinates, "average": average}
        if stop == "spectral":
            options["sigma0_squared"] = sigma0_squared
            options["spectral_constant"] = spectral_constant
        super().__init__("rage", corruption, options, mixing)

    def aggregate(
        self, updates: torch.Tensor, num_corrupt: int, generator: np.random.Generator
    ) -> Aggregate:
        """RAGE on `updates` [n, d]; the coordinates it looks at come from the generator."""
        return aggregation.rage(updates, num_corrupt, generator=generator, **self.options)
