"""Shards: distinct draws, no draw for a full batch, and held-out examples."""

import numpy as np
import pytest
import torch

from blackthorn.tasks.datasets import Examples
from blackthorn.tasks.shards import ExampleShard, split_held_out


def numbered(n: int) -> Examples:
    return Examples(torch.arange(n, dtype=torch.float32)[:, None] * 10, torch.arange(n))


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize("indices", [None, np.array([2, 3, 5, 7, 11, 13, 17])])
def test_a_batch_is_distinct_examples_of_the_shard(indices: np.ndarray | None) -> None:
    shard = ExampleShard(numbered(20), indices)
    allowed = set(range(20)) if indices is None else set(indices.tolist())
    assert shard.num_examples == len(allowed)
    rng, seen = generator(), torch.zeros(20)
    for _ in range(2000):
        x, y = shard.batch(rng, 4)
        assert torch.equal(x[:, 0], y * 10.0)
        assert len(set(y.tolist())) == 4
        seen[y] += 1
    share = 4 / len(allowed)
    expected = torch.tensor([2000 * share if i in allowed else 0 for i in range(20)])
    deviation = 5 * (2000 * share * (1 - share)) ** 0.5
    assert ((seen - expected).abs() <= deviation * (expected > 0)).all()


@pytest.mark.parametrize("size", [0, 5, 6, 10**9])
def test_a_full_batch_is_in_order_and_draws_nothing(size: int) -> None:
    rng = generator()
    before = rng.bit_generator.state
    x, y = ExampleShard(numbered(9), np.array([8, 1, 4, 3, 0])).batch(rng, size)
    assert y.tolist() == [8, 1, 4, 3, 0]
    assert x[:, 0].tolist() == [80, 10, 40, 30, 0]
    assert rng.bit_generator.state == before


def test_a_batch_depends_on_nothing_but_its_generator() -> None:
    shard = ExampleShard(numbered(50))
    first = shard.batch(generator(3), 8)[1]
    shard.batch(generator(4), 8)
    assert torch.equal(shard.batch(generator(3), 8)[1], first)


def test_empty_shards_and_negative_batches_are_refused() -> None:
    with pytest.raises(ValueError, match="a shard has 0 examples"):
        ExampleShard(numbered(3), np.array([], dtype=np.int64))
    with pytest.raises(ValueError, match="a batch has size -1"):
        ExampleShard(numbered(3)).batch(generator(), -1)


@pytest.mark.parametrize(
    ("n", "fraction", "held"),
    [(10, 0.0, 0), (10, 0.2, 2), (10, 0.01, 1), (10, 0.99, 9), (2, 0.5, 1), (1, 0.5, 0)],
)
def test_held_out_examples_are_the_asked_share_and_no_other_is_lost(
    n: int, fraction: float, held: int
) -> None:
    training, held_out = split_held_out(numbered(n), fraction, generator())
    assert len(held_out) == held
    assert sorted(training.y.tolist() + held_out.y.tolist()) == list(range(n))
    for part in (training, held_out):
        assert part.y.tolist() == sorted(part.y.tolist())
        assert torch.equal(part.x[:, 0], part.y * 10.0)


def test_held_out_examples_are_drawn_by_the_generator() -> None:
    first = split_held_out(numbered(40), 0.5, generator(0))[1].y.tolist()
    assert split_held_out(numbered(40), 0.5, generator(0))[1].y.tolist() == first
    assert split_held_out(numbered(40), 0.5, generator(1))[1].y.tolist() != first


@pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan")])
def test_fractions_out_of_range_are_refused(fraction: float) -> None:
    with pytest.raises(ValueError, match="at least 0 and below 1"):
        split_held_out(numbered(4), fraction, generator())
