"""Aggregation rules as the frame calls them: updates [K, d], weights [K], a generator."""

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch

from . import aggregation
from .aggregation import Aggregate
from .corruption import CorruptionBound


class Aggregator(Protocol):
    """One vector [d] from bounded updates [K, d] in gradient units; `weights` [K] sum to 1.

    Raises ValueError where K replies do not allow the rule's guarantee: the round is skipped.
    """

    def __call__(
        self, updates: torch.Tensor, weights: torch.Tensor, generator: np.random.Generator
    ) -> Aggregate: ...


def weighted_mean(
    updates: torch.Tensor,
    weights: torch.Tensor,
    generator: np.random.Generator,  # noqa: ARG001 (nothing is drawn)
) -> Aggregate:
    """Σ weights_i u_i."""
    return aggregation.mean(updates, weights)


@dataclass(frozen=True)
class RageFilter:
    """Mean of the updates that survive RAGE (Data and Diggavi, Algorithm 2).

    Raises ValueError for a fraction of a third or more, and for unknown options.
    """

    corruption: CorruptionBound
    stop: Literal["count", "appendix-f"] = "count"
    coordinates: int | None = None
    average: Literal["uniform", "weighted"] = "uniform"

    def __post_init__(self) -> None:
        # The rule itself would refuse these only in a round, which would be skipped for it.
        fraction = self.corruption.fraction
        if fraction is not None and fraction >= 1 / 3:
            raise ValueError(f"corrupt_fraction = {fraction} is not allowed: less than a third")
        if self.stop not in ("count", "appendix-f"):
            raise ValueError(f"stop = {self.stop!r} is not allowed: count or appendix-f")
        if self.average not in ("uniform", "weighted"):
            raise ValueError(f"average = {self.average!r} is not allowed: uniform or weighted")
        if self.coordinates is not None and self.coordinates < 1:
            raise ValueError(f"coordinates = {self.coordinates} is not allowed: at least 1")

    def __call__(
        self,
        updates: torch.Tensor,
        weights: torch.Tensor,  # noqa: ARG002 (the filter starts from uniform weights)
        generator: np.random.Generator,
    ) -> Aggregate:
        return aggregation.rage(
            updates,
            self.corruption.among(len(updates)),
            stop=self.stop,
            coordinates=self.coordinates,
            generator=generator,
            average=self.average,
        )
