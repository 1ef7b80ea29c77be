"""The small CNN's gradient in closed form, against automatic differentiation of its layers."""

from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn

from blackthorn.client_app.training import LocalSGD, client_generator, train_clients
from blackthorn.strategies.clipping import ClipGradient
from blackthorn.tasks.datasets import Examples
from blackthorn.tasks.flat_model import FlatModel
from blackthorn.tasks.labelled import cross_entropy
from blackthorn.tasks.models import build_model
from blackthorn.tasks.shards import ExampleShard
from blackthorn.tasks.small_cnn.model import SmallCNN

CLASSES = 4
PRECISIONS = pytest.mark.parametrize(
    ("dtype", "within"), [(torch.float64, 1e-10), (torch.float32, 1e-4)]
)


def models(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[FlatModel, FlatModel]:
    """The module, and the same layers without their closed form."""
    module = build_model("cnn", shape, CLASSES, 3).to(dtype)
    assert isinstance(module, SmallCNN)
    plain = nn.Sequential(OrderedDict(module.named_children()))
    return FlatModel(module, cross_entropy).compiled(), FlatModel(plain, cross_entropy, "loop")


def images(clients: int, n: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Noise, half of it blanked out in whole rows: windows of equal pixels, as in drawings."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(clients, n, *shape, generator=generator, dtype=dtype)
    x[..., : shape[1] // 2, :] = 0.25
    return x


@pytest.mark.parametrize("n", [6, 16, 37])
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 9, 7), (2, 4, 5), (1, 28, 28)])
@PRECISIONS
def test_the_gradient_is_autograd_s(
    shape: tuple[int, ...], n: int, dtype: torch.dtype, within: float
) -> None:
    """Of several clients at once; some factors of the normalisation are negative. The images
    fill one block, or several of which the last is smaller."""
    fast, plain = models(shape, dtype)
    generator = torch.Generator().manual_seed(2)
    start = fast.flatten(fast.module.state_dict())
    params = start + torch.randn(3, len(start), generator=generator, dtype=dtype)
    params[2] = start  # factors 1
    x = images(3, n, shape, dtype)
    y = torch.randint(0, CLASSES, (3, n), generator=generator)
    weights = torch.rand(3, n, generator=generator, dtype=dtype)
    weights[1, 4:] = 0  # padding
    before = params.clone(), x.clone()
    losses, gradients = fast.loss_and_gradient(params, x, y, weights)
    assert torch.equal(params, before[0])
    assert torch.equal(x, before[1])
    expected = plain.loss_and_gradient(params, x, y, weights)
    torch.testing.assert_close(losses, expected[0], rtol=within, atol=within)
    for own, other in zip(gradients, expected[1], strict=True):
        scale = float(other.abs().max())
        torch.testing.assert_close(own, other, rtol=within, atol=within * scale)


def test_equal_pixels_send_the_gradient_to_the_first() -> None:
    """With a kernel that sees nothing all pixels are equal, and only the choice of the winner
    tells how the gradient reaches what follows."""
    fast, plain = models((1, 8, 8), torch.float64)
    state = dict(fast.module.state_dict())
    state["conv1.weight"] = state["conv1.weight"].clone()
    state["conv1.weight"][::2] = 0
    params = fast.flatten(state)[None]
    x, y = images(1, 5, (1, 8, 8), torch.float64), torch.tensor([[0, 1, 2, 3, 0]])
    weights = torch.full((1, 5), 0.2, dtype=torch.float64)
    found, expected = (each.loss_and_gradient(params, x, y, weights) for each in (fast, plain))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@PRECISIONS
@pytest.mark.parametrize(
    "spec",
    [
        LocalSGD(2, 0, 0.1),
        LocalSGD(3, 3, 0.1, weight_decay=0.05),
        LocalSGD(3, 3, 0.1, rule=ClipGradient(0.05, 1)),
    ],
)
def test_training_ends_where_autograd_does(
    dtype: torch.dtype, within: float, spec: LocalSGD
) -> None:
    """Clients of unlike size, one of them with a single example."""
    shape = (1, 8, 8)
    fast, plain = models(shape, dtype)
    start = fast.flatten(fast.module.state_dict())
    labels = torch.randint(0, CLASSES, (20,), generator=torch.Generator().manual_seed(0))
    whole = Examples(images(1, 20, shape, torch.float32)[0], labels)
    parts = [range(9), range(3, 7), [4]]
    shards = [ExampleShard(whole, torch.tensor(list(rows)).numpy()) for rows in parts]
    found, expected = (
        train_clients(model, start, shards, spec, [client_generator(0, 1, i) for i in range(3)])
        for model in (fast, plain)
    )
    torch.testing.assert_close(found, expected, rtol=within, atol=within)


def test_batches_of_changing_size_leave_nothing_behind() -> None:
    """The memory that gradients are computed in is used again for batches of other sizes."""
    fast, plain = models((1, 8, 8), torch.float64)
    generator = torch.Generator().manual_seed(5)
    for n in (5, 40, 5, 33, 2, 40):
        params = torch.randn(1, fast.dimension, generator=generator, dtype=torch.float64)
        x = images(1, n, (1, 8, 8), torch.float64) + params[0, 0]
        y = torch.randint(0, CLASSES, (1, n), generator=generator)
        weights = torch.rand(1, n, generator=generator, dtype=torch.float64)
        found, expected = (each.loss_and_gradient(params, x, y, weights) for each in (fast, plain))
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_only_a_process_that_trains_many_compiles() -> None:
    module = build_model("cnn", (1, 8, 8), CLASSES, 3)
    model = FlatModel(module, cross_entropy)
    assert model.compiled().compiled().module.compiled
    assert not model.module.compiled
    plain = FlatModel(nn.Linear(3, 2), cross_entropy)
    assert plain.compiled() is plain


@pytest.mark.parametrize("name", ["conv1.weight", "norm1.bias", "conv2.bias", "dense.weight"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_model_that_diverged_has_no_finite_loss(name: str, value: float) -> None:
    fast, plain = models((1, 8, 8), torch.float32)
    state = {key: entry.clone() for key, entry in fast.module.state_dict().items()}
    state[name].view(-1)[0] = value
    params, x = fast.flatten(state)[None], images(1, 5, (1, 8, 8), torch.float32)
    y, weights = torch.tensor([[0, 1, 2, 3, 0]]), torch.full((1, 5), 0.2)
    (loss, gradient), (expected, _) = (
        each.loss_and_gradient(params, x, y, weights) for each in (fast, plain)
    )
    assert not expected.isfinite().all()
    assert not loss.isfinite().all()
    assert not gradient.isfinite().all()


def test_a_label_that_is_no_class_is_refused() -> None:
    fast, _ = models((1, 8, 8), torch.float32)
    params = fast.flatten(fast.module.state_dict())[None]
    x, weights = images(1, 2, (1, 8, 8), torch.float32), torch.full((1, 2), 0.5)
    for label in (-1, CLASSES):
        with pytest.raises(IndexError, match="not one of the classes"):
            fast.loss_and_gradient(params, x, torch.tensor([[0, label]]), weights)
