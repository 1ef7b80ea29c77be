"""DP-SGD on a client: Opacus' steps, their noise, and what a client is charged for them."""

import json
import math
from pathlib import Path
from typing import Any

import dp_accounting
import numpy as np
import pytest
import torch
from digits_runs import configuration, run
from dp_accounting.rdp import RdpAccountant

from client_app.dp_sgd import DPSGD, train_dp_sgd
from server_app.config import ConfigError, make_config
from server_app.run_folder import read_metrics
from tasks.datasets import Examples
from tasks.flat_model import FlatModel
from tasks.labelled import cross_entropy
from tasks.models import build_model
from tasks.shards import ExampleShard


def problem(name: str, n: int = 24) -> tuple[FlatModel, torch.Tensor, ExampleShard]:
    generator = torch.Generator().manual_seed(1)
    module = build_model(name, (1, 8, 8), 3, 0)
    model = FlatModel(module, cross_entropy)
    x = torch.rand(n, 1, 8, 8, generator=generator)
    y = torch.randint(0, 3, (n,), generator=generator)
    start = model.flatten(dict(module.state_dict()))
    return model, start, ExampleShard(Examples(x, y))


def spec(**options: Any) -> DPSGD:
    return DPSGD(
        **{
            "steps": 1,
            "batch_size": 0,
            "learning_rate": 0.5,
            "weight_decay": 0.0,
            "noise_multiplier": 1.0,
            "clip_norm": 0.1,
            **options,
        }
    )


@pytest.mark.parametrize("name", ["logistic", "mlp-16", "cnn"])
def test_a_step_without_noise_is_the_mean_of_clipped_gradients(name: str) -> None:
    """Per-sample gradients by automatic differentiation, one by one, clipped by hand."""
    model, start, shard = problem(name)
    x, y = shard.batch(np.random.default_rng(0), 0)
    one = torch.ones(1, 1)
    gradients = [
        model.loss_and_gradient(start[None], x[i][None, None], y[i][None, None], one)[1][0]
        for i in range(len(y))
    ]
    norms = torch.stack([g.norm() for g in gradients])
    bound = float(norms.median())
    clipped = torch.stack([g * min(1.0, bound / float(g.norm())) for g in gradients])
    found, _ = train_dp_sgd(model, start, shard, spec(noise_multiplier=1e-9, clip_norm=bound))
    expected = start - 0.5 * clipped.mean(dim=0)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["logistic", "mlp-64", "cnn"])
def test_the_noise_has_the_size_that_is_charged(name: str) -> None:
    """η z C/n a coordinate: with a tiny C the gradients are nothing beside it."""
    model, start, shard = problem(name)
    options = spec(clip_norm=1e-6, noise_multiplier=1000.0)
    moved = (train_dp_sgd(model, start.double(), shard, options)[0] - start.double()) * 24 / 0.5
    d = len(start)
    assert float(moved.std()) == pytest.approx(1e-3, rel=6 / math.sqrt(2 * d))


def test_batches_and_noise_differ_unless_they_are_seeded() -> None:
    model, start, shard = problem("logistic")
    options = spec(steps=3, batch_size=6)
    one, other = (train_dp_sgd(model, start, shard, options)[0] for _ in range(2))
    assert not torch.equal(one, other)
    one, other = (
        train_dp_sgd(model, start, shard, options, np.random.default_rng(5))[0] for _ in range(2)
    )
    assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["logistic", "mlp-16", "cnn"])
def test_empty_batches_do_no_harm(name: str) -> None:
    """24 examples in batches of one: most Poisson batches of 60 have none or one."""
    model, start, shard = problem(name)
    found, loss = train_dp_sgd(model, start, shard, spec(steps=60, batch_size=1))
    assert torch.isfinite(found).all()
    assert math.isfinite(loss)


def test_the_charge_is_the_other_librarys() -> None:
    options = spec(steps=10, batch_size=5, noise_multiplier=1.3)
    assert options.sample_rate(50) == pytest.approx(0.1)
    assert options.sample_rate(52) == pytest.approx(1 / 11)
    assert options.sample_rate(3) == 1
    theirs = RdpAccountant()
    event = dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(1.3))
    theirs.compose(event, 70)
    assert options.figure(50, 7, 1e-5).epsilon == pytest.approx(theirs.get_epsilon(1e-5), rel=0.005)


DP: dict[str, Any] = {"local_dp_sgd": True, "dp_sgd_noise_multiplier": 2.0, "batch_size": 10}


def test_every_client_reports_its_own_epsilon(tmp_path: Path) -> None:
    entries = run(tmp_path, num_server_rounds=2, **DP)
    for rounds, entry in enumerate(entries, start=1):
        theirs = RdpAccountant()
        event = dp_accounting.PoissonSampledDpEvent(0.2, dp_accounting.GaussianDpEvent(2.0))
        theirs.compose(event, 4 * rounds)
        expected = theirs.get_epsilon(1e-5)
        assert set(entry["sample_epsilon"]) == {"0", "1", "2", "3"}
        for epsilon in entry["sample_epsilon"].values():
            assert epsilon == pytest.approx(expected, rel=0.005)


def test_under_a_client_level_claim_they_are_the_operators(tmp_path: Path) -> None:
    options = {"algorithm": "dp-fedavg", "clip_norm": 1.0, "noise_multiplier": 2.0}
    run(tmp_path, num_server_rounds=1, instruments=False, **options, **DP)
    assert "sample_epsilon" not in read_metrics(tmp_path)[1]
    last = json.loads((tmp_path / "operator.jsonl").read_text().splitlines()[-1])
    assert set(last["sample_epsilon"]) == {"0", "1", "2", "3"}


def test_a_seed_leaves_no_figure(tmp_path: Path) -> None:
    entries = run(tmp_path, num_server_rounds=1, insecure_seeded_noise=True, **DP)
    assert "sample_epsilon" not in entries[0]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"task": "quadratic-noise"}, "task quadratic-noise"),
        ({"algorithm": "fat-clipping-pi", "clip-norm": 1.0}, "fat-clipping-pi"),
        ({"algorithm": "fa-ld"}, "fa-ld"),
        ({"dp-sgd-noise-multiplier": 0.0}, "dp-sgd-noise-multiplier = 0.0"),
        ({"dp-sgd-clip-norm": 0.0}, "dp-sgd-clip-norm = 0.0"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_config({"local-dp-sgd": True, **values})
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_model_that_opacus_cannot_take_apart_is_refused() -> None:
    module = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3)
    )
    model = FlatModel(module, cross_entropy)
    start = model.flatten(dict(module.state_dict()))
    with pytest.raises(ValueError, match="local-dp-sgd is impossible with this model"):
        train_dp_sgd(model, start, problem("logistic")[2], spec())
    assert configuration(Path("unused")).local_dp_sgd is False
