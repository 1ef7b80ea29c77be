"""Who takes part in a round. Samplers draw from their own generator, never from the global one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from blackthorn.randomness import Stream, generator_of


def send_order(seed: int, server_round: int, size: int) -> list[int]:
    """A permutation of 0..size - 1: in which order a round's cohort is asked."""
    return generator_of(Stream.SEND_ORDER, seed, server_round).permutation(size).tolist()


class Participation(Protocol):
    """Draws the cohort S_t from the clients' stable ids."""

    def sample(self, clients: Sequence[int], generator: np.random.Generator) -> list[int]:
        """Ids of the cohort, ascending."""


@dataclass(frozen=True)
class FullParticipation:
    """Every client, every round."""

    def sample(
        self,
        clients: Sequence[int],
        generator: np.random.Generator,  # noqa: ARG002 (nothing is drawn)
    ) -> list[int]:
        return sorted(clients)


@dataclass(frozen=True)
class FixedParticipation:
    """`size` clients drawn uniformly without replacement (all of them where fewer are known).

    Raises ValueError for a size below 1.
    """

    size: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"cohort size = {self.size} is not allowed: at least 1")

    def sample(self, clients: Sequence[int], generator: np.random.Generator) -> list[int]:
        # Positions are drawn, not ids: NumPy would turn node ids of 64 bits into floats.
        known = sorted(clients)
        size = min(self.size, len(known))
        return sorted(known[i] for i in generator.choice(len(known), size, replace=False))


@dataclass(frozen=True)
class PoissonParticipation:
    """Every client on its own with probability `sample_rate`: the cohort may be empty.

    Raises ValueError for a rate outside (0, 1].
    """

    sample_rate: float

    def __post_init__(self) -> None:
        if not 0 < self.sample_rate <= 1:
            raise ValueError(f"sample rate = {self.sample_rate} is not allowed: 0 to 1, not 0")

    def sample(self, clients: Sequence[int], generator: np.random.Generator) -> list[int]:
        joins = generator.random(len(clients)) < self.sample_rate
        return [client for client, joined in zip(sorted(clients), joins, strict=True) if joined]
