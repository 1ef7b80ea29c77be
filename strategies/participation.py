"""Who takes part in a round. Samplers draw from their own generator, never from the global one."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch

from blackthorn.randomness import Stream, generator_of

from .release import integer, real, take_over, whole


def send_order(seed: int, server_round: int, size: int) -> list[int]:
    """A permutation of 0..size - 1: in which order a round's cohort is asked."""
    return generator_of(Stream.SEND_ORDER, seed, server_round).permutation(size).tolist()


@dataclass(frozen=True)
class CohortPlan:
    """Who takes part in a round, and how often each counts.

    `counts` has a client's count by its stable id, ascending: 1, or what a scheme weighs it by.
    `told`: what the server tells a client beside what it tells all of them; `memories`: the vector
    [d] that it keeps for a client and sends it.
    """

    counts: Mapping[int, float]
    told: Mapping[int, Mapping[str, int | float]] = field(default_factory=dict)
    memories: Mapping[int, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, clients: Iterable[int]) -> "CohortPlan":
        """Each of `clients` counts once."""
        return cls(dict.fromkeys(sorted(clients), 1))

    @property
    def clients(self) -> list[int]:
        """Ids of the cohort, ascending."""
        return list(self.counts)

    def weights(
        self, clients: Iterable[int], examples: Mapping[int, int] | None = None
    ) -> torch.Tensor:
        """Weights [K], float64, of the `clients` that answered: ∝ their counts, sum 1.

        With `examples`, ∝ count times number of examples. Where a client of the cohort has not
        answered, the others stand in for it.
        """
        factors = [self.counts[c] * (1 if examples is None else examples[c]) for c in clients]
        weights = torch.tensor(factors, dtype=torch.float64)
        return weights / weights.sum()


class Participation(Protocol):
    """Draws the cohort S_t from the clients' stable ids."""

    def sample(self, clients: Sequence[int], generator: np.random.Generator) -> CohortPlan:
        """The cohort's plan."""


@dataclass(frozen=True)
class FullParticipation:
    """Every client, every round."""

    def sample(
        self,
        clients: Sequence[int],
        generator: np.random.Generator,  # noqa: ARG002 (nothing is drawn)
    ) -> CohortPlan:
        """Every one of `clients` once."""
        return CohortPlan.of(clients)


@dataclass(frozen=True)
class FixedParticipation:
    """`size` clients drawn uniformly without replacement (all of them where fewer are known).

    Raises ValueError for a size that is no integer from 1.
    """

    size: int

    def __post_init__(self) -> None:
        take_over(self, whole, size="cohort size")

    def sample(self, clients: Sequence[int], generator: np.random.Generator) -> CohortPlan:
        """`size` of `clients`, each subset of that size with the same probability."""
        # Positions are drawn, not ids: NumPy would turn node ids of 64 bits into floats.
        known = sorted(clients)
        size = min(self.size, len(known))
        drawn = generator.choice(len(known), size, replace=False)
        return CohortPlan.of(known[i] for i in drawn)


@dataclass(frozen=True)
class PoissonParticipation:
    """Every client on its own with probability `sample_rate`: the cohort may be empty.

    Raises ValueError for a rate outside (0, 1].
    """

    sample_rate: float

    def __post_init__(self) -> None:
        take_over(self, real, sample_rate="sample rate")
        if not 0 < self.sample_rate <= 1:
            raise ValueError(f"sample rate = {self.sample_rate} is not allowed: 0 to 1, not 0")

    def sample(self, clients: Sequence[int], generator: np.random.Generator) -> CohortPlan:
        """One draw for each of `clients`, in the order of their ids."""
        joins = generator.random(len(clients)) < self.sample_rate
        known = zip(sorted(clients), joins, strict=True)
        return CohortPlan.of(client for client, joined in known if joined)


@dataclass(frozen=True)
class RotatingParticipation:
    """Clients take turns: they are dealt into b = `groups`, and round t asks group t mod b, so that
    any two rounds of one client are b apart or more.

    Raises ValueError for a number of groups below 2.
    """

    groups: int
    seed: int = 0

    def __post_init__(self) -> None:
        take_over(self, whole, "groups")
        take_over(self, integer, "seed")
        if self.groups < 2:
            raise ValueError(f"groups = {self.groups} is not allowed: at least 2")

    def sample(self, clients: Sequence[int], generator: np.random.Generator) -> CohortPlan:
        """Whose turn it is hangs on the round, and where there are places, on those of the privacy
        plan: there is no such cohort without one."""
        del clients, generator
        raise ValueError("clients take turns by a privacy plan alone: see PrivacyPlan.draw")

    def of_round(self, clients: Iterable[int], server_round: int, places: int) -> CohortPlan:
        """Those of `clients` whose turn it is."""
        turn = server_round % self.groups
        return CohortPlan.of(c for c in clients if self.group_of(c, places) == turn)

    def group_of(self, client: int, places: int) -> int:
        """Of a client its id alone says it, whoever else is there or comes later.

        Ids below `places` are those of a population of known size, and are dealt evenly, in an
        order that the seed gives; others, a node's for example, are random numbers themselves.
        """
        if 0 <= client < places:
            return _dealt(self.seed, places)[client] % self.groups
        return client % self.groups


@lru_cache(maxsize=8)
def _dealt(seed: int, places: int) -> tuple[int, ...]:
    return tuple(generator_of(Stream.GROUPS, seed).permutation(places).tolist())
