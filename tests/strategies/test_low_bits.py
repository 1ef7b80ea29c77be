"""What is released lies on a grid that nobody's data move: float64 noise has gaps, and the low bits
of a sum with it would tell what it was added to."""

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from memory_grid import MemoryGrid
from scipy.special import ndtr, ndtri

from blackthorn.client_app.dp_sgd import DPSGD, train_dp_sgd
from blackthorn.client_app.messages import RoundRequest
from blackthorn.client_app.private_update import noised_models
from blackthorn.settings.config import make_config
from blackthorn.strategies import (
    ClipNorm,
    DPFedAvg,
    DPNormFedAvg,
    FullParticipation,
    PrivacyPlan,
    RoundContext,
)
from blackthorn.strategies.attestation import (
    SentRule,
)
from blackthorn.strategies.noise import SystemRandomness, on_grid
from blackthorn.strategies.private_averaging import PrivateAveraging
from blackthorn.tasks.datasets import Examples
from blackthorn.tasks.flat_model import FlatModel
from blackthorn.tasks.shards import ExampleShard

D = 600
Z = 10.0


def step_of(deviation: float) -> Fraction:
    """The power of two that is 2^-20 deviations, or just below."""
    return Fraction(2) ** (math.floor(math.log2(deviation)) - 20)


def all_on(step: Fraction, numbers: np.ndarray) -> bool:
    return all((Fraction(float(x)) / step).denominator == 1 for x in numbers)


def released(system: type[PrivateAveraging], there: bool) -> np.ndarray:
    """r times what one round of two clients made of a float64 model of zeros."""

    def answer(message: Message) -> Message:
        w = message.content.array_records["arrays"]["w"].numpy()
        update = np.random.default_rng().normal(size=D) if there else np.zeros(D)
        record = ArrayRecord({"w": Array(w - update / math.sqrt(D))})
        metrics = MetricRecord({"num-examples": 1})
        return Message(RecordDict({"arrays": record, "metrics": metrics}), reply_to=message)

    plan = PrivacyPlan(ClipNorm(1.0), Z, num_clients=2, rounds=1)
    strategy = system(plan, local_rate=1.0)
    start = ArrayRecord({"w": Array(np.zeros(D))})
    result = strategy.start(MemoryGrid({1: answer, 2: answer}), start, num_rounds=1, timeout=20)
    return -result.arrays["w"].numpy()


@pytest.mark.parametrize("system", [DPFedAvg, DPNormFedAvg])
@pytest.mark.parametrize("there", [True, False])
def test_a_float64_release_is_on_the_grid_whoever_is_there(
    system: type[PrivateAveraging], there: bool
) -> None:
    found = released(system, there)
    assert all_on(step_of(Z / 2), found)
    assert found.std() == pytest.approx(Z / 2, rel=6 / math.sqrt(2 * D))


def test_a_client_s_message_is_on_the_grid() -> None:
    config = make_config(
        {
            "algorithm": "dp-fedavg",
            "clip-norm": 1.0,
            "noise-multiplier": Z,
            "noise-location": "client",
            "num-clients": 4,
        }
    )
    rule = SentRule("clip-update", {"bound": 1.0, "noise-multiplier": Z, "noise-shares": 4})
    request = RoundRequest(server_round=1, local_lr=0.25, arrays=ArrayRecord(), rule=rule)
    start = torch.zeros(D, dtype=torch.float64)
    for trained in (start, torch.linspace(-1, 1, D).double(), start + math.nan):
        (sent,) = noised_models(config, start, trained[None], [request], [0])
        assert all_on(step_of(0.25 * Z / 2), sent.numpy())


def test_a_step_of_dp_sgd_is_on_the_grid() -> None:
    module = torch.nn.Linear(D, 1, bias=False).double()
    model = FlatModel(module, lambda outputs, y: outputs[:, 0] + 0 * y)
    x = torch.rand(5, D).double()
    options: dict[str, Any] = {"steps": 1, "sample_rate": 0.5, "weight_decay": 0.0}
    sizes: dict[str, Any] = {"batch_size": 2, "learning_rate": 0.5, "clip_norm": 0.1}
    spec = DPSGD(**options, **sizes, noise_multiplier=Z)
    shard = ExampleShard(Examples(x, torch.zeros(5)))
    start = torch.zeros(D, dtype=torch.float64)
    sent, _ = train_dp_sgd(model, start, shard, spec, SystemRandomness())
    # Half of the noised sum, times the rate: powers of two move no bits.
    assert all_on(step_of(Z * 0.1) / 4, sent.numpy())


def can_be_noise(x: np.ndarray) -> np.ndarray:
    """Whether `SystemRandomness.normal` can give ±x exactly: Φ⁻¹ of a number of 53 bits.

    Back through Φ, that number is known to some x² of its last digits, and those of `ndtr` itself.
    """
    fractions = 2 * ndtr(-np.abs(x))
    found = np.zeros(len(x), dtype=bool)
    for k in range(-128, 129):
        found |= ndtri((fractions + k * np.spacing(fractions)) / 2) == -np.abs(x)
    return found


def test_without_the_grid_the_low_bits_tell_and_with_it_they_do_not() -> None:
    """Of sums with an update, half are no number that the noise alone can be."""
    update = np.random.default_rng(1).normal(size=D)
    noise = SystemRandomness().normal(D)
    other = SystemRandomness().normal(D)
    assert can_be_noise(noise).all()
    assert not can_be_noise(other + update).all()
    for numbers in (noise, other + update):
        grid = on_grid(torch.from_numpy(numbers), 1.0).numpy()
        assert all_on(step_of(1.0), grid)
        # Which of its numbers a step of the grid stands for cannot be told: it holds many.
        assert np.abs(grid - numbers).max() <= float(step_of(1.0)) / 2


@pytest.mark.parametrize("deviation", [1e-30, 0.7, 1.0, 3e37])
def test_the_grid_is_fine_beside_the_noise_and_coarse_beside_its_gaps(deviation: float) -> None:
    noise = SystemRandomness().normal(1000) * deviation
    grid = on_grid(torch.from_numpy(noise), deviation).numpy()
    assert 0 < np.abs(grid - noise).max() <= 2.0**-21 * deviation
    gaps = np.diff(ndtri((0.5 + np.arange(2) * 2.0**-53) / 2))
    assert gaps[0] < 2.0**-30 * 2.0**-20


def share_of_even_bits(missing: int, **options: Any) -> float:
    """Of the last bits of a new model whose clients have trained nothing, each bringing its share
    of the noise in a model that is rounded to float32; `missing` of the eight do not answer."""
    count, bound, z = 8, 1e-3, 4.0
    generator = np.random.default_rng(missing)
    start = torch.from_numpy(generator.uniform(0.6, 0.9, 40_000).astype(np.float32))
    plan = PrivacyPlan(
        ClipNorm(bound, "parameter"),
        z,
        num_clients=count,
        rounds=1,
        participation=FullParticipation(),
        delta=0.01,
        noise_location="client",
        **options,
    )
    strategy = DPFedAvg(plan)
    strategy._sent_in = torch.float32
    shares = z * bound / count**0.5 * generator.standard_normal((count - missing, len(start)))
    models = (start.double() - torch.from_numpy(shares)).float()
    updates = start - models
    weights = torch.full((len(updates),), 1 / len(updates), dtype=torch.float64)
    vector = strategy.combine(updates, weights, RoundContext(1, 1.0, start)).vector
    bits = (start - vector).numpy().view(np.int32) % 2
    return float((bits == 0).mean())


def test_the_last_bits_do_not_tell_whether_everybody_answered() -> None:
    """Six deviations of a fair coin; where the server adds nothing they are even too often."""
    six = 6 * 0.5 / 40_000**0.5
    for missing in (0, 1, 3):
        assert share_of_even_bits(missing) == pytest.approx(0.5, abs=six)
    assert share_of_even_bits(0, top_up=False, claim=False) > 0.5 + 3 * six
