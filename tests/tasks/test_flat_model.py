"""FlatModel: the flat vector's layout, and gradients against plain autograd on the module."""

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from blackthorn.tasks.datasets import Examples
from blackthorn.tasks.flat_model import FlatModel
from blackthorn.tasks.labelled import evaluate
from blackthorn.tasks.losses import cross_entropy
from blackthorn.tasks.models import build_model


class Tokens(nn.Module):
    """Integer inputs through an embedding and an LSTM: the class of the last state."""

    batching = "loop"

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.lstm = nn.LSTM(4, 5, batch_first=True)
        self.output = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(x))
        return self.output(states[:, -1])


class Quadratic(nn.Module):
    """f(w, ξ) = ½‖w‖² + ⟨ξ, w⟩, whose output is the loss itself."""

    def __init__(self, dimension: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(dimension))

    def forward(self, noise: Tensor) -> Tensor:
        return 0.5 * self.w.square().sum() + noise @ self.w


def modules() -> dict[str, tuple[nn.Module, tuple[int, ...], int]]:
    return {
        "logistic": (build_model("logistic", (7,), 3, 0), (7,), 3),
        "mlp": (build_model("mlp-6-5", (1, 3, 3), 4, 1), (1, 3, 3), 4),
        "cnn": (build_model("cnn", (1, 8, 8), 3, 2), (1, 8, 8), 3),
        "tokens": (Tokens(), (6,), 3),
    }


def inputs(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(9)
    if name == "tokens":
        return torch.randint(0, 11, (4, 8, *shape), generator=generator)
    return torch.randn(4, 8, *shape, generator=generator, dtype=dtype)


def by_autograd(
    module: nn.Module, params: Tensor, x: Tensor, y: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """One client's loss and gradient: the module itself, its parameters overwritten."""
    module = copy.deepcopy(module).to(params.dtype)
    nn.utils.vector_to_parameters(params, module.parameters())
    losses = [
        weight * nn.functional.cross_entropy(module(row[None]), label[None])
        for row, label, weight in zip(x, y, weights, strict=True)
        if weight > 0
    ]
    loss = torch.stack(losses).sum()
    gradients = torch.autograd.grad(loss, list(module.parameters()))
    gradient = torch.cat([part.flatten() for part in gradients])
    return loss.detach(), gradient


@pytest.mark.parametrize("name", ["logistic", "mlp", "cnn", "tokens"])
@pytest.mark.parametrize("batching", ["vmap", "loop"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_gradients_are_autograds(
    name: str, batching: str, dtype: torch.dtype, tolerance: float
) -> None:
    if name == "tokens" and batching == "vmap":
        batching = "loop"
    module, shape, classes = modules()[name]
    model = FlatModel(module, cross_entropy, batching)
    generator = torch.Generator().manual_seed(4)
    params = torch.randn(4, model.dimension, generator=generator, dtype=dtype) / 4
    x = inputs(name, shape, dtype)
    y = torch.randint(0, classes, (4, 8), generator=generator)
    counts = torch.tensor([8, 1, 5, 8])
    weights = (torch.arange(8) < counts[:, None]) / counts[:, None].to(dtype)
    losses, gradients = model.loss_and_gradient(params, x, y, weights)
    assert losses.dtype == gradients.dtype == dtype
    assert not losses.requires_grad
    assert not gradients.requires_grad
    for client in range(4):
        own = (params[client], x[client], y[client], weights[client])
        loss, gradient = by_autograd(module, *own)
        torch.testing.assert_close(losses[client], loss, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(gradients[client], gradient, rtol=tolerance, atol=tolerance)
        alone = model.loss_and_gradient(*(part[None] for part in own))
        torch.testing.assert_close(alone[0][0], loss, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(alone[1][0], gradient, rtol=tolerance, atol=tolerance)


def test_float32_inputs_serve_a_float64_vector() -> None:
    module, _, _ = modules()["mlp"]
    model = FlatModel(module, cross_entropy)
    params = model.flatten(module.state_dict()).double()
    x, y = torch.rand(1, 6, 1, 3, 3), torch.zeros(1, 6, dtype=torch.int64)
    weights = torch.full((1, 6), 1 / 6, dtype=torch.float64)
    _, gradients = model.loss_and_gradient(params[None], x, y, weights)
    _, expected = by_autograd(module, params, x[0].double(), y[0], weights[0])
    torch.testing.assert_close(gradients[0], expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("batching", ["vmap", "loop"])
def test_a_loss_may_be_the_output_itself(batching: str) -> None:
    model = FlatModel(Quadratic(3), lambda outputs, _: outputs, batching)
    params = torch.tensor([[1.0, 2.0, 3.0], [0.0, -1.0, 4.0]])
    noise = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0))
    weights = torch.full((2, 5), 0.2)
    losses, gradients = model.loss_and_gradient(params, noise, torch.zeros(2, 5), weights)
    mean_noise = noise.mean(dim=1)
    torch.testing.assert_close(gradients, params + mean_noise)
    expected = 0.5 * params.square().sum(1) + (params * mean_noise).sum(1)
    torch.testing.assert_close(losses, expected)


@pytest.mark.parametrize("batching", ["vmap", "loop"])
def test_an_unused_parameter_has_gradient_zero(batching: str) -> None:
    module = nn.Linear(2, 2)
    module.register_parameter("spare", nn.Parameter(torch.ones(3)))
    model = FlatModel(module, cross_entropy, batching)
    params = model.flatten(module.state_dict()).repeat(2, 1)
    x, y = torch.rand(2, 4, 2), torch.zeros(2, 4, dtype=torch.int64)
    _, gradients = model.loss_and_gradient(params, x, y, torch.full((2, 4), 0.25))
    spare = model.unflatten(gradients)["spare"]
    assert spare.shape == (2, 3)
    assert not spare.any()
    assert model.unflatten(gradients)["weight"].any()


def test_gradients_come_out_where_autograd_is_off() -> None:
    module, _, _ = modules()["cnn"]
    model = FlatModel(module, cross_entropy)
    params = model.flatten(module.state_dict())[None]
    x, y = torch.rand(1, 2, 1, 8, 8), torch.zeros(1, 2, dtype=torch.int64)
    with torch.no_grad():
        _, gradients = model.loss_and_gradient(params, x, y, torch.full((1, 2), 0.5))
    assert gradients.any()


def frozen_and_buffered() -> nn.Sequential:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    module[0].bias.requires_grad_(False)
    return module


def test_the_layout_is_that_of_named_parameters() -> None:
    module = frozen_and_buffered()
    model = FlatModel(module, cross_entropy)
    assert model.names == ("0.weight", "1.weight", "1.bias", "3.weight", "3.bias")
    assert model.shapes == ((4, 3), (4,), (4,), (2, 4), (2,))
    assert model.dimension == 12 + 4 + 4 + 8 + 2
    state = module.state_dict()
    vector = model.flatten(state)
    expected = np.concatenate([state[name].numpy().ravel() for name in model.names])
    np.testing.assert_array_equal(vector.numpy(), expected)
    for name, view in model.unflatten(vector).items():
        assert torch.equal(view, state[name])
    model.unflatten(vector)["3.bias"].fill_(7)
    assert vector[-2:].tolist() == [7, 7]
    assert 7 not in module.state_dict()["3.bias"].tolist()
    batch = model.unflatten(torch.stack([vector, 2 * vector]))
    assert torch.equal(batch["0.weight"][1], 2 * state["0.weight"])


def test_buffers_and_dropout_stay_out_of_training() -> None:
    module = frozen_and_buffered()
    model = FlatModel(module, cross_entropy)
    before = copy.deepcopy(module.state_dict())
    params = model.flatten(module.state_dict()).repeat(2, 1)
    x, y = torch.rand(2, 6, 3), torch.zeros(2, 6, dtype=torch.int64)
    first = model.loss_and_gradient(params, x, y, torch.full((2, 6), 1 / 6))
    again = model.loss_and_gradient(params, x, y, torch.full((2, 6), 1 / 6))
    assert torch.equal(first[1], again[1])
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_states_and_vectors_of_another_layout_are_refused() -> None:
    model = FlatModel(nn.Linear(2, 3), cross_entropy)
    with pytest.raises(ValueError, match="parameter 'bias' is missing"):
        model.flatten({"weight": torch.zeros(3, 2)})
    with pytest.raises(ValueError, match=r"'weight' has shape \(2, 3\): allowed is \(3, 2\)"):
        model.flatten({"weight": torch.zeros(2, 3), "bias": torch.zeros(3)})
    with pytest.raises(ValueError, match=r"shape \(8,\): its length must be 9"):
        model.unflatten(torch.zeros(8))
    with pytest.raises(ValueError, match="batching is 'map': allowed are vmap and loop"):
        FlatModel(nn.Linear(2, 3), cross_entropy, "map")
    with pytest.raises(ValueError, match="0 trainable parameters"):
        FlatModel(nn.ReLU(), cross_entropy)


def test_outputs_and_evaluation_are_the_module_s() -> None:
    module, shape, classes = modules()["mlp"]
    model = FlatModel(module, cross_entropy)
    params = torch.randn(model.dimension, generator=torch.Generator().manual_seed(1))
    x = torch.randn(23, *shape, generator=torch.Generator().manual_seed(2))
    y = torch.randint(0, classes, (23,), generator=torch.Generator().manual_seed(3))
    copied = copy.deepcopy(module).double()
    nn.utils.vector_to_parameters(params.double(), copied.parameters())
    logits = copied(x.double()).detach()
    torch.testing.assert_close(model.outputs(params, x).double(), logits, rtol=1e-4, atol=1e-5)
    probabilities = logits.exp() / logits.exp().sum(1, keepdim=True)
    right = sum(int(row.argmax()) == int(label) for row, label in zip(logits, y, strict=True))
    loss = -sum(float(row[label].log()) for row, label in zip(probabilities, y, strict=True)) / 23
    for batch_size in (1, 5, 23, 4096):
        result = evaluate(model, params, Examples(x, y), batch_size)
        assert result == {"accuracy": right / 23, "loss": pytest.approx(loss, rel=1e-5)}
    with pytest.raises(ValueError, match="0 examples to evaluate on"):
        evaluate(model, params, Examples(x[:0], y[:0]))
