"""A client's examples, and how a batch of them is drawn."""

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from blackthorn.tasks.datasets import Examples

# What a shard without end counts as: alike for all, and a count that a server accepts.
ENDLESS = 10**9


class Shard(Protocol):
    """What local training needs to know of a client's data."""

    @property
    def num_examples(self) -> int:
        """How many examples the client has; ENDLESS where every batch is new."""

    @property
    def example(self) -> tuple[Tensor, Tensor]:
        """One input [...] and one label [...], for their shape and dtype."""

    def batch(self, generator: np.random.Generator, size: int) -> tuple[Tensor, Tensor]:
        """Inputs [b, ...] and labels [b, ...] of one step.

        ``size`` 0 or >= num_examples means all the examples, in order, without a draw.
        """

    def batches(
        self, generator: np.random.Generator, size: int, steps: int
    ) -> Iterable[tuple[Tensor, Tensor]]:
        """The batches of ``steps`` steps in a row, each as ``batch`` gives it."""


class JointShard(Shard, Protocol):
    """A shard that can draw for many clients at once, where all their shards are equal."""

    def joint_batches(
        self, generators: Sequence[np.random.Generator], size: int, steps: int
    ) -> Iterable[tuple[Tensor, Tensor]]:
        """Inputs [B, b, ...] and labels [B, b, ...] of ``steps`` steps: for each of B generators
        what ``batches`` gives."""


class ExampleShard:
    """The examples of ``examples`` at ``indices`` (by default all): an index, not a copy, so
    that many clients can share a data set or overlap."""

    def __init__(self, examples: Examples, indices: np.ndarray | None = None) -> None:
        self._examples = examples
        self._indices = None if indices is None else np.asarray(indices, dtype=np.int64)
        self.num_examples = len(examples) if self._indices is None else len(self._indices)
        if self.num_examples == 0:
            raise ValueError("a shard has 0 examples: it needs at least 1")

    @property
    def example(self) -> tuple[Tensor, Tensor]:
        """An example of the data set; see Shard."""
        return self._examples.x[0], self._examples.y[0]

    def batch(self, generator: np.random.Generator, size: int) -> tuple[Tensor, Tensor]:
        """``size`` distinct examples, drawn uniformly without replacement; see Shard."""
        if size < 0:
            raise ValueError(f"a batch has size {size}: it must be 0 (all examples) or more")
        if not self.draws(size):
            chosen = self.examples
        else:
            chosen = self._examples.select(self.rows(generator, size))
        return chosen.x, chosen.y

    def draws(self, size: int) -> bool:
        """Whether a batch of ``size`` is drawn, and not all the examples in order."""
        return 0 < size < self.num_examples

    def rows(self, generator: np.random.Generator, size: int) -> np.ndarray:
        """Where the examples of a batch are in ``data_set``, int64 [b]: what ``batch`` draws."""
        if not self.draws(size):
            return self.all_rows
        drawn = generator.choice(self.num_examples, size, replace=False)
        return drawn if self._indices is None else self._indices[drawn]

    @property
    def all_rows(self) -> np.ndarray:
        """Where all the examples are in ``data_set``, int64 [num_examples]."""
        return np.arange(self.num_examples) if self._indices is None else self._indices

    @property
    def data_set(self) -> Examples:
        """The examples that the shard is a part of."""
        return self._examples

    def batches(
        self, generator: np.random.Generator, size: int, steps: int
    ) -> Iterable[tuple[Tensor, Tensor]]:
        """``steps`` batches, each drawn when it is asked for; see Shard."""
        return (self.batch(generator, size) for _ in range(steps))

    @property
    def examples(self) -> Examples:
        """All the examples of the shard, in order."""
        if self._indices is None:
            return self._examples
        return self._examples.select(self._indices)


def with_flipped_labels(shard: ExampleShard, num_classes: int) -> ExampleShard:
    """The same examples with the labels C - 1 - y, for ``num_classes`` C."""
    honest = shard.examples
    return ExampleShard(Examples(honest.x, num_classes - 1 - honest.y))


def split_held_out(
    examples: Examples, fraction: float, generator: np.random.Generator
) -> tuple[Examples, Examples]:
    """Part a client's examples into (training, held out) at random, order kept within each.

    ``fraction`` in [0, 1) is held out, rounded; where it is above 0, at least one example is, but
    the last one is always trained on.

    Raises ValueError for another fraction.
    """
    if not 0 <= fraction < 1:
        raise ValueError(f"held-out fraction is {fraction}: it must be at least 0 and below 1")
    n = len(examples)
    wanted = max(1, round(fraction * n)) if fraction > 0 else 0
    held_out = torch.zeros(n, dtype=torch.bool)
    held_out[torch.from_numpy(generator.permutation(n)[: min(wanted, max(n - 1, 0))])] = True
    return (
        Examples(examples.x[~held_out], examples.y[~held_out]),
        Examples(examples.x[held_out], examples.y[held_out]),
    )
