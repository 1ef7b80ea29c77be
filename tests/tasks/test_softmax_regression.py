"""Softmax regression's gradient and descent in closed form, against automatic differentiation."""

import numpy as np
import pytest
import torch

from blackthorn.client_app.training import LocalSGD, client_generator, train_clients
from blackthorn.strategies.clipping import ClipGradient
from blackthorn.tasks.datasets import Examples
from blackthorn.tasks.flat_model import FlatModel
from blackthorn.tasks.losses import cross_entropy
from blackthorn.tasks.models import build_model
from blackthorn.tasks.shards import ExampleShard

INPUTS, CLASSES = 12, 4


def logistic(dtype: torch.dtype) -> FlatModel:
    return FlatModel(build_model("logistic", (INPUTS,), CLASSES, 0).to(dtype), cross_entropy)


def by_hand(
    w: torch.Tensor, x: torch.Tensor, y: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """−Σ weights log softmax(W x + b)_y, and its gradient by automatic differentiation."""
    w = w.clone().requires_grad_()
    matrix, bias = w[: INPUTS * CLASSES].view(CLASSES, INPUTS), w[INPUTS * CLASSES :]
    logits = x @ matrix.T + bias
    chosen = logits.gather(1, y[:, None])[:, 0] - torch.logsumexp(logits, dim=1)
    loss = -(weights * chosen).sum()
    (gradient,) = torch.autograd.grad(loss, w)
    return loss.detach(), gradient


def examples(seed: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, INPUTS, generator=generator)
    return x, torch.randint(0, CLASSES, (n,), generator=generator)


@pytest.mark.parametrize(("dtype", "within"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_the_gradient_is_that_by_hand(dtype: torch.dtype, within: float) -> None:
    model = logistic(dtype)
    generator = torch.Generator().manual_seed(1)
    params = torch.randn(5, model.dimension, generator=generator, dtype=dtype)
    batches = [examples(i, 7) for i in range(5)]
    x = torch.stack([x for x, _ in batches]).to(dtype)
    y = torch.stack([y for _, y in batches])
    weights = torch.rand(5, 7, generator=generator, dtype=dtype)
    weights[2, 4:] = 0  # padding
    losses, gradients = model.loss_and_gradient(params, x, y, weights)
    for i in range(5):
        loss, gradient = by_hand(params[i], x[i], y[i], weights[i])
        torch.testing.assert_close(losses[i], loss, rtol=within, atol=within)
        torch.testing.assert_close(gradients[i], gradient, rtol=within, atol=within)


def test_huge_logits_stay_finite() -> None:
    model = logistic(torch.float32)
    params = torch.full((1, model.dimension), 1e4)
    x, y = examples(0, 3)
    losses, gradients = model.loss_and_gradient(params, x[None] * 100, y[None], torch.ones(1, 3))
    assert torch.isfinite(losses).all()
    assert torch.isfinite(gradients).all()


@pytest.mark.parametrize("weight_decay", [0.0, 0.05])
@pytest.mark.parametrize(("dtype", "within"), [(torch.float64, 1e-11), (torch.float32, 2e-5)])
def test_full_batch_descent_is_step_after_step(
    weight_decay: float, dtype: torch.dtype, within: float
) -> None:
    """Clients of unlike size, so that some are padded."""
    model = logistic(dtype)
    start = torch.randn(model.dimension, generator=torch.Generator().manual_seed(3), dtype=dtype)
    data = [examples(i, n) for i, n in enumerate((9, 4, 9, 1))]
    spec = LocalSGD(6, 0, 0.3, weight_decay)
    params, losses = train_clients(
        model,
        start,
        [ExampleShard(Examples(x, y)) for x, y in data],
        spec,
        [client_generator(0, 1, i) for i in range(len(data))],
    )
    for (x, y), found, mean_loss in zip(data, params, losses, strict=True):
        w, total = start.clone(), torch.zeros((), dtype=dtype)
        share = torch.full((len(x),), 1 / len(x), dtype=dtype)
        for _ in range(spec.steps):
            loss, gradient = by_hand(w, x.to(dtype), y, share)
            total += loss
            w = w - spec.learning_rate * (gradient + weight_decay * w)
        torch.testing.assert_close(found, w, rtol=within, atol=within)
        torch.testing.assert_close(mean_loss, total / spec.steps, rtol=within, atol=within)


def test_drawn_batches_and_clipped_steps_do_not_take_the_shortcut() -> None:
    model = logistic(torch.float64)
    start = torch.zeros(model.dimension, dtype=torch.float64)
    shard = ExampleShard(Examples(*examples(0, 9)))
    generators = [[client_generator(0, 1, 0)] for _ in range(3)]
    full = train_clients(model, start, [shard], LocalSGD(3, 0, 0.3), generators[0])[0]
    drawn = train_clients(model, start, [shard], LocalSGD(3, 4, 0.3), generators[1])[0]
    clipped = train_clients(
        model, start, [shard], LocalSGD(3, 0, 0.3, rule=ClipGradient(0.01, 1)), generators[2]
    )[0]
    assert not torch.allclose(full, drawn)
    assert float(torch.linalg.vector_norm(clipped)) <= 3 * 0.3 * 0.01 * (1 + 1e-9)
    assert np.isfinite(full.numpy()).all()


@pytest.mark.parametrize("steps", [1, 2, 3, 40])
def test_the_shortcut_is_left_where_step_after_step_is_less_work(steps: int) -> None:
    """9 examples and 4 classes: from 3 steps on the Gram matrix pays; either way the same."""
    model = logistic(torch.float64)
    generator = torch.Generator().manual_seed(4)
    start = torch.randn(model.dimension, generator=generator, dtype=torch.float64)
    x, y = examples(0, 9)
    weights = torch.full((1, 9), 1 / 9, dtype=torch.float64)
    out = torch.empty(1, model.dimension, dtype=torch.float64)
    descended = model.descent(start, x[None], y[None], weights, steps, 0.3, 0.01, out)
    assert (descended is None) == (steps < 3)
    spec = LocalSGD(steps, 0, 0.3, 0.01)
    shard = ExampleShard(Examples(x, y))
    (found,), _ = train_clients(model, start, [shard], spec, [client_generator(0, 1, 0)])
    w = start.clone()
    for _ in range(steps):
        w -= 0.3 * (by_hand(w, x.double(), y, weights[0])[1] + 0.01 * w)
    torch.testing.assert_close(found, w, rtol=1e-11, atol=1e-11)
