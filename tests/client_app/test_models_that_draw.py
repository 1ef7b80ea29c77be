"""DP-SGD of models of one's own that draw, or remember, in `forward`: still example by example."""

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from blackthorn.client_app.dp_sgd import DPSGD, _clipped_sum, train_dp_sgd
from blackthorn.randomness import Stream
from blackthorn.strategies.noise import SeededRandomness
from blackthorn.tasks.datasets import Examples
from blackthorn.tasks.flat_model import FlatModel
from blackthorn.tasks.labelled import cross_entropy
from blackthorn.tasks.shards import ExampleShard

INPUTS, CLASSES, EXAMPLES = 16, 3, 12


class Own(nn.Module):
    """A linear layer, and between it and its input whatever `KINDS` says."""

    calls: Tensor

    def __init__(self, between: Callable[["Own", Tensor], Tensor]) -> None:
        super().__init__()
        self.output = nn.Linear(INPUTS, CLASSES)
        self.register_buffer("calls", torch.ones(1))
        self.seen: list[int] = []
        self.numbers = np.random.default_rng(4)
        self.generator = torch.Generator().manual_seed(4)
        self._between = between

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.output(self._between(self, x))
        return outputs


def counts_in_a_buffer(module: Own, x: Tensor) -> Tensor:
    module.calls += 1
    return x * module.calls


def counts_in_an_attribute(module: Own, x: Tensor) -> Tensor:
    module.seen.append(1)
    return x * len(module.seen)


KINDS: dict[str, Callable[[Own, Tensor], Tensor]] = {
    "dropout": lambda _, x: nn.functional.dropout(x, 0.5),
    "NumPy": lambda _, x: x * float(np.random.random()),  # noqa: NPY002
    "random": lambda _, x: x * random.random(),
    "a buffer": counts_in_a_buffer,
    "an attribute": counts_in_an_attribute,
    "a generator of its own": lambda m, x: x * torch.rand(x.shape, generator=m.generator),
    "NumPy's generator": lambda m, x: x * float(m.numbers.random()),
}
SPEC = DPSGD(
    steps=3,
    sample_rate=1.0,
    batch_size=EXAMPLES,
    learning_rate=0.5,
    weight_decay=0.0,
    noise_multiplier=1e-9,
    clip_norm=1.0,
)


def problem(kind: str) -> tuple[FlatModel, Tensor, Examples]:
    torch.manual_seed(1)
    model = FlatModel(Own(KINDS[kind]), cross_entropy)
    examples = Examples(torch.rand(EXAMPLES, INPUTS), torch.randint(0, CLASSES, (EXAMPLES,)))
    return model, model.flatten(model.module.state_dict()), examples


@pytest.mark.parametrize("kind", KINDS)
def test_an_example_more_moves_the_sum_by_its_own_gradient_alone(kind: str) -> None:
    """In front of the others, where it would shift what all behind it draw and find."""
    model, start, examples = problem(kind)
    sums = [
        _clipped_sum(model, start, examples.select(np.arange(first, last)), SPEC, 5)[0]
        for first, last in ((0, EXAMPLES), (1, EXAMPLES), (0, 1))
    ]
    torch.testing.assert_close(sums[0] - sums[1], sums[2], rtol=0, atol=1e-12)
    assert 0 < sums[2].norm() <= 1 + 1e-12


def test_steps_draw_afresh() -> None:
    model, start, examples = problem("dropout")
    one, other = (_clipped_sum(model, start, examples, SPEC, seed)[0] for seed in (5, 6))
    assert not torch.equal(one, other)
    shard = ExampleShard(examples)
    once, again = (
        train_dp_sgd(model, start, shard, SPEC, SeededRandomness(Stream.DP_SGD, 3))[0]
        for _ in range(2)
    )
    assert not torch.allclose(once, again)


def seeded() -> SeededRandomness:
    return SeededRandomness(Stream.DP_SGD, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_clients_examples_leave_no_trace_in_model_and_generators(kind: str) -> None:
    """Who trains next in the process would find it."""
    model, start, examples = problem(kind)
    traces = []
    for rows in (np.arange(EXAMPLES), np.arange(3)):
        torch.manual_seed(2)
        np.random.seed(2)  # noqa: NPY002
        random.seed(2)
        train_dp_sgd(
            model,
            start,
            ExampleShard(examples.select(rows)),
            SPEC,
            SeededRandomness(Stream.DP_SGD, 3),
        )
        module = model.module
        assert isinstance(module, Own)
        drawn = (random.random(), float(np.random.random()), float(torch.rand(())))  # noqa: NPY002
        traces.append((drawn, float(module.calls), len(module.seen)))
    assert traces[0] == traces[1]
    assert traces[0][1:] == (1.0, 0)
