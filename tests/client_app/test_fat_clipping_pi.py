"""FAT-Clipping-PI's local training: B clients in a batch are B clients alone, for an MLP, a conv
net and an LSTM; and each of them is a plain PyTorch loop that clips every step's gradient."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from blackthorn.client_app.training import LocalSGD, client_generator, train_clients
from blackthorn.strategies.clipping import ClipGradient
from blackthorn.tasks.char_lstm import build_char_lstm
from blackthorn.tasks.datasets import Examples
from blackthorn.tasks.flat_model import FlatModel
from blackthorn.tasks.labelled import cross_entropy
from blackthorn.tasks.models import build_model
from blackthorn.tasks.shards import ExampleShard

CLASSES = 7
SIZES = (40, 9, 25, 40)
SPEC = LocalSGD(steps=5, batch_size=8, learning_rate=0.2, rule=ClipGradient(0.3, 1))
MODELS = pytest.mark.parametrize("name", ["mlp", "cnn", "lstm"])


def module_and_shards(name: str) -> tuple[nn.Module, list[ExampleShard]]:
    rng = np.random.default_rng(5)
    if name == "lstm":
        module = build_char_lstm("char-lstm-12", (10,), CLASSES, seed=1)
        xs: list[np.ndarray] = [rng.integers(0, CLASSES, (n, 10), dtype=np.uint8) for n in SIZES]
    else:
        module = build_model({"mlp": "mlp-16-8", "cnn": "cnn"}[name], (1, 8, 8), CLASSES, seed=1)
        # Large inputs, so that most gradients are longer than the threshold.
        xs = [4 * rng.normal(size=(n, 1, 8, 8)).astype(np.float32) for n in SIZES]
    shards = [
        ExampleShard(
            Examples(torch.from_numpy(x), torch.from_numpy(rng.integers(0, CLASSES, len(x))))
        )
        for x in xs
    ]
    return module, shards


def trained(
    name: str, spec: LocalSGD, together: bool, dtype: torch.dtype = torch.float32
) -> Tensor:
    module, shards = module_and_shards(name)
    module.to(dtype)
    model = FlatModel(module, cross_entropy)
    start = model.flatten(module.state_dict())
    generators = [client_generator(3, 7, client) for client in range(len(shards))]
    if together:
        return train_clients(model, start, shards, spec, generators)[0]
    rows = [
        train_clients(model, start, [shard], spec, [generator])[0]
        for shard, generator in zip(shards, generators, strict=True)
    ]
    return torch.cat(rows)


def plain_loop(module: nn.Module, shard: ExampleShard, client: int, spec: LocalSGD) -> Tensor:
    """One client's model after K steps; gradients clipped as a whole, over all parameters."""
    module = copy.deepcopy(module).double()
    generator = client_generator(3, 7, client)
    parameters = list(module.parameters())
    clipped_steps = 0
    for _ in range(spec.steps):
        x, y = shard.batch(generator, spec.batch_size)
        loss = nn.functional.cross_entropy(module(x.double() if x.is_floating_point() else x), y)
        gradients = torch.autograd.grad(loss, parameters)
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients))
        assert isinstance(spec.rule, ClipGradient)
        factor = min(1.0, spec.rule.bound / norm)
        clipped_steps += factor < 1
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.sub_(spec.learning_rate * factor * gradient)
    assert clipped_steps > 0, "the threshold never mattered"
    return torch.cat([parameter.detach().reshape(-1) for parameter in parameters])


@MODELS
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-3)])
def test_a_batch_of_clients_is_every_client_alone(
    name: str, dtype: torch.dtype, tolerance: float
) -> None:
    # In float32 the order of a sum alone may switch a unit on or off, on some machine.
    batch = trained(name, SPEC, together=True, dtype=dtype)
    alone = trained(name, SPEC, together=False, dtype=dtype)
    assert (batch - alone).norm() <= tolerance * alone.norm()
    assert not torch.allclose(alone[0], alone[1], rtol=0.01)


@MODELS
def test_every_client_is_a_plain_loop(name: str) -> None:
    # In float64: in float32 a unit may be on or off by the order of a sum alone.
    module, shards = module_and_shards(name)
    batch = trained(name, SPEC, together=True, dtype=torch.float64)
    for client, shard in enumerate(shards):
        expected = plain_loop(module, shard, client, SPEC)
        torch.testing.assert_close(batch[client], expected, rtol=1e-9, atol=1e-10)


@MODELS
def test_steps_are_no_longer_than_the_threshold(name: str) -> None:
    module, shards = module_and_shards(name)
    start = FlatModel(module, cross_entropy).flatten(module.state_dict())
    one_step = LocalSGD(steps=1, batch_size=8, learning_rate=0.2, rule=ClipGradient(1e-3, 1))
    lengths = (trained(name, one_step, together=True) - start).double().norm(dim=1) / 0.2
    torch.testing.assert_close(
        lengths, torch.full((len(shards),), 1e-3, dtype=torch.float64), rtol=1e-2, atol=0
    )
    unclipped = LocalSGD(steps=1, batch_size=8, learning_rate=0.2)
    assert ((trained(name, unclipped, together=True) - start).norm(dim=1) / 0.2 > 0.1).all()
