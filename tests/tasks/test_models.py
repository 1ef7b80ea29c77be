"""Models: sizes, the law of initialisation, and a seed that touches nothing else."""

import math

import pytest
import torch
from torch import nn

from blackthorn.settings.config import make_config
from blackthorn.tasks.models import build_model
from blackthorn.tasks.problem import load_problem
from blackthorn.tasks.small_cnn.model import ChannelsLast


def dimension(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("logistic", (1, 28, 28), 7850),
        ("logistic", (20,), 210),
        ("mlp-25", (1, 28, 28), 19_885),
        ("mlp-200-100", (784,), 785 * 200 + 201 * 100 + 101 * 10),
        # conv1, norm1, conv2, norm2, dense, output
        ("cnn", (1, 8, 8), 160 + 32 + 4640 + 64 + 64 * (32 * 4 + 1) + 650),
        ("cnn", (1, 28, 28), 160 + 32 + 4640 + 64 + 64 * (32 * 49 + 1) + 650),
        ("cnn", (3, 32, 32), 448 + 32 + 4640 + 64 + 64 * (32 * 64 + 1) + 650),
    ],
)
def test_a_model_has_its_size_and_gives_ten_finite_logits(
    name: str, shape: tuple[int, ...], expected: int
) -> None:
    module = build_model(name, shape, 10, 0)
    assert dimension(module) == expected
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
    assert list(module.buffers()) == []
    outputs = module(torch.rand(4, *shape))
    assert outputs.shape == (4, 10)
    assert outputs.isfinite().all()


def test_logistic_starts_at_zero() -> None:
    for parameter in build_model("logistic", (5,), 3, 7).parameters():
        assert not parameter.any()


@pytest.mark.parametrize("name", ["mlp-300-200", "cnn"])
def test_initial_weights_are_normal_with_variance_two_over_fan_in(name: str) -> None:
    for layer in build_model(name, (3, 32, 32), 10, 0).modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            fan_in = layer.weight.numel() // layer.weight.shape[0]
            weights = layer.weight.detach().flatten() * math.sqrt(fan_in / 2)
            assert layer.bias is not None
            assert not layer.bias.detach().any()
            # Mean, variance and fourth moment of N(0, 1), within five standard errors.
            root = math.sqrt(len(weights))
            assert abs(float(weights.mean())) < 5 / root
            assert float(weights.square().mean()) == pytest.approx(1, abs=5 * math.sqrt(2) / root)
            assert float(weights.pow(4).mean()) == pytest.approx(3, abs=5 * math.sqrt(96) / root)
        elif isinstance(layer, nn.GroupNorm):
            assert (layer.weight == 1).all()
            assert (layer.bias == 0).all()


def test_the_hidden_layers_are_relu_networks() -> None:
    module = build_model("mlp-6-5", (2, 3), 4, 1)
    (w1, b1, w2, b2, w3, b3) = module.parameters()
    x = torch.randn(9, 2, 3, generator=torch.Generator().manual_seed(0))
    hidden = (x.reshape(9, 6) @ w1.T + b1).clamp(min=0)
    hidden = (hidden @ w2.T + b2).clamp(min=0)
    torch.testing.assert_close(module(x), hidden @ w3.T + b3)


def test_the_seed_alone_decides() -> None:
    def vector(seed: int) -> torch.Tensor:
        module = build_model("cnn", (1, 8, 8), 10, seed)
        return nn.utils.parameters_to_vector(module.parameters()).detach()

    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = vector(3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(vector(3), first)
    assert not torch.equal(vector(4), first)


def test_group_norm_sees_one_example_at_a_time() -> None:
    module = build_model("cnn", (1, 8, 8), 10, 0)
    x = torch.rand(6, 1, 8, 8)
    torch.testing.assert_close(module(x)[2:3], module(x[2:3]))


@pytest.mark.parametrize("name", ["", "mlp", "mlp-", "mlp-0", "mlp-25-", "mlp-x", "resnet", "CNN"])
def test_unknown_names_are_answered_with_the_known_ones(name: str) -> None:
    with pytest.raises(ValueError, match=r"is unknown: allowed are logistic, mlp-H\[-H...\], cnn"):
        build_model(name, (1, 8, 8), 10, 0)


@pytest.mark.parametrize("shape", [(64,), (8, 8), (1, 3, 8), (1, 8, 3)])
def test_shapes_that_the_cnn_cannot_take_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="model 'cnn' cannot take inputs of shape"):
        build_model("cnn", shape, 10, 0)


def test_the_layout_of_the_cnn_in_memory_changes_no_number() -> None:
    module = build_model("cnn", (1, 8, 8), 3, 0)
    x = torch.rand(5, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    found = []
    for changed in (False, True):
        if changed:
            for place, layer in list(module.named_children()):
                if isinstance(layer, ChannelsLast):
                    setattr(module, place, torch.nn.Identity())
        module.zero_grad()
        outputs = module(x)
        outputs.square().sum().backward()
        found.append((outputs, [parameter.grad for parameter in module.parameters()]))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)
    images = torch.rand(2, 3, 4, 4)
    assert ChannelsLast()(images).is_contiguous(memory_format=torch.channels_last)


def test_the_variance_of_initial_weights_is_the_given_one_over_the_inputs() -> None:
    wide = build_model("mlp-400", (1, 28, 28), 10, 0, variance=1.0)
    weights = next(wide.parameters())
    assert weights.var().item() == pytest.approx(1 / 784, rel=0.02)
    usual = next(build_model("mlp-400", (1, 28, 28), 10, 0).parameters())
    torch.testing.assert_close(weights * 2**0.5, usual)
    config = make_config({"task": "digits", "model": "mlp-32", "init-variance": 0.0})
    assert not any(tensor.any() for tensor in load_problem(config).state().values())
