"""What reaches the model has the variance that the ledger charges, whoever fails to answer."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord
from memory_grid import MemoryGrid, silence
from noised_rounds import (
    CLIENTS,
    COHORTS,
    FAILING,
    LR,
    START,
    WITHIN,
    C,
    D,
    Z,
    choose,
    contribution,
    faint,
    grid,
    moved,
    ones,
    plan,
    state_of,
    weights,
)

from blackthorn.strategies import (
    ClipNorm,
    DPFedAvg,
    DPNormFedAvg,
    FixedParticipation,
    FullParticipation,
    PoissonParticipation,
    RoundContext,
    RoundReport,
    ServerStep,
)
from blackthorn.strategies.bounded_update import ClipUpdate
from blackthorn.strategies.private_averaging import PrivateAveraging

EVERYBODY = range(10, 10 + CLIENTS)


def due(location: str) -> float:
    """The noise's deviation: z C, and with noise at the clients a share of the server's besides."""
    return Z * C * math.sqrt(1 + (location == "client") / CLIENTS)


@FAILING
@COHORTS
@pytest.mark.parametrize("location", ["server", "client"])
def test_the_noise_is_what_the_ledger_charges(
    location: str, failing: int, cohort: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """r = q m = 4: the cohorts are larger and smaller, and the sum's noise is the same for all."""
    strategy = DPFedAvg(plan(noise_location=location), local_rate=LR, statistics="server")
    choose(monkeypatch, cohort)
    found = moved(strategy, grid(failing, noisy=location == "client"))
    ((release, count),) = strategy.ledger.charges
    assert count == 1
    assert release.noise_multiplier == pytest.approx(Z, rel=1e-12)
    assert release.sample_rate == 0.5
    assert found.std() == pytest.approx(due(location), rel=WITHIN)
    assert abs(found.mean()) < 6 * Z * C / math.sqrt(D)


@pytest.mark.parametrize("location", ["server", "client"])
@pytest.mark.parametrize("failing", [0, 3])
def test_without_a_claim_the_sum_may_be_divided_by_the_number_of_replies(
    location: str, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zhang et al.: every update is one vector of ones, clipped to C, and so is their mean."""
    unclaimed = plan(noise_location=location, claim=False, noise_multiplier=1e-5)
    options: dict[str, Any] = {"local_rate": LR, "statistics": "server"}
    strategy = DPFedAvg(unclaimed, denominator="replies", **options)
    choose(monkeypatch, EVERYBODY)
    found = moved(strategy, grid(failing, update=ones))
    r = 4  # by which `moved` multiplies
    assert found.mean() == pytest.approx(r * C / math.sqrt(D), rel=1e-3)
    fixed = DPFedAvg(unclaimed, **options)
    by_r = moved(fixed, grid(failing, update=ones)).mean()
    assert by_r == pytest.approx((CLIENTS - failing) * C / math.sqrt(D), rel=1e-3)


def test_divided_by_replies_nothing_is_claimed_and_no_reply_is_no_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ValueError, match="denominator = replies breaks the claim"):
        DPFedAvg(plan(), local_rate=LR, denominator="replies")
    strategy = DPFedAvg(
        plan(claim=False), local_rate=LR, statistics="server", denominator="replies"
    )
    choose(monkeypatch, EVERYBODY)
    assert np.abs(moved(strategy, grid(CLIENTS))).max() < 1e-5  # of the start in float32


@pytest.mark.parametrize("claim", [True, False])
@pytest.mark.parametrize("failing", [1, CLIENTS])
def test_without_top_up_nothing_is_claimed(
    claim: bool, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The noise would be that of the clients that answer: with one it is there, without it not."""
    if claim:
        with pytest.raises(ValueError, match="top_up = False breaks the claim"):
            plan(noise_location="client", top_up=False)
        return
    strategy = DPFedAvg(
        plan(noise_location="client", top_up=False, claim=False), local_rate=LR, statistics="server"
    )
    choose(monkeypatch, EVERYBODY)
    found = moved(strategy, grid(failing, noisy=True))
    left = math.sqrt((CLIENTS - failing) / CLIENTS)
    assert found.std() == pytest.approx(Z * C * left, rel=WITHIN, abs=1e-5)
    assert (strategy.figure(), strategy.local_figure()) == (None, None)
    assert strategy.ledger.charges == []


@pytest.mark.parametrize(
    "options",
    [
        {"participation": FixedParticipation(3)},
        {"participation": FixedParticipation(3), "neighbours": "replace-one"},
        {"participation": FullParticipation(), "neighbours": "zero-out"},
    ],
)
def test_without_top_up_nothing_is_claimed_whoever_the_neighbours_are(
    options: dict[str, Any],
) -> None:
    assert plan(noise_location="client", **options).claim
    assert plan(noise_location="server", top_up=False, **options).claim
    with pytest.raises(ValueError, match="top_up = False breaks the claim"):
        plan(noise_location="client", top_up=False, **options)


@pytest.mark.parametrize("location", ["server", "client"])
def test_an_empty_cohort_is_noised_and_charged(
    location: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = DPFedAvg(plan(noise_location=location), local_rate=LR, statistics="server")
    choose(monkeypatch, [])
    over = grid()
    found = moved(strategy, over, rounds=2) / math.sqrt(2)
    assert over.sent == []
    assert strategy.ledger.charges == [(plan(noise_location=location).release(), 2)]
    assert found.std() == pytest.approx(due(location), rel=WITHIN)


@pytest.mark.parametrize("location", ["server", "client"])
def test_a_round_nobody_answers_is_noised_and_charged(
    location: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = DPFedAvg(plan(noise_location=location), local_rate=LR, statistics="server")
    choose(monkeypatch, [10, 11])
    nodes = dict.fromkeys(range(10, 18), silence)
    result = strategy.start(MemoryGrid(nodes), state_of(START), num_rounds=1, timeout=0.1)
    found = (START - weights(result.arrays)) / LR * 4
    assert strategy.ledger.rounds == 1
    assert found.std() == pytest.approx(due(location), rel=WITHIN)


def test_poisson_rounds_of_every_size_have_the_same_noise() -> None:
    """Noise that followed the cohort would be as telling as a head count."""
    for location in ("server", "client"):
        sizes: dict[int, list[float]] = {}

        def observe(report: RoundReport, sizes: dict[int, list[float]] = sizes) -> None:
            if report.aggregate is not None:
                spread = float(report.aggregate.double().std()) * 4
                sizes.setdefault(len(report.invited), []).append(spread)

        strategy = DPFedAvg(
            plan(noise_location=location, rounds=12),
            local_rate=LR,
            statistics="server",
            observers=[observe],
        )
        moved(strategy, grid(noisy=location == "client"), rounds=12)
        assert len(sizes) > 1
        for found in sizes.values():
            assert found == pytest.approx([due(location)] * len(found), rel=WITHIN)


@pytest.mark.parametrize(
    ("participation", "denominator"),
    [(PoissonParticipation(0.25), 2.0), (FixedParticipation(3), 3.0), (FullParticipation(), 8.0)],
)
def test_the_denominator_is_fixed(
    participation: Any, denominator: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = DPFedAvg(plan(participation=participation), local_rate=LR, statistics="server")
    choose(monkeypatch, [10, 11])
    result = strategy.start(grid(failing=1), state_of(START), num_rounds=1, timeout=20)
    found = (START - weights(result.arrays)) / LR
    assert found.std() == pytest.approx(Z * C / denominator, rel=WITHIN)


@pytest.mark.parametrize("kind", [DPFedAvg, DPNormFedAvg])
@pytest.mark.parametrize("factor", [1.0, 1e6])
def test_a_client_that_returns_its_model_unclipped_is_clipped(
    kind: type[PrivateAveraging], factor: float
) -> None:
    found = contribution(kind, lambda w: factor * ones(w))
    assert np.linalg.norm(found) == pytest.approx(CLIENTS * C, rel=1e-3)
    np.testing.assert_allclose(found, CLIENTS * C / math.sqrt(D), rtol=1e-2)


def test_short_updates_are_left_alone_or_stretched() -> None:
    length = 1e-3 * math.sqrt(D)
    assert length < C
    clipped = contribution(DPFedAvg, faint)
    assert np.linalg.norm(clipped) == pytest.approx(CLIENTS * length, rel=1e-3)
    stretched = contribution(DPNormFedAvg, faint)
    assert np.linalg.norm(stretched) == pytest.approx(CLIENTS * C, rel=1e-3)


@pytest.mark.parametrize("kind", [DPFedAvg, DPNormFedAvg])
def test_a_zero_update_contributes_zero_and_is_charged(
    kind: type[PrivateAveraging], monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = kind(
        plan(participation=PoissonParticipation(1.0)), local_rate=LR, statistics="server"
    )

    def no_noise(_: PrivateAveraging, share: float, context: RoundContext) -> torch.Tensor:
        del share
        return torch.zeros_like(context.model, dtype=torch.float64)

    monkeypatch.setattr(PrivateAveraging, "_noise", no_noise)
    assert np.abs(moved(strategy, grid())).max() < 1e-4
    assert strategy.ledger.rounds == 1


@pytest.mark.parametrize("location", ["server", "client"])
def test_counters_and_statistics_stay_the_servers(location: str) -> None:
    """An integer buffer of 10^9 must enter neither the norm nor the model."""
    strategy = DPFedAvg(
        plan(participation=PoissonParticipation(1.0), noise_location=location),
        local_rate=LR,
        statistics="server",
    )
    result = strategy.start(grid(noisy=location == "client"), state_of(START), num_rounds=2)
    assert result.arrays["norm.num_batches_tracked"].numpy() == 40
    np.testing.assert_array_equal(result.arrays["norm.running_mean"].numpy(), [5, 5, 5])
    found = (START - weights(result.arrays)) / LR * CLIENTS / math.sqrt(2)
    assert found.std() == pytest.approx(due(location), rel=WITHIN)


def test_parameter_units_are_ce_fedavgs() -> None:
    """‖Δ_i‖ ≤ c: in gradient units the bound, and with it the noise, is c/η_l."""
    strategy = DPFedAvg(
        plan(clip_norm=ClipNorm(C, "parameter")), local_rate=LR, statistics="server"
    )
    found = moved(strategy, grid())
    assert found.std() == pytest.approx(Z * C / LR, rel=WITHIN)
    assert strategy.ledger.charges == [(plan().release(), 1)]


def test_momentum_is_post_processing() -> None:
    """v_2 = 0.8 v_1 + a_2: the second round is charged like the first."""
    strategy = DPFedAvg(
        plan(), local_rate=LR, statistics="server", server_step=ServerStep(momentum=0.8)
    )
    found = moved(strategy, grid(), rounds=2)
    assert strategy.ledger.charges == [(plan().release(), 2)]
    assert found.std() == pytest.approx(Z * C * math.sqrt(1 + 1.8**2), rel=WITHIN)


def test_a_noised_message_cannot_be_absurdly_long() -> None:
    """The server cannot clip what is noise, but 10^6 times C is not noise."""
    strategy = DPFedAvg(
        plan(participation=PoissonParticipation(1.0), noise_location="client"),
        local_rate=LR,
        statistics="server",
    )
    found = moved(strategy, grid(noisy=True, update=lambda w: 1e6 * ones(w)))
    share = Z * C / math.sqrt(CLIENTS)
    assert np.linalg.norm(found) < CLIENTS * (C + share * (math.sqrt(D) + 10))


# What float32 cannot bound, and what is released once.


@pytest.mark.parametrize("kind", [DPFedAvg, DPNormFedAvg])
@pytest.mark.parametrize(
    ("clip_norm", "rate", "said"),
    [
        (ClipNorm(1e-20), 1e-20, "clip_norm in parameter units at local rate 1e-20 = 1e-40"),
        (ClipNorm(1e-20, "parameter"), 1e20, "clip_norm in gradient units at local rate 1e"),
        (ClipNorm(1e20, "parameter"), 1e-20, "clip_norm in gradient units at local rate 1e"),
        (ClipNorm(1.0), 1e-39, "local rate = 1e-39"),
        (ClipNorm(1.0), math.nan, "local rate = nan"),
    ],
)
def test_a_threshold_that_float32_cannot_hold_is_refused(
    kind: type[PrivateAveraging], clip_norm: ClipNorm, rate: float, said: str
) -> None:
    """Rows longer than C would be charged as bounded, and rows beyond all numbers skip a round."""
    with pytest.raises(ValueError) as refused:
        kind(plan(clip_norm=clip_norm), local_rate=rate)
    assert str(refused.value).startswith(said)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_row_that_does_not_stay_finite_leaves_the_round_its_noise(
    value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the model that stays as it was would tell who was there."""
    real = ClipUpdate.constrain

    def overflowing(updates: torch.Tensor, bound: float) -> torch.Tensor:
        bounded = real(updates, bound)
        bounded[0, 0] = value
        return bounded

    monkeypatch.setattr(ClipUpdate, "constrain", overflowing)
    everybody = plan(participation=FullParticipation())
    strategy = DPFedAvg(
        everybody, local_rate=LR, statistics="server", num_clients=CLIENTS, start_timeout=2.0
    )
    total = moved(strategy, grid(update=np.ones_like))
    # All others' rows count: C in all directions alike.
    share = (CLIENTS - 1) * C / math.sqrt(D)
    assert total.mean() == pytest.approx(share, abs=6 * Z * C / math.sqrt(D))
    assert total.std() == pytest.approx(Z * C, rel=WITHIN)
    assert strategy.ledger.rounds == 1


@pytest.mark.parametrize("location", ["server", "client"])
@pytest.mark.parametrize("kind", [DPFedAvg, DPNormFedAvg])
def test_a_broadcast_is_released_once(kind: type[PrivateAveraging], location: str) -> None:
    """A second release has the same cohort and the same noise of the clients, less who was left
    out: their difference shows that client with a share of the noise that is charged."""
    strategy = kind(
        plan(noise_location=location, rounds=3),
        local_rate=LR,
        statistics="server",
        num_clients=CLIENTS,
        start_timeout=2.0,
    )
    arrays, seen = state_of(START), grid(noisy=location == "client")
    for server_round in (1, 2):
        messages = list(strategy.configure_train(server_round, arrays, ConfigRecord(), seen))
        received = list(seen.send_and_receive(messages))
        released, _ = strategy.aggregate_train(server_round, received)
        assert released is not None
        with pytest.raises(RuntimeError, match=f"round {server_round} has been released"):
            strategy.aggregate_train(server_round, received[1:])
        assert strategy.ledger.rounds == server_round
        again = strategy.state().arrays["model"]
        arrays = released
        assert np.array_equal(again, weights(arrays).astype(again.dtype))


def test_the_last_broadcast_of_a_run_is_not_released_again() -> None:
    strategy = DPFedAvg(
        plan(), local_rate=LR, statistics="server", num_clients=CLIENTS, start_timeout=2.0
    )
    strategy.start(grid(), state_of(START), num_rounds=1)
    with pytest.raises(RuntimeError, match="round 1 has been released"):
        strategy.aggregate_train(1, [])
    assert strategy.ledger.rounds == 1


@pytest.mark.parametrize(("length", "seen"), [(0.0, False), (2.0, True)])
def test_signal_and_noise_are_told_of_what_was_released(length: float, seen: bool) -> None:
    """Of eight equal updates of length C; without any it is 0, as noise alone tells nothing."""
    strategy = DPFedAvg(
        # By a seed: one draw in forty is longer than what noise alone tells.
        plan(
            participation=FullParticipation(), noise_multiplier=0.02, claim=False, insecure_seed=3
        ),
        local_rate=LR,
        statistics="server",
    )
    reports: list[RoundReport] = []
    strategy._observers.append(reports.append)
    update = lambda w: np.full_like(w, length / math.sqrt(len(w)))  # noqa: E731
    strategy.start(grid(update=update), state_of(START), num_rounds=1, timeout=20)
    (report,) = reports
    noise = 0.02 * C * math.sqrt(D) / CLIENTS
    assert report.told["noise_norm"] == pytest.approx(noise, rel=1e-9)
    expected = length / noise if seen else 0.0
    assert report.told["signal_to_noise"] == pytest.approx(expected, rel=0.02)
