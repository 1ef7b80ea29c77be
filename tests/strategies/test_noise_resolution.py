"""Noise that clients add to models of finite precision has the size that is claimed, or is refused.

The oracle is the exact law of a rounded Gaussian, summed cell by cell.
"""

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord
from noised_rounds import CLIENTS, LR, START, C, Z, grid, ones, plan, state_of
from scipy import stats

from blackthorn.server_app.run import prepare
from blackthorn.settings.config import ConfigError, make_config
from blackthorn.strategies import DPFedAvg, LocalRate, RoundReport, ServerStep
from blackthorn.strategies.noise import check_resolution, longest_noised, roundings_needed


def rounded_deviation(mean: float, deviation: float) -> float:
    """Of N(mean, deviation²) rounded to integers: Σ k² P(k) − (Σ k P(k))²."""
    k = np.arange(math.floor(mean - 12 * deviation) - 1, math.ceil(mean + 12 * deviation) + 2)
    p = np.diff(stats.norm.cdf(np.append(k, k[-1] + 1) - 0.5, mean, deviation))
    first = float(p @ k)
    return math.sqrt(float(p @ (k - first) ** 2))


SPACING = float(np.spacing(np.float32(1.5)))  # of numbers from 1 to 2
MODEL = torch.linspace(-1.5, 1.5, 7)


def allowed(deviation_in_spacings: float, local_lr: float = 1e-3) -> bool:
    try:
        check_resolution(MODEL, local_lr, 0.0, deviation_in_spacings * SPACING / local_lr)
    except ValueError as error:
        assert "\n" not in str(error)
        return False
    return True


@pytest.mark.parametrize("mean", [0.0, 0.2, 0.5])
def test_what_is_allowed_keeps_its_deviation(mean: float) -> None:
    smallest = min(x for x in np.linspace(0.1, 8, 80) if allowed(float(x)))
    assert rounded_deviation(mean, smallest) == pytest.approx(smallest, rel=0.003)
    # The refusal has its reason: soon below, rounding tells in the noise.
    assert rounded_deviation(mean, smallest / 4) > 1.03 * smallest / 4
    assert smallest < 5


def test_honest_noise_is_not_cut_where_it_is_rounded() -> None:
    """‖noise‖ of 10^9 numbers is √d deviations: its rounding counts there, not its tail."""
    smallest = min(x for x in np.linspace(0.1, 8, 800) if allowed(float(x)))
    d = 10**9
    assert longest_noised(0.0, smallest, d) > rounded_deviation(0.5, smallest) * math.sqrt(d)


@pytest.mark.parametrize(("dimension", "rounds", "shares"), [(10**7, 100, 2), (10**4, 1, 8)])
def test_one_client_s_roundings_do_not_show_in_the_size_of_all_that_is_released(
    dimension: int, rounds: int, shares: int
) -> None:
    """By the deviation of a chi-square: how far the mean square moves where a model is missing
    whose rounding nobody makes up for, and the noise is as short as is allowed."""
    width = roundings_needed(dimension, rounds, shares)
    whole = (shares + 1) * width**2
    known = math.sqrt(2 / (dimension * rounds)) * whole
    lacking = rounded_deviation(0.3, width) ** 2 - width**2
    assert lacking == pytest.approx(1 / 12, rel=0.01)
    assert lacking / known == pytest.approx(1e-3, rel=0.01)


def test_a_plan_asks_for_as_many_roundings_as_its_rounds_and_its_model_need() -> None:
    """In float64 weights, and at a power of two, too: nothing is made up for."""
    for dtype, rate in ((torch.float32, 3e-5), (torch.float64, 3e-14)):
        model = torch.ones(10**6, dtype=dtype)
        short, long = (plan(noise_location="client", rounds=t) for t in (1, 10**6))
        short.check_resolution(model, rate)
        with pytest.raises(ValueError, match="so that its size would tell who answered"):
            long.check_resolution(model, rate)


# Whole rounds.


def noise_of_a_round(rate: float, **options: Any) -> float:
    """The deviation of r times what the round made of eight clients without gradients."""
    reports: list[RoundReport] = []
    strategy = DPFedAvg(
        plan(noise_location="client", **options),
        local_rate=rate,
        statistics="server",
        observers=[reports.append],
    )
    strategy.start(grid(noisy=True), state_of(START), num_rounds=1, timeout=20)
    (report,) = reports
    assert report.aggregate is not None
    return float(report.aggregate.double().std()) * strategy.privacy.cohort_size


@pytest.mark.parametrize("rate", [LR, 1e-4, 2e-6, 1e-6, 3e-7, 1e-7, 5e-8, 2e-8, 1e-9])
def test_at_every_rate_the_noise_is_right_or_refused(rate: float) -> None:
    """Weights from -1 to 1: the smallest share of the noise is η z C/√8 = 1.06 η."""
    try:
        found = noise_of_a_round(rate)
    except ValueError as error:
        assert f"local rate = {rate:g} is not allowed with noise at the clients" in str(error)
        assert rate < 1e-5
    else:
        # A share of the server's comes on top.
        assert found == pytest.approx(Z * C * math.sqrt(1 + 1 / 8), rel=0.02)
        assert rate > 1e-6


def test_noise_at_the_server_does_not_depend_on_the_rate() -> None:
    strategy = DPFedAvg(plan(), statistics="server", local_rate=1e-9)
    strategy.start(grid(), state_of(START), num_rounds=1, timeout=20)
    assert strategy.ledger.rounds == 1


def test_nobody_is_asked_where_the_last_round_s_rate_is_too_small() -> None:
    over = grid(noisy=True)
    strategy = DPFedAvg(
        plan(noise_location="client"), statistics="server", local_rate=LocalRate(1e-2, 0.05)
    )
    with pytest.raises(ValueError, match=r"local rate = 6\.25e-08 is not allowed with noise"):
        strategy.start(over, state_of(START), num_rounds=5, timeout=20)
    assert over.sent == []


@pytest.mark.parametrize(("coarse", "refused"), [("float32", True), ("float64", False)])
def test_the_coarsest_entry_of_a_model_decides(coarse: str, refused: bool) -> None:
    """Weights in float64 do not carry the noise of a bias that is rounded to float32."""
    over = grid(noisy=True)
    strategy = DPFedAvg(plan(noise_location="client"), statistics="server", local_rate=1e-8)
    start = ArrayRecord({"weight": Array(START), "bias": Array(np.ones(1, dtype=coarse))})
    with pytest.raises(ValueError, match="float32 weights of") if refused else nullcontext():
        strategy.start(over, start, num_rounds=1, timeout=20)
    assert bool(over.sent) != refused


def test_a_model_that_outgrows_the_noise_ends_the_run() -> None:
    over = grid(noisy=True, update=ones)
    strategy = DPFedAvg(
        plan(noise_location="client"),
        local_rate=1e-4,
        statistics="server",
        server_step=ServerStep(server_lr=1e9),
    )
    with pytest.raises(ValueError, match=r"local rate = 0\.0001 is not allowed with noise"):
        strategy.start(over, state_of(START), num_rounds=5, timeout=20)
    assert strategy.ledger.rounds == 1
    assert len(over.sent) <= CLIENTS


# Configurations.

RECIPE: dict[str, Any] = {
    "algorithm": "dp-fedavg",
    "task": "digits",
    "model": "mlp-8",
    "clip-norm": 1.0,
    "noise-multiplier": 1.0,
    "noise-location": "client",
}


@pytest.mark.parametrize(
    "options",
    [
        {"local-lr": 1e-8},
        {"local-lr-decay": 0.1},
        {"local-lr-decay": 1e-3, "num-server-rounds": 10},
    ],
)
def test_a_recipe_is_refused_before_it_starts(tmp_path: Path, options: dict[str, Any]) -> None:
    config = make_config({**RECIPE, **options, "output-dir": str(tmp_path / "run")})
    with pytest.raises(ConfigError, match=r"local rate = .* is not allowed") as caught:
        prepare(config)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()
    for instead in ({"noise-location": "server"}, {"dtype": "float64", "local-lr-decay": 0.5}):
        prepare(config.model_copy(update={k.replace("-", "_"): v for k, v in instead.items()}))


def test_a_decay_is_judged_by_the_rate_that_it_ends_with(tmp_path: Path) -> None:
    """Weights of up to 1.7 are 1.2e-7 apart, and noise is 0.32 times the rate."""
    decay = {"local-lr": 1e-2, "local-lr-decay": 0.1, "output-dir": str(tmp_path / "run")}
    prepare(make_config({**RECIPE, **decay, "num-server-rounds": 4}))
    with pytest.raises(ConfigError, match=r"local rate = 1e-06 is not allowed"):
        prepare(make_config({**RECIPE, **decay, "num-server-rounds": 5}))
