"""DP-SGD on a client: its steps, their batches and noise, and what a client is charged for them."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import dp_accounting
import numpy as np
import pytest
import torch
from digits_runs import run
from dp_accounting.rdp import RdpAccountant
from opacus import GradSampleModule
from opacus.accountants import RDPAccountant as OpacusAccountant
from opacus.optimizers import DPOptimizer
from scipy import stats

from blackthorn.client_app.dp_sgd import (
    DPSGD,
    _clipped_sum,
    sample_epsilon,
    train_clients_privately,
    train_dp_sgd,
)
from blackthorn.randomness import Stream
from blackthorn.recording.run_folder import read_metrics
from blackthorn.settings.config import ConfigError, make_config
from blackthorn.strategies import noise
from blackthorn.strategies.noise import SeededRandomness, SystemRandomness
from blackthorn.tasks.datasets import Examples
from blackthorn.tasks.flat_model import FlatModel
from blackthorn.tasks.labelled import cross_entropy
from blackthorn.tasks.models import build_model
from blackthorn.tasks.shards import ExampleShard
from blackthorn.tasks.small_cnn.model import ChannelsLast


def problem(name: str, n: int = 24) -> tuple[FlatModel, torch.Tensor, ExampleShard]:
    generator = torch.Generator().manual_seed(1)
    module = build_model(name, (1, 8, 8), 3, 0)
    model = FlatModel(module, cross_entropy)
    x = torch.rand(n, 1, 8, 8, generator=generator)
    y = torch.randint(0, 3, (n,), generator=generator)
    start = model.flatten(dict(module.state_dict()))
    return model, start, ExampleShard(Examples(x, y))


def counting(n: int) -> tuple[FlatModel, torch.Tensor, ExampleShard]:
    """Example j has the gradient e_j whatever w is: a step says who was in its batch."""
    module = torch.nn.Linear(n, 1, bias=False)
    model = FlatModel(module, lambda outputs, y: outputs[:, 0] + 0 * y)
    return model, torch.zeros(n), ExampleShard(Examples(torch.eye(n), torch.zeros(n)))


def spec(**options: Any) -> DPSGD:
    return DPSGD(
        **{
            "steps": 1,
            "sample_rate": 1.0,
            "batch_size": 24,
            "learning_rate": 0.5,
            "weight_decay": 0.0,
            "noise_multiplier": 1.0,
            "clip_norm": 0.1,
            **options,
        }
    )


def seeded(*key: int) -> SeededRandomness:
    return SeededRandomness(Stream.DP_SGD, 0xD9, *key)


def one_by_one(model: FlatModel, start: torch.Tensor, shard: ExampleShard) -> torch.Tensor:
    """Every example's gradient [n, d], by automatic differentiation of its own loss."""
    examples, rows = shard.examples, []
    for i in range(len(examples)):
        w = start.clone().requires_grad_()
        views = model.unflatten(w)
        outputs = torch.func.functional_call(model.module, views, (examples.x[i : i + 1],))
        loss = model.example_loss(outputs, examples.y[i : i + 1])
        rows.append(torch.autograd.grad(loss.sum(), w)[0])
    return torch.stack(rows)


@pytest.mark.parametrize("batch_size", [24, 7])
@pytest.mark.parametrize("name", ["logistic", "mlp-16", "cnn"])
def test_a_step_without_noise_is_the_sum_of_clipped_gradients_over_b(
    name: str, batch_size: int
) -> None:
    """B is the configuration's, however many are in the batch."""
    model, start, shard = problem(name)
    gradients = one_by_one(model, start, shard)
    bound = float(gradients.norm(dim=1).median())
    clipped = torch.stack([g * min(1.0, bound / float(g.norm())) for g in gradients])
    options = spec(noise_multiplier=1e-9, clip_norm=bound, batch_size=batch_size, weight_decay=0.25)
    found, _ = train_dp_sgd(model, start, shard, options, seeded())
    expected = start - 0.5 * (clipped.sum(dim=0) / batch_size + 0.25 * start)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.parametrize("name", ["logistic", "mlp-16", "cnn"])
def test_a_step_without_noise_is_the_other_librarys(name: str) -> None:
    """Opacus, with the expected batch of its own: GradSampleModule and DPOptimizer."""
    model, start, shard = problem(name)
    bound = float(one_by_one(model, start, shard).norm(dim=1).median())
    module = copy.deepcopy(model.module).train()
    for place, layer in module.named_children():
        if isinstance(layer, ChannelsLast):
            # Opacus misreads the gradients of convolutions in this layout.
            setattr(module, place, torch.nn.Identity())
    parameters = dict(module.named_parameters())
    optimizer = DPOptimizer(
        torch.optim.SGD(module.parameters(), lr=0.5),
        noise_multiplier=0.0,
        max_grad_norm=bound,
        expected_batch_size=10,
    )
    private = GradSampleModule(module)
    losses = cross_entropy(private(shard.examples.x), shard.examples.y)
    losses.mean().backward()
    optimizer.step()
    theirs = model.flatten({name: p.detach() for name, p in parameters.items()})
    options = spec(noise_multiplier=1e-9, clip_norm=bound, batch_size=10)
    ours, loss = train_dp_sgd(model, start, shard, options, seeded())
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert loss == pytest.approx(float(losses.detach().mean()), rel=1e-5)


@pytest.mark.parametrize("name", ["logistic", "mlp-64", "cnn"])
def test_the_noise_is_gaussian_and_of_the_size_that_is_charged(name: str) -> None:
    """N(0, (η z C/B)²) a coordinate: with a tiny C the gradients are nothing beside it."""
    model, start, shard = problem(name)
    options = spec(clip_norm=1e-6, noise_multiplier=1000.0, batch_size=16)
    found, _ = train_dp_sgd(model, start.double(), shard, options, seeded(1))
    drawn = ((found - start.double()) * 16 / 0.5 / 1e-3).numpy()
    d = len(drawn)
    assert abs(drawn.mean()) < 4 / math.sqrt(d)
    assert stats.chi2(d).ppf(1e-4) < (drawn**2).sum() < stats.chi2(d).ppf(1 - 1e-4)
    assert stats.kstest(drawn, "norm").pvalue > 1e-3


def test_noise_and_figure_are_the_same_whatever_a_client_has() -> None:
    """32 examples, 33, 3: the noise that is released is of one size, and so is epsilon."""
    values = {"dp-sgd-sample-rate": 0.25, "batch-size": 8, "local-steps": 1}
    config = make_config({"local-dp-sgd": True, "dp-sgd-clip-norm": 1e-6, **values})
    sizes = []
    for n in (32, 33, 3):
        model, start, shard = problem("mlp-64", n)
        start = start.double()
        moved = train_clients_privately(config, model, start, [shard], 0.5, [(0, 1, 0)])[0] - start
        sizes.append(float(moved.std()) * 8 / 0.5 / 1e-6)
    for size in sizes:
        assert size == pytest.approx(1, rel=6 / math.sqrt(2 * len(start)))
    event = dp_accounting.PoissonSampledDpEvent(0.25, dp_accounting.GaussianDpEvent(1.0))
    theirs = RdpAccountant()
    theirs.compose(event, 7)
    found = sample_epsilon(config, 7)
    assert found == pytest.approx(theirs.get_epsilon(config.delta), rel=0.005)


def test_an_example_is_in_a_batch_with_the_rate_and_on_its_own() -> None:
    n, rounds, rate = 12, 1000, 0.3
    model, start, shard = counting(n)
    options = spec(
        sample_rate=rate, batch_size=1, learning_rate=1.0, clip_norm=1.0, noise_multiplier=1e-9
    )
    batches = np.array(
        [
            -train_dp_sgd(model, start, shard, options, seeded(2, t))[0].round().numpy()
            for t in range(rounds)
        ]
    )
    assert set(np.unique(batches)) == {0, 1}
    low, high = stats.binom(rounds, rate).ppf([1e-6, 1 - 1e-6])
    assert (batches.sum(axis=0) >= low).all()
    assert (batches.sum(axis=0) <= high).all()
    # Independent of each other: a batch's size is binomial.
    counts = np.bincount(batches.sum(axis=1).astype(int), minlength=n + 1)
    expected = rounds * stats.binom(n, rate).pmf(np.arange(n + 1))
    often = expected >= 5
    observed = [*counts[often], counts[~often].sum()]
    assert stats.chisquare(observed, [*expected[often], expected[~often].sum()]).pvalue > 1e-3


def test_a_step_is_of_the_length_that_is_stated() -> None:
    """3 examples and B = 2 at q = 2/3: divided by 2, where a rounded product would be 1."""
    model, start, shard = counting(3)
    options = spec(
        sample_rate=2 / 3, batch_size=2, learning_rate=1.0, clip_norm=1.0, noise_multiplier=1e-9
    )
    steps = {
        round(float(-value), 6)
        for t in range(20)
        for value in train_dp_sgd(model, start, shard, options, seeded(3, t))[0]
    }
    assert {abs(step) for step in steps} == {0.0, 0.5}


def test_every_number_is_the_operating_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is spun out of a short seed: one byte drawn moves one coordinate."""
    model, start, shard = problem("logistic")
    config = make_config({"local-dp-sgd": True, "dp-sgd-sample-rate": 0.5, "local-steps": 1})

    def trained(flip: int) -> tuple[torch.Tensor, int]:
        source, taken = np.random.default_rng(4), 0

        def urandom(size: int) -> bytes:
            nonlocal taken
            drawn = bytearray(source.bytes(size))
            if taken <= flip < taken + size:
                drawn[flip - taken] ^= 0x80
            taken += size
            return bytes(drawn)

        monkeypatch.setattr(noise.os, "urandom", urandom)
        keys = [(config.seed, 1, 0)]
        return train_clients_privately(config, model, start, [shard], 0.5, keys)[0][0], taken

    plain, taken = trained(-1)
    assert taken == 8 * (len(shard.examples) + len(start))
    for coordinate in (0, 57, len(start) - 1):
        # The highest byte of the word that the coordinate's noise is made of.
        flipped, _ = trained(8 * (len(shard.examples) + coordinate) + 7)
        assert (flipped != plain).nonzero().flatten().tolist() == [coordinate]


def test_batches_and_noise_differ_unless_they_are_seeded() -> None:
    model, start, shard = problem("logistic")
    options = spec(steps=3, sample_rate=0.25, batch_size=6)
    one, other = (
        train_dp_sgd(model, start, shard, options, SystemRandomness())[0] for _ in range(2)
    )
    assert not torch.equal(one, other)
    one, other = (train_dp_sgd(model, start, shard, options, seeded(5))[0] for _ in range(2))
    assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["logistic", "mlp-16", "cnn"])
def test_empty_batches_are_noised_all_the_same(name: str) -> None:
    model, start, shard = problem(name)
    options = spec(steps=3, sample_rate=1e-9, batch_size=1, clip_norm=1e-3)
    found, loss = train_dp_sgd(model, start, shard, options, seeded(6))
    assert loss == 0
    rounding = 6 / math.sqrt(2 * len(start))
    assert float((found - start).std()) == pytest.approx(0.5e-3 * math.sqrt(3), rel=rounding)


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e38])
def test_an_example_without_a_finite_gradient_does_not_show(value: float) -> None:
    """A model that is not finite would tell of it with certainty."""
    model, start, shard = problem("logistic")
    examples = shard.examples
    x = torch.cat([examples.x, torch.full((1, 1, 8, 8), value)])
    more = ExampleShard(Examples(x, torch.cat([examples.y, examples.y[:1]])))
    options = spec(noise_multiplier=1e-9)
    found = [train_dp_sgd(model, start, s, options, seeded(7))[0] for s in (shard, more)]
    assert torch.isfinite(found[1]).all()
    assert float((found[1] - found[0]).norm()) <= 0.5 * 0.1 / 24 * 1.01


class OneByOne(torch.nn.Linear):
    """A module of one's own, which can be computed for many clients at once."""

    batching = "vmap"


@pytest.mark.parametrize("name", ["logistic", "mlp-20", "cnn", "own"])
def test_an_examples_gradient_hangs_on_no_other_example(name: str) -> None:
    """Not by a bit: at weights whose sums cancel, another order of adding would turn it round, and
    the sum would move by three times what is charged."""
    if name == "own":
        model = FlatModel(OneByOne(64, 3), lambda outputs, y: cross_entropy(outputs.flatten(1), y))
        shard = problem("logistic", 12)[2]
        shard = ExampleShard(Examples(shard.examples.x.flatten(1), shard.examples.y))
    else:
        model, _, shard = problem(name, 12)
    generator = torch.Generator().manual_seed(3)
    options = spec(batch_size=1)
    for size in (1.0, 1e5, 1e9):
        start = torch.randn(model.dimension, generator=generator) * size
        alone = torch.zeros(model.dimension, dtype=torch.float64)
        for n in range(1, len(shard.examples) + 1):
            one, all_of_them = (
                _clipped_sum(model, start, shard.examples.select(np.arange(n)[rows]), options, 0)[0]
                for rows in (slice(n - 1, n), slice(n))
            )
            alone += one
            assert torch.equal(all_of_them, alone), (size, n)


def test_the_charge_is_the_other_librarys() -> None:
    options = spec(steps=10, sample_rate=0.1, noise_multiplier=1.3)
    theirs = RdpAccountant()
    event = dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(1.3))
    theirs.compose(event, 70)
    epsilon = options.figure(7, 1e-5).epsilon
    assert epsilon == pytest.approx(theirs.get_epsilon(1e-5), rel=0.005)
    opacus = OpacusAccountant()
    opacus.history = [(1.3, 0.1, 70)]
    assert epsilon == pytest.approx(opacus.get_epsilon(1e-5), rel=0.005)
    # What the privacy loss distribution finds is a little tighter, as it must be.
    tight = dp_accounting.pld.PLDAccountant()
    tight.compose(event, 70)
    assert 0.8 * epsilon < tight.get_epsilon(1e-5) <= epsilon


DP: dict[str, Any] = {
    "local_dp_sgd": True,
    "dp_sgd_noise_multiplier": 2.0,
    "dp_sgd_sample_rate": 0.2,
    "batch_size": 10,
}


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
    options: dict[str, Any] = {"algorithm": "dp-fedavg", "clip_norm": 1.0, "noise_multiplier": 2.0}
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
        ({"dp-sgd-sample-rate": 0.0}, "dp-sgd-sample-rate = 0.0 with batch-size = 32"),
        ({"dp-sgd-sample-rate": 1e-12}, "a rate of at least 1e-09"),
        ({"dp-sgd-sample-rate": 1.5}, "dp-sgd-sample-rate = 1.5"),
        ({"dp-sgd-clip-norm": 1e-320}, "dp-sgd-clip-norm = 1e-320 is not allowed"),
        ({"dp-sgd-noise-multiplier": 1e200}, "dp-sgd-noise-multiplier = 1e+200 is not allowed"),
        ({"batch-size": 0}, "batch-size = 0 is not allowed with local-dp-sgd"),
        ({"weighting": "num-examples"}, "weighting = num-examples breaks the claim"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_config({"local-dp-sgd": True, "dp-sgd-sample-rate": 0.1, **values})
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_layers_that_look_across_a_batch_are_no_danger() -> None:
    """Normalisation over the batch would let one example move the gradients of all: here it is by
    the statistics that the server sent, example by example."""
    module = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3)
    )
    model = FlatModel(module, cross_entropy)
    start = model.flatten(dict(module.state_dict()))
    shard = problem("logistic")[2]
    gradients = one_by_one(model, start, shard)
    clipped = gradients / (gradients.norm(dim=1, keepdim=True) / 0.1).clamp(min=1)
    found, _ = train_dp_sgd(model, start, shard, spec(noise_multiplier=1e-9), seeded())
    expected = start - 0.5 * clipped.sum(dim=0) / 24
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "values",
    [
        {"clip_norm": 5e-324},
        {"clip_norm": 1e39},
        {"clip_norm": 1e-30, "noise_multiplier": 1e-10},
        {"learning_rate": 5e-324},
        {"learning_rate": math.nan},
    ],
)
def test_steps_whose_noise_would_not_have_its_size_are_refused(values: dict[str, float]) -> None:
    """0.49 times 5e-324 is 0: a step without noise, with a figure."""
    with pytest.raises(ValueError, match="which float32 holds in full precision"):
        spec(**values)
