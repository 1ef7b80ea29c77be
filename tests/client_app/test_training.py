"""Local training against plain loops of torch.nn and torch.optim.SGD, one client at a time."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from blackthorn.client_app.training import (
    LocalSGD,
    client_generator,
    train_clients,
    training_device,
)
from blackthorn.strategies.clipping import ClipGradient
from blackthorn.strategies.local_rule import LocalRule
from blackthorn.tasks.datasets import Examples
from blackthorn.tasks.flat_model import FlatModel
from blackthorn.tasks.labelled import cross_entropy
from blackthorn.tasks.models import build_model
from blackthorn.tasks.shards import ExampleShard

SIZES = (30, 3, 17, 30, 64)
SPECS = {
    "minibatch": LocalSGD(6, 8, 0.1),
    "full-batch": LocalSGD(4, 0, 0.3),
    "all-smaller-than-the-batch": LocalSGD(4, 100, 0.3),
    "weight-decay": LocalSGD(5, 8, 0.1, weight_decay=0.05),
    "clipped": LocalSGD(6, 8, 0.1, rule=ClipGradient(0.4, 1)),
    "clipped-with-decay": LocalSGD(6, 8, 0.1, weight_decay=0.3, rule=ClipGradient(0.7, 1)),
}
SHAPES = {"logistic": (6,), "mlp-5-4": (2, 3), "cnn": (1, 8, 8), "lstm": (6,)}


class LastState(nn.Module):
    """A small LSTM, whose layers vmap cannot do."""

    batching = "loop"

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lstm = nn.LSTM(1, 4, batch_first=True)
        self.output = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.lstm(x[..., None])
        return self.output(states[:, -1])


def federation(
    name: str, dtype: torch.dtype
) -> tuple[nn.Module, FlatModel, Tensor, list[ExampleShard]]:
    shape = SHAPES[name]
    module = LastState() if name == "lstm" else build_model(name, shape, 3, 1)
    rng = np.random.default_rng(7)
    shards = [
        ExampleShard(
            Examples(
                torch.from_numpy(rng.normal(size=(n, *shape)).astype(np.float32)),
                torch.from_numpy(rng.integers(0, 3, n)),
            )
        )
        for n in SIZES
    ]
    model = FlatModel(module, cross_entropy)
    start = model.flatten(module.state_dict()).to(dtype)
    start += torch.from_numpy(rng.normal(size=model.dimension) / 10).to(dtype)
    return module, model, start, shards


def generators() -> list[np.random.Generator]:
    return [client_generator(3, 2, client) for client in range(len(SIZES))]


def by_optimizer(
    module: nn.Module, start: Tensor, shard: ExampleShard, spec: LocalSGD, rng: np.random.Generator
) -> tuple[Tensor, float]:
    module = copy.deepcopy(module).to(start.dtype)
    nn.utils.vector_to_parameters(start.clone(), module.parameters())
    parameters = list(module.parameters())
    optimizer = torch.optim.SGD(parameters, lr=spec.learning_rate)
    losses = []
    for _ in range(spec.steps):
        x, y = shard.batch(rng, spec.batch_size)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(module(x.to(start.dtype)), y)
        loss.backward()
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            gradient += spec.weight_decay * parameter.detach()
        if isinstance(spec.rule, ClipGradient):
            norm = float(torch.cat([gradient.flatten() for gradient in gradients]).norm())
            for gradient in gradients:
                gradient *= min(1.0, spec.rule.bound / norm)
        optimizer.step()
        losses.append(loss.item())
    return nn.utils.parameters_to_vector(parameters).detach(), sum(losses) / len(losses)


@pytest.mark.parametrize("name", ["logistic", "mlp-5-4", "cnn", "lstm"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.float64, 1e-12)])
def test_clients_train_as_with_an_optimizer(
    name: str, spec: LocalSGD, dtype: torch.dtype, tolerance: float
) -> None:
    module, model, start, shards = federation(name, dtype)
    params, losses = train_clients(model, start, shards, spec, generators())
    assert params.dtype == losses.dtype == dtype
    assert params.shape == (len(SIZES), model.dimension)
    for client, rng in enumerate(generators()):
        expected, loss = by_optimizer(module, start, shards[client], spec, rng)
        torch.testing.assert_close(params[client], expected, rtol=tolerance, atol=tolerance)
        assert float(losses[client]) == pytest.approx(loss, rel=tolerance)


@pytest.mark.parametrize("name", ["mlp-5-4", "cnn", "lstm"])
@pytest.mark.parametrize("spec", ["minibatch", "full-batch", "clipped-with-decay"])
@pytest.mark.parametrize("chunk_size", [1, 2, 3, 5, 99])
def test_a_batch_of_clients_is_as_many_separate_runs(name: str, spec: str, chunk_size: int) -> None:
    _, model, start, shards = federation(name, torch.float32)
    params, losses = train_clients(
        model, start, shards, SPECS[spec], generators(), chunk_size=chunk_size
    )
    for client, rng in enumerate(generators()):
        alone, loss = train_clients(model, start, [shards[client]], SPECS[spec], [rng])
        torch.testing.assert_close(params[client], alone[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(losses[client], loss[0], rtol=1e-5, atol=1e-6)


def test_one_client_cannot_spoil_another() -> None:
    _, model, start, shards = federation("mlp-5-4", torch.float32)
    poison = ExampleShard(Examples(torch.full((40, 2, 3), torch.nan), torch.zeros(40).long()))
    spec = SPECS["clipped-with-decay"]
    params, losses = train_clients(
        model, start, [*shards, poison], spec, [*generators(), np.random.default_rng(0)]
    )
    expected, expected_losses = train_clients(model, start, shards, spec, generators())
    torch.testing.assert_close(params[:-1], expected)
    torch.testing.assert_close(losses[:-1], expected_losses)
    assert losses[-1].isnan()


class Position(nn.Module):
    """f(w, ξ) = ½‖w‖² + ⟨ξ, w⟩, whose output is the loss itself."""

    def __init__(self, dimension: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(dimension))

    def forward(self, noise: Tensor) -> Tensor:
        return 0.5 * self.w.square().sum() + noise @ self.w


def quadratic(noise: list[list[float]]) -> tuple[FlatModel, list[ExampleShard]]:
    model = FlatModel(Position(len(noise[0])), lambda outputs, _: outputs)
    xi = torch.tensor(noise, dtype=torch.float64)
    return model, [ExampleShard(Examples(row[None], torch.zeros(1))) for row in xi]


def test_steps_on_a_quadratic_end_where_the_closed_form_does() -> None:
    # w ← w − η (w + ξ): after K steps w = −ξ + (1 − η)^K (w_0 + ξ).
    model, shards = quadratic([[0.0, 0.0], [1.0, -2.0]])
    start = torch.tensor([4.0, 3.0], dtype=torch.float64)
    rngs = [np.random.default_rng(0)] * 2
    params, _ = train_clients(model, start, shards, LocalSGD(9, 1, 0.2), rngs)
    xi = torch.tensor([[0.0, 0.0], [1.0, -2.0]], dtype=torch.float64)
    torch.testing.assert_close(params, -xi + 0.8**9 * (start + xi), rtol=1e-13, atol=0)


def test_clipped_steps_on_a_quadratic_go_straight_to_the_minimum() -> None:
    # From (4, 3), ‖∇f‖ = ‖w‖ = 5 > λ = 1: each step goes η λ straight towards 0. The second
    # client, with ξ = −w_0, stands still: its clipping factor is its own.
    model, shards = quadratic([[0.0, 0.0], [-4.0, -3.0]])
    start = torch.tensor([4.0, 3.0], dtype=torch.float64)
    spec = LocalSGD(6, 0, 0.5, rule=ClipGradient(1.0, 1))
    params, losses = train_clients(model, start, shards, spec, [np.random.default_rng(0)] * 2)
    torch.testing.assert_close(params[0], start * (5 - 6 * 0.5) / 5)
    torch.testing.assert_close(params[1], start)
    radii = [5 - 0.5 * k for k in range(6)]
    assert float(losses[0]) == pytest.approx(sum(r * r / 2 for r in radii) / 6)


def test_training_leaves_what_it_was_given_alone() -> None:
    module, model, start, shards = federation("cnn", torch.float32)
    state, kept = copy.deepcopy(module.state_dict()), start.clone()
    torch_state = torch.get_rng_state()
    numpy_state = repr(np.random.get_state())  # noqa: NPY002
    first, _ = train_clients(model, start, shards, SPECS["minibatch"], generators())
    again, _ = train_clients(model, start, shards, SPECS["minibatch"], generators())
    assert torch.equal(first, again)
    assert not torch.equal(first[0], start)
    assert torch.equal(start, kept)
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert repr(np.random.get_state()) == numpy_state  # noqa: NPY002
    for name, value in module.state_dict().items():
        assert torch.equal(value, state[name]), name


def test_without_clients_there_are_no_models() -> None:
    _, model, start, _ = federation("mlp-5-4", torch.float32)
    params, losses = train_clients(model, start, [], SPECS["minibatch"], [])
    assert params.shape == (0, model.dimension)
    assert losses.shape == (0,)


def test_a_client_s_generator_is_of_seed_round_and_id_alone() -> None:
    sequence = np.random.SeedSequence(5, spawn_key=(1, 3, 0, 17, 0))
    expected = np.random.Generator(np.random.Philox(sequence)).random(4)
    np.testing.assert_array_equal(client_generator(5, 3, 17).random(4), expected)
    streams = {
        client_generator(seed, server_round, client).random()
        for seed in range(3)
        for server_round in range(5)
        for client in range(7)
    }
    assert len(streams) == 3 * 5 * 7


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"steps": 0}, "local-steps is 0"),
        ({"batch_size": -1}, "batch-size is -1"),
        ({"learning_rate": 0.0}, "local-lr is 0.0"),
        ({"learning_rate": float("nan")}, "local-lr is nan"),
        ({"weight_decay": -0.1}, "weight-decay is -0.1"),
    ],
)
def test_a_round_s_numbers_out_of_range_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LocalSGD(**{"steps": 1, "batch_size": 1, "learning_rate": 0.1, **values})


@pytest.mark.parametrize("bound", [-1.0, 0.0, 1e-45, float("inf")])
def test_a_bound_that_float32_does_not_hold_is_out_of_range(bound: float) -> None:
    with pytest.raises(ValueError, match=r"the server's bound = .* is not allowed"):
        ClipGradient(bound, 3).check_range(0.1)


def test_shards_without_a_generator_each_are_refused() -> None:
    _, model, start, shards = federation("mlp-5-4", torch.float32)
    with pytest.raises(ValueError, match="5 shards and 4 generators"):
        train_clients(model, start, shards, SPECS["minibatch"], generators()[1:])
    with pytest.raises(ValueError, match="chunk_size is -1"):
        train_clients(model, start, shards, SPECS["minibatch"], generators(), chunk_size=-1)


def test_convolutions_in_threads_are_those_of_one_client_after_the_other() -> None:
    """Clients of unlike size, more of them than threads; the setting of threads is left alone."""
    model = FlatModel(build_model("cnn", (1, 8, 8), 3, 0), cross_entropy)
    generator = torch.Generator().manual_seed(2)
    shards = [
        ExampleShard(
            Examples(
                torch.randn(n, 1, 8, 8, generator=generator),
                torch.randint(0, 3, (n,), generator=generator),
            )
        )
        for n in (7, 1, 4, 9, 4)
    ]
    start = model.flatten(model.module.state_dict())
    spec = LocalSGD(3, 4, 0.1, weight_decay=0.01)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            generators = [client_generator(0, 1, i) for i in range(5)]
            found.append(train_clients(model, start, shards, spec, generators))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(found[0][0][0], start)


@pytest.mark.parametrize("name", ["logistic", "mlp-5-4", "cnn"])
@pytest.mark.parametrize("batch_size", [0, 8, 100])
def test_steps_of_a_subclass_are_made_in_every_batch(name: str, batch_size: int) -> None:
    """A batch of all examples has a closed form, which is SGD's alone."""
    moved: list[int] = []

    class Signs(LocalSGD):
        def move(
            self,
            params: Tensor,
            gradients: Tensor,
            step: int,
            clients: Sequence[int],
            start: Tensor,
        ) -> None:
            del step, start
            moved.extend(clients)
            params.add_(gradients.sign(), alpha=-self.learning_rate)

    _, model, start, shards = federation(name, torch.float64)
    trained, _ = train_clients(model, start, shards, Signs(1, batch_size, 0.25), generators())
    assert sorted(moved) == list(range(len(shards)))
    steps = (trained - start).abs()
    torch.testing.assert_close(steps, 0.25 * (steps > 0).double())


def test_the_device_is_the_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert training_device("auto") == training_device("cpu") == torch.device("cpu")
    with pytest.raises(ValueError, match=r"^device = cuda is not allowed on this machine"):
        training_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert training_device("auto") == training_device("cuda") == torch.device("cuda", 0)
    assert training_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("name", ["logistic", "mlp-5-4"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_the_steps_are_made_where_the_model_is(name: str, spec: LocalSGD) -> None:
    """On PyTorch's device without memory everything works but the copy of the result: a tensor
    that stayed on the processor would have been refused before."""
    _, model, start, shards = federation(name, torch.float32)
    nowhere = model.on(torch.device("meta"))
    assert model.on(torch.device("cpu")) is model
    assert model.device == torch.device("cpu")
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        train_clients(nowhere, start, shards, spec, generators())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no CUDA device here")
@pytest.mark.parametrize("name", ["logistic", "mlp-5-4", "cnn", "lstm"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_clients_train_alike_on_a_gpu(name: str, spec: LocalSGD) -> None:
    _, model, start, shards = federation(name, torch.float32)
    expected, losses = train_clients(model, start, shards, spec, generators())
    on_gpu = model.on(training_device("cuda"))
    found, found_losses = train_clients(on_gpu, start, shards, spec, generators())
    assert found.device == found_losses.device == torch.device("cpu")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found_losses, losses, rtol=1e-4, atol=1e-4)


@dataclass(frozen=True)
class Proximal(LocalRule):
    """g becomes g + mu (w − w_t)."""

    name: ClassVar[str] = "proximal"
    mu: float

    def on_gradient(self, gradients: Tensor, params: Tensor, start: Tensor) -> Tensor:
        return gradients + self.mu * (params - start)


@pytest.mark.parametrize("name", ["logistic", "mlp-5-4"])
def test_a_rule_is_given_the_model_and_where_it_started(name: str) -> None:
    _, model, start, shards = federation(name, torch.float64)
    spec = LocalSGD(3, 0, 0.1, rule=Proximal(2.0))
    trained, _ = train_clients(model, start, shards, spec, generators())
    for found, shard in zip(trained, shards, strict=True):
        x, y = next(iter(shard.batches(np.random.default_rng(0), 0, 1)))
        weights = torch.full((1, len(y)), 1 / len(y), dtype=torch.float64)
        w = start.clone()
        for _ in range(3):
            _, gradient = model.loss_and_gradient(w[None], x[None], y[None], weights)
            w = w - 0.1 * (gradient[0] + 2.0 * (w - start))
        torch.testing.assert_close(found, w)
