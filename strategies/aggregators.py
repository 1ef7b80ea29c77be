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
    """Mean of the updates that survive RAGE (Data and Diggavi, Algorithm 2)."""

    corruption: CorruptionBound
    stop: Literal["count", "appendix-f"] = "count"
    coordinates: int | None = None
    average: Literal["uniform", "weighted"] = "uniform"

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
