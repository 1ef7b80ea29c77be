"""A threshold that follows a quantile of the updates' lengths, and what it costs."""

import math
from typing import Any

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting.rdp import RdpAccountant
from memory_grid import MemoryGrid
from noised_rounds import LR, START, WITHIN, C, D, grid, state_of
from test_noise_record import dense

from blackthorn.strategies import (
    ClipNorm,
    DPFedAvg,
    DPNormFedAvg,
    FullParticipation,
    PoissonParticipation,
    PrivacyPlan,
    RotatingParticipation,
    RoundContext,
    RoundReport,
    calibrated,
)
from blackthorn.strategies.adaptive_threshold import (
    AdaptiveThreshold,
    Threshold,
    count_deviation,
    update_multiplier,
)
from blackthorn.strategies.local_rule import LocalRule
from blackthorn.strategies.noise import SystemRandomness
from blackthorn.strategies.private_averaging import PrivateAveraging

Z = 0.5
CLIENTS = 8


def plan(**options: Any) -> PrivacyPlan:
    values: dict[str, Any] = {
        "clip_norm": ClipNorm(C),
        "noise_multiplier": Z,
        "num_clients": CLIENTS,
        "rounds": 6,
        "participation": FullParticipation(),
        "adaptive": AdaptiveThreshold(),
    }
    return PrivacyPlan(**{**values, **options})


@pytest.mark.parametrize(("z", "r"), [(0.5, 8), (2.0, 60), (3.9, 60), (1.0, 1000)])
def test_updates_and_count_together_cost_what_is_charged(z: float, r: float) -> None:
    """By another library, each as a Gaussian of its own: a client moves the count by 1/2."""

    def epsilon(*multipliers: float) -> float:
        accountant = RdpAccountant([1 + x / 10 for x in range(1, 100)])
        for multiplier in multipliers:
            accountant.compose(dp_accounting.GaussianDpEvent(multiplier), 10)
        return float(accountant.get_epsilon(1e-5))

    both = epsilon(update_multiplier(z, r), (r / 20) / 0.5)
    assert both == pytest.approx(epsilon(z), rel=1e-9)
    assert epsilon(z, (r / 20) / 0.5) > epsilon(z) * (1 + 1e-5)


def test_the_charge_is_that_of_z_alone() -> None:
    assert plan().figure() == plan(adaptive=None).figure()
    assert calibrated(plan(num_clients=100), 3.0).noise_multiplier == pytest.approx(
        calibrated(plan(num_clients=100, adaptive=None), 3.0).noise_multiplier
    )


def of_a_run(strategy: DPFedAvg, over: MemoryGrid, rounds: int = 6) -> list[RoundReport]:
    reports: list[RoundReport] = []
    strategy._observers.append(reports.append)
    strategy.start(over, state_of(START), num_rounds=rounds, timeout=20)
    return reports


def update_of(length: float) -> Any:
    return lambda w: np.full_like(w, length / math.sqrt(len(w)))


@pytest.mark.parametrize("units", ["gradient", "parameter"])
def test_the_noise_of_every_round_is_that_of_its_own_threshold(units: Any) -> None:
    clip_norm = ClipNorm(C if units == "gradient" else C * LR, units)
    strategy = DPFedAvg(plan(clip_norm=clip_norm), local_rate=LR, statistics="server")
    reports = of_a_run(strategy, grid(update=update_of(1e-9)))
    multiplier = update_multiplier(Z, CLIENTS)
    assert multiplier > 1.2 * Z
    threshold = clip_norm.value
    for report in reports:
        assert report.aggregate is not None
        assert report.told["clip_norm"] == pytest.approx(threshold, rel=1e-12)
        deviation = multiplier * threshold / clip_norm.scale(LR) / CLIENTS
        assert report.aggregate.std().item() == pytest.approx(deviation, rel=WITHIN)
        threshold = strategy._threshold.clip_norm.value if report is reports[-1] else _next(report)
        # All eight are below it: b~ is 1, with noise of 1/20.
    assert clip_norm.value * math.exp(-0.2 * 6) < threshold < clip_norm.value


def _next(report: RoundReport) -> float:
    return float(report.told["clip_norm"] * math.exp(-0.2 * (_SHARES[report.server_round] - 0.5)))


_SHARES: dict[int, float] = {}


@pytest.fixture(autouse=True)
def shares(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """b~ of every round that a threshold was moved by."""
    _SHARES.clear()
    real = Threshold.follow

    def follow(threshold: Threshold, share: torch.Tensor) -> None:
        if len(share):
            _SHARES[len(_SHARES) + 1] = float(share[0])
        real(threshold, share)

    monkeypatch.setattr(Threshold, "follow", follow)
    return _SHARES


@pytest.mark.parametrize(("length", "share"), [(0.9, 1.0), (1.1, 0.0)])
def test_the_count_is_of_the_updates_before_they_are_clipped(
    length: float, share: float, shares: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients shorten to twice the threshold what is longer, so that the server sees it."""
    strategy = DPFedAvg(plan(), local_rate=LR, statistics="server")
    rules: list[Any] = []
    real = PrivateAveraging.local_rule

    def seen(strategy: PrivateAveraging, context: RoundContext) -> LocalRule:
        rules.append(real(strategy, context))
        return rules[-1]

    monkeypatch.setattr(PrivateAveraging, "local_rule", seen)
    (report,) = of_a_run(strategy, grid(update=update_of(length * C)), rounds=1)
    assert rules[0].bound == 2 * C
    assert shares[1] == pytest.approx(share, abs=6 / 20)
    assert report.over_bound == []


def test_the_count_s_noise_is_what_is_charged() -> None:
    threshold = Threshold(ClipNorm(1.0), AdaptiveThreshold(), 40.0)
    updates = torch.tensor([[0.5], [0.6], [3.0], [math.inf], [math.nan]])
    drawn = np.array(
        [float(threshold.noised_share(updates, 1.0, SystemRandomness())[0]) for _ in range(3000)]
    )
    # Two below and three not, of forty.
    assert drawn.mean() == pytest.approx(0.5 - 0.5 / 40, abs=6 * 0.05 / math.sqrt(3000))
    assert drawn.std() == pytest.approx(count_deviation(40.0) / 40, rel=0.08)


@pytest.mark.parametrize("start", [0.1, 100.0])
@pytest.mark.parametrize("quantile", [0.3, 0.5])
def test_it_finds_the_quantile_from_anywhere(start: float, quantile: float) -> None:
    generator = np.random.default_rng(7)
    threshold = Threshold(ClipNorm(start), AdaptiveThreshold(quantile), 60.0)
    path = []
    for _ in range(150):
        lengths = np.exp(generator.normal(size=(60, 1)))
        share = threshold.noised_share(
            torch.from_numpy(lengths), threshold.clip_norm.value, SystemRandomness()
        )
        threshold.follow(share)
        path.append(threshold.clip_norm.value)
    truth = math.exp({0.3: -0.5244, 0.5: 0.0}[quantile])
    assert np.exp(np.log(path[-50:]).mean()) == pytest.approx(truth, rel=0.1)


def test_where_clients_take_turns_the_noise_goes_with_the_threshold(
    shares: dict[int, float],
) -> None:
    """Whatever it is in a round: in its units the noise is that of a fixed one."""
    turns = {"participation": RotatingParticipation(2), "bands": 2, "noise_multiplier": 0.3}
    strategy = DPFedAvg(plan(**turns), local_rate=LR, statistics="server")
    reports = of_a_run(strategy, grid(update=update_of(1e-9)))
    scaled = [
        report.aggregate.double().numpy() * (CLIENTS / 2) / report.told["clip_norm"]
        for report in reports
        if report.aggregate is not None
    ]
    assert len({report.told["clip_norm"] for report in reports}) == 6 == len(shares)
    fresh = dense(2, 6) @ np.stack(scaled)
    np.testing.assert_allclose(fresh.std(axis=1), update_multiplier(0.3, CLIENTS / 2), rtol=WITHIN)
    assert abs(np.corrcoef(fresh) - np.eye(6)).max() < 5 / math.sqrt(D)


def test_a_state_has_the_threshold() -> None:
    first = DPFedAvg(plan(), local_rate=LR, statistics="server")
    of_a_run(first, grid(), rounds=2)
    second = DPFedAvg(plan(), local_rate=LR, statistics="server")
    second.restore_own({**first.own_values(), "ledger": second.ledger.mark()})
    assert second.clip_bound(LR) == first.clip_bound(LR) != C


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"noise_location": "client"}, "noise_location = client is not allowed with an adaptive"),
        ({"noise_multiplier": 0.81}, "a cohort of 8 is too small for an adaptive threshold"),
        (
            {"participation": PoissonParticipation(0.5), "noise_multiplier": 0.41},
            "above 4.1 clients a round",
        ),
    ],
)
def test_where_nobody_can_count_it_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DPFedAvg(plan(**options), local_rate=LR)


def test_updates_of_one_length_have_no_quantile() -> None:
    with pytest.raises(ValueError, match="normalised updates"):
        DPNormFedAvg(plan(), local_rate=LR)


@pytest.mark.parametrize("quantile", [0.0, 1.0, math.nan])
def test_a_quantile_is_between_0_and_1(quantile: float) -> None:
    with pytest.raises(ValueError, match="quantile = "):
        AdaptiveThreshold(quantile)
