"""The noisy quadratic: its gradient, its endless shards, and whole runs against plain loops."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from rich.console import Console
from safetensors.numpy import load_file

from blackthorn.client_app.clientapp import app
from blackthorn.client_app.training import client_generator
from blackthorn.launch.commands.cluster import cluster
from blackthorn.launch.commands.recipes import recipe_config
from blackthorn.launch.commands.simulate import simulate
from blackthorn.server_app.build import build_strategy
from blackthorn.server_app.run import prepare
from blackthorn.settings.config import ConfigError, RunConfig, make_config, to_mapping
from blackthorn.simulation.engine import EngineGrid
from blackthorn.strategies import RoundContext
from blackthorn.strategies.enrolment_messages import CannotTakePart, read_enrolment
from blackthorn.strategies.reports import RoundReport
from blackthorn.tasks.noise_laws import NoiseLaw
from blackthorn.tasks.problem import load_problem
from blackthorn.tasks.quadratic_noise import NoiseShard

SETTING = {
    "task": "quadratic-noise",
    "problem-dimension": 4,
    "noise-law": "cauchy",
    "num-clients": 3,
    "num-server-rounds": 5,
    "local-steps": 6,
    "batch-size": 2,
    "local-lr": 0.1,
    "dtype": "float64",
    "seed": 11,
}


def configuration(**values: Any) -> RunConfig:
    given = {key.replace("_", "-"): value for key, value in values.items()}
    return make_config({**SETTING, **given})


def final_point(config: RunConfig) -> np.ndarray:
    """x after the last round of the product's run on the engine."""
    problem = load_problem(config)
    reports: list[RoundReport] = []
    build_strategy(config, [reports.append]).start(
        EngineGrid(config, problem),
        ArrayRecord(problem.state()),
        num_rounds=config.num_server_rounds,
        train_config=ConfigRecord({"seed": config.seed}),
        evaluate_fn=lambda _round, _arrays: None,
    )
    assert not any(report.rejected or report.skipped for report in reports)
    return reports[-1].model.numpy()


def clipped(vector: np.ndarray, bound: float) -> np.ndarray:
    return vector * min(1.0, bound / np.linalg.norm(vector))


def plain_loop(config: RunConfig, per_step: float = np.inf, per_round: float = np.inf) -> Any:
    """FedAvg on the noisy quadratic as its definition reads, one client after the other."""
    d, k, b = config.problem_dimension, config.local_steps, config.batch_size
    x = np.full(d, config.initial_point)
    for server_round in range(1, config.num_server_rounds + 1):
        updates = []
        for client in range(config.num_clients):
            generator = client_generator(config.seed, server_round, client)
            noise = config.noise_scale * generator.standard_cauchy((k, b, d))
            local, total = x.copy(), np.zeros(d)
            for step in range(k):
                gradient = clipped(local + noise[step].mean(axis=0), per_step)
                local -= config.local_lr * gradient
                total += gradient
            updates.append(clipped(total, per_round))
        x = x - config.server_lr * config.local_lr * np.mean(updates, axis=0)
    return x


def test_fedavg_is_the_plain_loop() -> None:
    config = configuration(server_lr=0.7)
    np.testing.assert_allclose(final_point(config), plain_loop(config), rtol=1e-9)


def test_pi_and_pr_are_the_plain_loop() -> None:
    pi = configuration(algorithm="fat-clipping-pi", clip_norm=1.5)
    np.testing.assert_allclose(final_point(pi), plain_loop(pi, per_step=1.5), rtol=1e-9)
    pr = configuration(algorithm="fat-clipping-pr", clip_norm=4.0)
    np.testing.assert_allclose(final_point(pr), plain_loop(pr, per_round=4.0), rtol=1e-9)
    assert np.linalg.norm(final_point(pi) - final_point(pr)) > 1e-3


def test_without_noise_it_is_gradient_descent() -> None:
    config = configuration(noise_scale=0.0, initial_point=-2.5)
    np.testing.assert_allclose(final_point(config), np.full(4, -2.5 * 0.9**30), rtol=1e-12)


def test_float32_is_near_the_loop_in_double_precision() -> None:
    config = configuration(dtype="float32")
    problem = load_problem(config)
    assert problem.state()["x"].dtype == torch.float32
    np.testing.assert_allclose(final_point(config), plain_loop(config), rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_analytic_gradient_is_autograd_s(dtype: torch.dtype) -> None:
    problem = load_problem(configuration(dtype=str(dtype).removeprefix("torch.")))
    generator = torch.Generator().manual_seed(0)
    params = torch.randn(3, 4, dtype=dtype, generator=generator)
    noise = torch.randn(3, 5, 4, dtype=dtype, generator=generator)
    weights = torch.rand(3, 5, dtype=dtype, generator=generator)
    weights /= weights.sum(dim=1, keepdim=True)
    losses, gradients = problem.model.loss_and_gradient(
        params, noise, torch.zeros(3, 5, dtype=torch.int64), weights
    )
    for client in range(3):
        x = params[client].clone().requires_grad_()
        loss = sum(
            weight * (0.5 * (x * x).sum() + (xi * x).sum())
            for weight, xi in zip(weights[client], noise[client], strict=True)
        )
        (gradient,) = torch.autograd.grad(loss, x)
        torch.testing.assert_close(losses[client], loss.detach())
        torch.testing.assert_close(gradients[client], gradient)
        outputs = problem.model.outputs(params[client], noise[client])
        torch.testing.assert_close(torch.dot(weights[client], outputs), loss.detach())


def test_every_batch_is_new_and_the_generator_s() -> None:
    shard = NoiseShard(NoiseLaw("gaussian"), 3, torch.float32)
    generator = client_generator(1, 2, 3)
    first, second = shard.batch(generator, 5)[0], shard.batch(generator, 5)[0]
    assert first.shape == (5, 3)
    assert not torch.equal(first, second)
    drawn = client_generator(1, 2, 3).standard_normal((2, 5, 3)).astype(np.float32)
    np.testing.assert_array_equal(torch.stack([first, second]).numpy(), drawn)
    again = shard.batches(client_generator(1, 2, 3), 5, 2)
    np.testing.assert_array_equal(torch.stack([x for x, _ in again]).numpy(), drawn)


def test_joint_batches_are_everybody_s_own() -> None:
    shard = NoiseShard(NoiseLaw("stable", alpha=0.7), 3, torch.float64)
    joint = list(shard.joint_batches([client_generator(1, 2, i) for i in range(4)], 2, 3))
    assert [x.shape for x, _ in joint] == [(4, 2, 3)] * 3
    for client in range(4):
        own = shard.batches(client_generator(1, 2, client), 2, 3)
        for (x, y), (own_x, own_y) in zip(joint, own, strict=True):
            assert torch.equal(x[client], own_x)
            assert torch.equal(y[client], own_y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_fattest_tails_stay_numbers(dtype: torch.dtype) -> None:
    shard = NoiseShard(NoiseLaw("stable", alpha=0.01), 2, dtype)
    x, _ = shard.batch(client_generator(0, 0, 0), 20_000)
    assert x.dtype == dtype
    assert torch.isfinite(x).all()
    assert x.abs().max() == torch.finfo(dtype).max


def test_the_server_measures_loss_and_squared_norm() -> None:
    problem = load_problem(configuration())
    metrics = problem.task.evaluate(problem.model, torch.tensor([3.0, 4.0, 0.0, 0.0]))
    assert metrics == {"loss": 12.5, "squared-norm": 25.0}


def test_a_node_draws_as_the_engine_does() -> None:
    config = configuration(algorithm="fat-clipping-pi", clip_norm=1.5)
    problem = load_problem(config)
    grid = EngineGrid(config, problem)
    for client, node in enumerate(grid.get_node_ids()):
        instruction = ConfigRecord({"server-round": 4, "local-lr": 0.1, "client-id": client})
        rule = build_strategy(config).local_rule(RoundContext(1, 0.1, torch.zeros(1))).sent.record()
        arrays = ArrayRecord(problem.state())
        content = RecordDict({"arrays": arrays, "config": instruction, "rule": rule})
        message = Message(content, node, "train")
        (engine,) = grid.send_and_receive([message])
        context = Context(1, node, {"partition-id": client}, RecordDict(), to_mapping(config))
        reply = app(message, context)
        np.testing.assert_allclose(
            reply.content.array_records["arrays"]["x"].numpy(),
            engine.content.array_records["arrays"]["x"].numpy(),
            rtol=1e-12,
        )


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"batch_size": 0}, "batch-size is 0: task 'quadratic-noise' draws"),
        ({"model": "cnn"}, "model is 'cnn': task 'quadratic-noise' has no choice"),
        ({"partition": "dirichlet"}, "partition is 'dirichlet'"),
        ({"num_classes": 3}, "num-classes is 3"),
        ({"attack": "label-flip", "num_byzantine": 1}, "task 'quadratic-noise' has no labels"),
    ],
)
def test_what_it_cannot_be_asked_is_one_line(values: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        prepare(configuration(**values))
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_node_s_own_data_are_refused() -> None:
    context = Context(
        1, 5, {"partition-id": 0, "data-path": "x.npz"}, RecordDict(), to_mapping(configuration())
    )
    reply = app(Message(RecordDict(), 5, "query"), context)
    with pytest.raises(CannotTakePart, match="takes no examples of a node's own") as refused:
        read_enrolment(reply)
    assert refused.value.client_id == 0
    with pytest.raises(ValueError, match="takes no examples of a node's own"):
        app(Message(RecordDict(), 5, "train"), context)


def test_the_recipe_s_clipping_stands_cauchy_noise(repository: Path, tmp_path: Path) -> None:
    options = {"num-server-rounds": 80, "output-dir": str(tmp_path / "run")}
    config = recipe_config(repository / "recipes" / "fat-clipping-cauchy.toml", (), options)
    summary = simulate(config, Console(quiet=True))
    # From ‖x_1‖² = 10; FedAvg is above 5 with this noise.
    assert summary["final"]["squared-norm"] < 1.0
    assert summary["final"]["loss"] == pytest.approx(summary["final"]["squared-norm"] / 2)


@pytest.mark.deployment
def test_over_grpc_it_is_the_same_run(repository: Path, tmp_path: Path) -> None:
    recipe = repository / "recipes" / "fat-clipping-cauchy.toml"
    points = []
    for run, name in ((simulate, "engine"), (cluster, "cluster")):
        options = {"num-clients": 3, "num-server-rounds": 3, "output-dir": str(tmp_path / name)}
        run(recipe_config(recipe, (), options), Console(quiet=True))
        points.append(load_file(tmp_path / name / "checkpoints" / "final.safetensors")["x"])
    np.testing.assert_allclose(points[1], points[0], rtol=1e-4)
