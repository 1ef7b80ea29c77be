"""The perceptron's gradient in closed form, against automatic differentiation."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

from blackthorn.client_app.training import LocalSGD, client_generator, train_clients
from blackthorn.strategies.clipping import ClipGradient
from blackthorn.tasks.datasets import Examples
from blackthorn.tasks.flat_model import FlatModel
from blackthorn.tasks.losses import cross_entropy
from blackthorn.tasks.models import Perceptron, build_model
from blackthorn.tasks.shards import ExampleShard

INPUTS, CLASSES = 6, 4
PRECISIONS = pytest.mark.parametrize(
    ("dtype", "within"), [(torch.float64, 1e-11), (torch.float32, 2e-5)]
)
NAMES = pytest.mark.parametrize("name", ["mlp-5", "mlp-7-3", "mlp-1"])


def models(name: str, dtype: torch.dtype) -> tuple[FlatModel, FlatModel]:
    """The module, and the same layers without their closed form, one client after the other."""
    module = build_model(name, (2, 3), CLASSES, 3).to(dtype)
    assert isinstance(module, Perceptron)
    plain = nn.Sequential(OrderedDict(module.named_children()))
    return FlatModel(module, cross_entropy), FlatModel(plain, cross_entropy, "loop")


def examples(seed: int, n: int) -> Examples:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 2, 3, generator=generator)
    return Examples(x, torch.randint(0, CLASSES, (n,), generator=generator))


@NAMES
@PRECISIONS
def test_the_gradient_is_autograd_s(name: str, dtype: torch.dtype, within: float) -> None:
    fast, plain = models(name, dtype)
    generator = torch.Generator().manual_seed(1)
    params = torch.randn(5, fast.dimension, generator=generator, dtype=dtype)
    data = [examples(i, 7) for i in range(5)]
    x, y = torch.stack([d.x for d in data]), torch.stack([d.y for d in data])
    weights = torch.rand(5, 7, generator=generator, dtype=dtype)
    weights[2, 4:] = 0  # padding
    weights[3, 1:] = 0  # a single example
    before = params.clone()
    losses, gradients = fast.loss_and_gradient(params, x, y, weights)
    expected = plain.loss_and_gradient(params, x, y, weights)
    assert torch.equal(params, before)
    torch.testing.assert_close(losses, expected[0], rtol=within, atol=within)
    torch.testing.assert_close(gradients, expected[1], rtol=within, atol=within)


@NAMES
@PRECISIONS
@pytest.mark.parametrize(
    "spec",
    [
        LocalSGD(1, 0, 0.2),
        LocalSGD(4, 0, 0.2, weight_decay=0.05),
        LocalSGD(4, 3, 0.2, weight_decay=0.05),
        LocalSGD(4, 3, 0.2, rule=ClipGradient(0.05, 1)),
    ],
)
def test_training_ends_where_autograd_does(
    name: str, dtype: torch.dtype, within: float, spec: LocalSGD
) -> None:
    """Clients of unlike size, one of them with a single example, some out of one data set."""
    fast, plain = models(name, dtype)
    start = fast.flatten(fast.module.state_dict())
    whole = examples(9, 30)
    parts = [range(9), range(3, 7), range(20, 29), [4], [8, 2]]
    shared = [ExampleShard(whole, torch.tensor(list(rows)).numpy()) for rows in parts]
    own = [ExampleShard(whole.select(torch.tensor(list(rows)))) for rows in parts]
    for shards in (shared, own):
        found, losses = train_clients(
            fast, start, shards, spec, [client_generator(0, 1, i) for i in range(5)]
        )
        for i, shard in enumerate(shards):
            alone, loss = train_clients(plain, start, [shard], spec, [client_generator(0, 1, i)])
            torch.testing.assert_close(found[i], alone[0], rtol=within, atol=within)
            torch.testing.assert_close(losses[i], loss[0], rtol=within, atol=within)


def test_huge_units_stay_finite() -> None:
    fast, _ = models("mlp-5", torch.float32)
    data = examples(0, 3)
    params = torch.full((1, fast.dimension), 1e4)
    losses, gradients = fast.loss_and_gradient(
        params, data.x[None] * 100, data.y[None], torch.ones(1, 3)
    )
    assert torch.isfinite(losses).all()
    assert torch.isfinite(gradients).all()
