"""What reaches the model has the variance that the ledger charges, whoever fails to answer."""

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from memory_grid import ONE_APP_AT_A_TIME, Answer, MemoryGrid, silence

from blackthorn.client_app.messages import read_round
from blackthorn.client_app.private_update import noised_models
from blackthorn.settings.config import make_config
from blackthorn.strategies import (
    ClipNorm,
    CohortPlan,
    DPFedAvg,
    DPNormFedAvg,
    FixedParticipation,
    FullParticipation,
    PoissonParticipation,
    PrivacyPlan,
    RageFilter,
    RoundContext,
    RoundReport,
    ServerStep,
    spent,
)
from blackthorn.strategies.attestation import SentRule
from blackthorn.strategies.corruption import CorruptionBound
from blackthorn.strategies.ledger import read_charges
from blackthorn.strategies.private_averaging import PrivateAveraging

D = 30_000
Z, C, LR = 1.5, 2.0, 0.25
# The standard deviation of 30 000 normal numbers is known to 0.4 %: six times that.
WITHIN = 0.025
CLIENTS = 8


def state_of(w: np.ndarray, mark: int = 0) -> ArrayRecord:
    """Weights, BatchNorm's statistics and its integer counter."""
    return ArrayRecord(
        {
            "weight": Array(w.astype(np.float32)),
            "norm.running_mean": Array(np.full(3, 5 + 1000 * mark, dtype=np.float32)),
            "norm.num_batches_tracked": Array(np.array(40 + 10**9 * mark, dtype=np.int64)),
        }
    )


def weights(arrays: ArrayRecord) -> np.ndarray:
    return arrays["weight"].numpy().astype(np.float64)


START = np.linspace(-1, 1, D)


def replies(update: Callable[[np.ndarray], np.ndarray], noisy: bool, client: int) -> Answer:
    """A node whose gradient-unit update is `update(w)`, with its share of the noise if `noisy`.

    It attests the round's rule either way.
    """
    config = make_config(
        {
            "algorithm": "dp-fedavg",
            "clip-norm": C,
            "noise-multiplier": Z,
            "noise-location": "client",
            "num-clients": CLIENTS,
        }
    )

    def answer(message: Message) -> Message:
        request = read_round(message)
        with ONE_APP_AT_A_TIME:
            w = request.arrays["weight"].numpy().astype(np.float64)
        local = torch.from_numpy(w - request.local_lr * update(w))[None]
        if noisy:
            local = noised_models(config, torch.from_numpy(w), local, [request], [client])
        metrics = MetricRecord({"num-examples": 7, "train-loss": 123.0})
        arrays = state_of(local[0].numpy(), mark=client + 1)
        attested = request.attestation
        content = RecordDict({"arrays": arrays, "metrics": metrics, "attested": attested})
        return Message(content, reply_to=message)

    return answer


def nothing(w: np.ndarray) -> np.ndarray:
    return np.zeros_like(w)


def refuses(message: Message) -> Message:
    del message
    raise RuntimeError("this client is broken")


def grid(
    failing: int = 0,
    noisy: bool = False,
    update: Callable[[np.ndarray], np.ndarray] = nothing,
    failure: Answer = refuses,
) -> MemoryGrid:
    nodes: Mapping[int, Answer] = {
        10 + i: failure if i < failing else replies(update, noisy, i) for i in range(CLIENTS)
    }
    return MemoryGrid(nodes)


class Chosen(DPFedAvg):
    """DP-FedAvg with the cohort in the test's hands."""

    cohort: Sequence[int] | None = None

    def draw_cohort(self, clients: Sequence[int], context: RoundContext) -> CohortPlan:
        drawn = super().draw_cohort(clients, context)
        return drawn if self.cohort is None else CohortPlan.of(self.cohort)


def plan(**options: Any) -> PrivacyPlan:
    return PrivacyPlan(
        **{
            "clip_norm": ClipNorm(C),
            "noise_multiplier": Z,
            "num_clients": CLIENTS,
            "rounds": 5,
            "participation": PoissonParticipation(0.5),
            **options,
        }
    )


def moved(strategy: PrivateAveraging, over: MemoryGrid, rounds: int = 1) -> np.ndarray:
    """What one run added to the model, in units of the noised sum: r Δw / (η_g η_l)."""
    result = strategy.start(over, state_of(START), num_rounds=rounds, timeout=20)
    return (START - weights(result.arrays)) / LR * strategy.privacy.cohort_size


FAILING = pytest.mark.parametrize("failing", [0, 1, CLIENTS // 2])
COHORTS = pytest.mark.parametrize(
    "cohort", [range(10, 10 + CLIENTS), [10, 17], [17]], ids=["all", "two", "one"]
)


@FAILING
@COHORTS
@pytest.mark.parametrize("location", ["server", "client"])
def test_the_noise_is_what_the_ledger_charges(
    location: str, failing: int, cohort: Sequence[int]
) -> None:
    """r = q m = 4: the cohorts are larger and smaller, and the sum's noise is (z C)² for all."""
    strategy = Chosen(plan(noise_location=location), local_rate=LR)
    strategy.cohort = cohort
    found = moved(strategy, grid(failing, noisy=location == "client"))
    ((release, count),) = strategy.ledger.charges
    assert count == 1
    assert release.noise_multiplier == pytest.approx(Z, rel=1e-12)
    assert release.sample_rate == 0.5
    assert found.std() == pytest.approx(release.noise_multiplier * C, rel=WITHIN)
    assert abs(found.mean()) < 6 * Z * C / math.sqrt(D)


@pytest.mark.parametrize("claim", [True, False])
@pytest.mark.parametrize("failing", [1, CLIENTS])
def test_without_top_up_nothing_is_claimed(claim: bool, failing: int) -> None:
    """The noise would be that of the clients that answer: with one it is there, without it not."""
    if claim:
        with pytest.raises(ValueError, match="top_up = False breaks the claim"):
            plan(noise_location="client", top_up=False)
        return
    strategy = Chosen(plan(noise_location="client", top_up=False, claim=False), local_rate=LR)
    strategy.cohort = range(10, 10 + CLIENTS)
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
def test_an_empty_cohort_is_noised_and_charged(location: str) -> None:
    strategy = Chosen(plan(noise_location=location), local_rate=LR)
    strategy.cohort = []
    over = grid()
    found = moved(strategy, over, rounds=2) / math.sqrt(2)
    assert over.sent == []
    assert strategy.ledger.charges == [(plan(noise_location=location).release(), 2)]
    assert found.std() == pytest.approx(Z * C, rel=WITHIN)


@pytest.mark.parametrize("location", ["server", "client"])
def test_a_round_nobody_answers_is_noised_and_charged(location: str) -> None:
    strategy = Chosen(plan(noise_location=location), local_rate=LR)
    strategy.cohort = [10, 11]
    nodes = dict.fromkeys(range(10, 18), silence)
    result = strategy.start(MemoryGrid(nodes), state_of(START), num_rounds=1, timeout=0.1)
    found = (START - weights(result.arrays)) / LR * 4
    assert strategy.ledger.rounds == 1
    assert found.std() == pytest.approx(Z * C, rel=WITHIN)


def test_poisson_rounds_of_every_size_have_the_same_noise() -> None:
    """Noise that followed the cohort would be as telling as a head count."""
    for location in ("server", "client"):
        sizes: dict[int, list[float]] = {}

        def observe(report: RoundReport, sizes: dict[int, list[float]] = sizes) -> None:
            if report.aggregate is not None:
                spread = float(report.aggregate.double().std()) * 4
                sizes.setdefault(len(report.invited), []).append(spread)

        strategy = DPFedAvg(
            plan(noise_location=location, rounds=12), local_rate=LR, observers=[observe]
        )
        moved(strategy, grid(noisy=location == "client"), rounds=12)
        assert len(sizes) > 1
        for found in sizes.values():
            assert found == pytest.approx([Z * C] * len(found), rel=WITHIN)


@pytest.mark.parametrize(
    ("participation", "denominator"),
    [(PoissonParticipation(0.25), 2.0), (FixedParticipation(3), 3.0), (FullParticipation(), 8.0)],
)
def test_the_denominator_is_fixed(participation: Any, denominator: float) -> None:
    strategy = Chosen(plan(participation=participation), local_rate=LR)
    strategy.cohort = [10, 11]
    result = strategy.start(grid(failing=1), state_of(START), num_rounds=1, timeout=20)
    found = (START - weights(result.arrays)) / LR
    assert found.std() == pytest.approx(Z * C / denominator, rel=WITHIN)


# Contributions.

SMALL = 1e-7


def contribution(
    kind: type[PrivateAveraging], update: Callable[[np.ndarray], np.ndarray], **options: Any
) -> np.ndarray:
    """The sum of the eight clients' g_i, almost without noise."""
    strategy = kind(
        plan(participation=PoissonParticipation(1.0), noise_multiplier=SMALL, **options),
        local_rate=LR,
    )
    return moved(strategy, grid(update=update))


def ones(w: np.ndarray) -> np.ndarray:
    return np.ones_like(w)


def faint(w: np.ndarray) -> np.ndarray:
    return np.full_like(w, 1e-3)


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
def test_a_zero_update_contributes_zero_and_is_charged(kind: type[PrivateAveraging]) -> None:
    strategy = kind(
        plan(participation=PoissonParticipation(1.0), noise_multiplier=SMALL), local_rate=LR
    )
    assert np.abs(moved(strategy, grid())).max() < 1e-4
    assert strategy.ledger.rounds == 1


@pytest.mark.parametrize("location", ["server", "client"])
def test_counters_and_statistics_stay_the_servers(location: str) -> None:
    """An integer buffer of 10^9 must enter neither the norm nor the model."""
    strategy = DPFedAvg(
        plan(participation=PoissonParticipation(1.0), noise_location=location), local_rate=LR
    )
    result = strategy.start(grid(noisy=location == "client"), state_of(START), num_rounds=2)
    assert result.arrays["norm.num_batches_tracked"].numpy() == 40
    np.testing.assert_array_equal(result.arrays["norm.running_mean"].numpy(), [5, 5, 5])
    found = (START - weights(result.arrays)) / LR * CLIENTS / math.sqrt(2)
    assert found.std() == pytest.approx(Z * C, rel=WITHIN)


def test_parameter_units_are_ce_fedavgs() -> None:
    """‖Δ_i‖ ≤ c: in gradient units the bound, and with it the noise, is c/η_l."""
    strategy = DPFedAvg(plan(clip_norm=ClipNorm(C, "parameter")), local_rate=LR)
    found = moved(strategy, grid())
    assert found.std() == pytest.approx(Z * C / LR, rel=WITHIN)
    assert strategy.ledger.charges == [(plan().release(), 1)]


def test_momentum_is_post_processing() -> None:
    """v_2 = 0.8 v_1 + a_2: the second round is charged like the first."""
    strategy = DPFedAvg(plan(), local_rate=LR, server_step=ServerStep(momentum=0.8))
    found = moved(strategy, grid(), rounds=2)
    assert strategy.ledger.charges == [(plan().release(), 2)]
    assert found.std() == pytest.approx(Z * C * math.sqrt(1 + 1.8**2), rel=WITHIN)


def test_a_noised_message_cannot_be_absurdly_long() -> None:
    """The server cannot clip what is noise, but 10^6 times C is not noise."""
    strategy = DPFedAvg(
        plan(participation=PoissonParticipation(1.0), noise_location="client"), local_rate=LR
    )
    found = moved(strategy, grid(noisy=True, update=lambda w: 1e6 * ones(w)))
    share = Z * C / math.sqrt(CLIENTS)
    assert np.linalg.norm(found) < CLIENTS * (C + share * (math.sqrt(D) + 10))


# Budget and ledger.


def test_max_epsilon_stops_before_the_round_that_would_pass_it(tmp_path: Path) -> None:
    one, two, three = (spent([(plan().release(), n)], 1e-5).epsilon for n in (1, 2, 3))
    limit = (two + three) / 2
    strategy = DPFedAvg(plan(max_epsilon=limit), local_rate=LR, ledger=tmp_path / "ledger.json")
    seen: list[int] = []
    strategy._observers.append(lambda report: seen.append(report.server_round))
    result = strategy.start(grid(), state_of(START), num_rounds=5, timeout=20)
    assert seen == [1, 2]
    assert strategy.output_round == 2
    assert read_charges(tmp_path / "ledger.json") == [(plan().release(), 2)]
    spread = (START - weights(result.arrays)).std() / LR * 4
    assert spread == pytest.approx(Z * C * math.sqrt(2), rel=WITHIN)
    # The next run of the same clients finds nothing left.
    again = DPFedAvg(plan(max_epsilon=limit), local_rate=LR, ledger=tmp_path / "ledger.json")
    with pytest.raises(ValueError, match="even one more round would pass it"):
        again.start(grid(), state_of(START), num_rounds=1)
    assert one < limit


def test_a_ledger_that_begins_anew_is_told_in_a_project_of_one_s_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A name with a typo, or another working folder: nothing is spent yet, by that file."""
    for told in (True, False):
        caplog.clear()
        strategy = DPFedAvg(plan(), local_rate=LR, ledger=tmp_path / "ledger.json")
        strategy.start(grid(), state_of(START), num_rounds=1, timeout=20)
        line = f"ledger {tmp_path.resolve()}/ledger.json does not exist: a new one begins there"
        assert (line in caplog.text) == told


@pytest.mark.parametrize("kind", [DPFedAvg, DPNormFedAvg])
@pytest.mark.parametrize("bound", [0.1, 0.7, 3.0])
def test_no_row_that_is_added_up_is_longer_than_c(
    kind: type[PrivateAveraging], bound: float
) -> None:
    """Rounded to float32 once it was bounded, a row can be longer than C by 6e-8: the figures are
    for C, and without sampling they are exact."""
    lengths: list[float] = []

    class Watched(kind):  # type: ignore[misc, valid-type]
        def bound(self, *arguments: Any) -> torch.Tensor:
            rows = super().bound(*arguments)
            lengths.extend(torch.linalg.vector_norm(rows.double(), dim=1).tolist())
            return rows

    rng = np.random.default_rng(4)
    over = grid(update=lambda w: 10 * rng.standard_normal(w.shape))
    everybody = plan(clip_norm=ClipNorm(bound), participation=FullParticipation())
    strategy = Watched(everybody, local_rate=LR, num_clients=CLIENTS, start_timeout=2.0)
    moved(strategy, over, rounds=3)
    assert len(lengths) == 3 * CLIENTS
    assert max(lengths) <= bound * (1 + 1e-12)


def test_a_ledger_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    for runs in (1, 2):
        strategy = DPFedAvg(plan(), local_rate=LR, ledger=path)
        strategy.start(grid(), state_of(START), num_rounds=3, timeout=20)
        assert strategy.ledger.rounds == 3 * runs
        assert strategy.ledger.rounds_of_others == 3 * (runs - 1)
        figure = strategy.figure()
        assert figure is not None
        assert figure.epsilon == spent([(plan().release(), 3 * runs)], 1e-5).epsilon
        content = json.loads(path.read_text())
        assert content["epsilon_rdp"] == pytest.approx(figure.epsilon)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "cannot be read"),
        ("[]", "not a privacy ledger"),
        ('{"format": 1, "delta": 1e-5, "neighbours": "add-remove"}', "damaged"),
        ('{"format": 1, "delta": 1e-6, "neighbours": "add-remove"}', "delta = 1e-06"),
        ('{"format": 1, "delta": 1e-5, "neighbours": "zero-out"}', "neighbours = zero-out"),
    ],
)
def test_a_ledger_that_cannot_be_continued(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "ledger.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=said) as caught:
        DPFedAvg(plan(), ledger=path)
    assert "\n" not in str(caught.value)


def test_the_charge_is_on_disk_before_the_noise_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ledger.json"
    rounds_on_disk: list[int] = []

    def noise(*arguments: Any) -> torch.Tensor:
        rounds_on_disk.append(json.loads(path.read_text())["rounds"])
        return torch.zeros(arguments[0], dtype=torch.float64)

    monkeypatch.setattr("blackthorn.strategies.private_averaging.gaussian_noise", noise)
    DPFedAvg(plan(), ledger=path).start(grid(), state_of(START), num_rounds=3, timeout=20)
    assert rounds_on_disk == [1, 2, 3]


def test_more_rounds_than_planned_are_refused() -> None:
    with pytest.raises(ValueError, match="num_rounds = 6"):
        DPFedAvg(plan()).start(grid(), state_of(START), num_rounds=6)


# Claims.


def test_without_a_claim_there_is_no_figure(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    strategy = DPFedAvg(plan(claim=False), local_rate=LR)
    strategy.start(grid(), state_of(START), num_rounds=1, timeout=20)
    assert (strategy.figure(), strategy.local_figure()) == (None, None)
    # A ledger that would not be charged is refused, whatever keeps the figure from being claimed.
    robust = plan(noise_location="client", participation=PoissonParticipation(1.0))
    rule = RageFilter(CorruptionBound(1))
    cases: list[tuple[PrivacyPlan, dict[str, Any]]] = [
        (plan(claim=False), {}),
        (robust, {"aggregator": rule}),
    ]
    for unclaimed, options in cases:
        with pytest.raises(ValueError, match=r"ledger = .* nothing would be charged to it"):
            DPFedAvg(unclaimed, local_rate=LR, ledger=path, **options)
    assert not path.exists()


def test_a_robust_rule_over_noised_messages_keeps_the_local_figure_alone() -> None:
    strategy = DPFedAvg(
        plan(noise_location="client", participation=PoissonParticipation(1.0)),
        aggregator=RageFilter(CorruptionBound(1)),
        local_rate=LR,
    )
    strategy.start(grid(noisy=True), state_of(START), num_rounds=1, timeout=20)
    assert strategy.figure() is None
    assert strategy.local_figure() == strategy.privacy.local_figure()


@pytest.mark.parametrize("counted", [False, True])
def test_after_a_resume_there_is_a_local_figure_where_all_rounds_are_counted(
    tmp_path: Path, counted: bool
) -> None:
    """The process before may have asked for a round that is in no state."""

    def one() -> DPFedAvg:
        private = plan(noise_location="client", participation=PoissonParticipation(1.0))
        return DPFedAvg(private, local_rate=LR, ledger=tmp_path / "ledger.json")

    strategy = one()
    strategy.start(grid(noisy=True), state_of(START), num_rounds=1, timeout=20)
    state = replace(strategy.state(), counted=counted)
    again = one()
    again.start(grid(noisy=True), state_of(START), num_rounds=2, timeout=20, from_state=state)
    expected = again.privacy.local_figure(2) if counted else None
    assert again.local_figure() == expected


def test_nothing_of_the_cohort_is_logged_or_returned(caplog: pytest.LogCaptureFixture) -> None:
    for claim, expected in ((True, False), (False, True)):
        caplog.clear()
        strategy = DPFedAvg(
            plan(claim=claim, participation=PoissonParticipation(1.0)), local_rate=LR
        )
        with caplog.at_level(logging.INFO, logger="blackthorn"):
            result = strategy.start(grid(failing=2), state_of(START), num_rounds=1, timeout=20)
        assert ("rejected" in caplog.text) == expected
        assert bool(result.train_metrics_clientapp[1]) == expected


def test_clients_are_not_asked_for_evaluations_under_a_claim() -> None:
    over = grid()
    strategy = DPFedAvg(plan(), local_rate=LR)
    strategy.start(over, state_of(START), num_rounds=1, timeout=20)
    assert {message.metadata.message_type for message in over.sent} <= {"train"}
    assert list(strategy.configure_evaluate(1, state_of(START), ConfigRecord(), over)) == []


def test_seeded_noise_is_reproducible_and_claims_nothing() -> None:
    def run(seed: int) -> np.ndarray:
        strategy = DPFedAvg(plan(claim=False, insecure_seed=seed), local_rate=LR)
        return moved(strategy, grid(), rounds=2)

    assert np.array_equal(run(3), run(3))
    assert not np.array_equal(run(3), run(4))
    assert run(3).std() == pytest.approx(Z * C * math.sqrt(2), rel=WITHIN)


def test_two_unseeded_runs_differ_in_their_noise() -> None:
    one, other = (moved(DPFedAvg(plan(), local_rate=LR, seed=1), grid()) for _ in range(2))
    assert abs(np.corrcoef(one, other)[0, 1]) < 6 / math.sqrt(D)


@pytest.mark.parametrize(
    ("z", "shares"), [(Z / 2, 100), (0.0, 100), (math.inf, 100), (Z, 101), (Z, 99), (Z, 0), (Z, -4)]
)
def test_a_client_does_not_answer_a_server_that_asks_for_too_little(z: float, shares: int) -> None:
    config = make_config(
        {
            "algorithm": "dp-fedavg",
            "clip-norm": C,
            "noise-multiplier": Z,
            "noise-location": "client",
            "num-clients": 100,
        }
    )
    order = ConfigRecord({"server-round": 1, "local-lr": LR})
    rule = SentRule("clip-update", {"bound": C, "noise-multiplier": z, "noise-shares": shares})
    content = RecordDict({"arrays": state_of(START), "config": order, "rule": rule.record()})
    request = read_round(Message(content, dst_node_id=3, message_type="train"))
    with pytest.raises(ValueError, match=r"noise-multiplier|names (101|99|0|-4) shares"):
        noised_models(config, torch.zeros(D), torch.zeros(1, D), [request], [0])


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
def test_a_row_that_does_not_stay_finite_leaves_the_round_its_noise(value: float) -> None:
    """Otherwise the model that stays as it was would tell who was there."""

    class Overflowing(DPFedAvg):
        def constrain(self, updates: torch.Tensor, bound: float) -> torch.Tensor:
            bounded = super().constrain(updates, bound)
            bounded[0, 0] = value
            return bounded

    everybody = plan(participation=FullParticipation())
    strategy = Overflowing(everybody, local_rate=LR, num_clients=CLIENTS, start_timeout=2.0)
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
    strategy = DPFedAvg(plan(), local_rate=LR, num_clients=CLIENTS, start_timeout=2.0)
    strategy.start(grid(), state_of(START), num_rounds=1)
    with pytest.raises(RuntimeError, match="round 1 has been released"):
        strategy.aggregate_train(1, [])
    assert strategy.ledger.rounds == 1
