"""The budget and ledger of private strategies, and what they claim."""

import json
import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from charged_ledgers import read_charges
from flwr.app import ConfigRecord, Message, RecordDict
from noised_rounds import (
    CLIENTS,
    LR,
    START,
    WITHIN,
    C,
    D,
    Z,
    grid,
    moved,
    plan,
    state_of,
    weights,
)

from blackthorn.client_app.messages import read_round
from blackthorn.client_app.private_update import noised_models
from blackthorn.settings.config import make_config
from blackthorn.strategies import (
    ClipNorm,
    DPFedAvg,
    DPNormFedAvg,
    FullParticipation,
    PoissonParticipation,
    PrivacyPlan,
    RageFilter,
    spent,
)
from blackthorn.strategies.aggregators import CorruptionBound
from blackthorn.strategies.attestation import SentRule
from blackthorn.strategies.bounded_update import ClipUpdate
from blackthorn.strategies.clipping import ClipGradient
from blackthorn.strategies.local_rule import LocalRule
from blackthorn.strategies.private_averaging import PrivateAveraging
from blackthorn.strategies.rounds import RoundContext

# Budget and ledger.


def test_max_epsilon_stops_before_the_round_that_would_pass_it(tmp_path: Path) -> None:
    one, two, three = (spent([(plan().release(), n)], 1e-5).epsilon for n in (1, 2, 3))
    limit = (two + three) / 2
    strategy = DPFedAvg(
        plan(max_epsilon=limit), local_rate=LR, statistics="server", ledger=tmp_path / "ledger.json"
    )
    seen: list[int] = []
    strategy._observers.append(lambda report: seen.append(report.server_round))
    result = strategy.start(grid(), state_of(START), num_rounds=5, timeout=20)
    assert seen == [1, 2]
    assert strategy.output_round == 2
    assert read_charges(tmp_path / "ledger.json") == [(plan().release(), 2)]
    spread = (START - weights(result.arrays)).std() / LR * 4
    assert spread == pytest.approx(Z * C * math.sqrt(2), rel=WITHIN)
    # The next run of the same clients finds nothing left.
    again = DPFedAvg(
        plan(max_epsilon=limit), local_rate=LR, statistics="server", ledger=tmp_path / "ledger.json"
    )
    with pytest.raises(ValueError, match="even one more round would pass it"):
        again.start(grid(), state_of(START), num_rounds=1)
    assert one < limit


def test_a_ledger_that_begins_anew_is_told_in_a_project_of_one_s_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A name with a typo, or another working folder: nothing is spent yet, by that file."""
    for told in (True, False):
        caplog.clear()
        strategy = DPFedAvg(
            plan(), local_rate=LR, statistics="server", ledger=tmp_path / "ledger.json"
        )
        strategy.start(grid(), state_of(START), num_rounds=1, timeout=20)
        line = f"ledger {tmp_path.resolve()}/ledger.json does not exist: a new one begins there"
        assert (line in caplog.text) == told


@pytest.mark.parametrize("kind", [DPFedAvg, DPNormFedAvg])
@pytest.mark.parametrize("bound", [0.1, 0.7, 3.0])
def test_no_row_that_is_added_up_is_longer_than_c(
    kind: type[PrivateAveraging], bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounded to float32 once it was bounded, a row can be longer than C by 6e-8: the figures are
    for C, and without sampling they are exact."""
    lengths: list[float] = []

    real = PrivateAveraging.bound

    def watched(*arguments: Any) -> torch.Tensor:
        rows = real(*arguments)
        lengths.extend(torch.linalg.vector_norm(rows.double(), dim=1).tolist())
        return rows

    monkeypatch.setattr(PrivateAveraging, "bound", watched)
    rng = np.random.default_rng(4)
    over = grid(update=lambda w: 10 * rng.standard_normal(w.shape))
    everybody = plan(clip_norm=ClipNorm(bound), participation=FullParticipation())
    strategy = kind(
        everybody, local_rate=LR, statistics="server", num_clients=CLIENTS, start_timeout=2.0
    )
    moved(strategy, over, rounds=3)
    assert len(lengths) == 3 * CLIENTS
    assert max(lengths) <= bound * (1 + 1e-12)


def test_a_ledger_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    for runs in (1, 2):
        strategy = DPFedAvg(plan(), local_rate=LR, statistics="server", ledger=path)
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
    DPFedAvg(plan(), ledger=path, statistics="server").start(
        grid(), state_of(START), num_rounds=3, timeout=20
    )
    assert rounds_on_disk == [1, 2, 3]


def test_more_rounds_than_planned_are_refused() -> None:
    with pytest.raises(ValueError, match="num_rounds = 6"):
        DPFedAvg(plan(), statistics="server").start(grid(), state_of(START), num_rounds=6)


# Claims.


def test_without_a_claim_there_is_no_figure(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    strategy = DPFedAvg(plan(claim=False), local_rate=LR, statistics="server")
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
            DPFedAvg(unclaimed, local_rate=LR, statistics="server", ledger=path, **options)
    assert not path.exists()


def test_a_robust_rule_over_noised_messages_keeps_the_local_figure_alone() -> None:
    strategy = DPFedAvg(
        plan(noise_location="client", participation=PoissonParticipation(1.0)),
        aggregator=RageFilter(CorruptionBound(1)),
        local_rate=LR,
        statistics="server",
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
        return DPFedAvg(
            private, local_rate=LR, statistics="server", ledger=tmp_path / "ledger.json"
        )

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
            plan(claim=claim, participation=PoissonParticipation(1.0)),
            local_rate=LR,
            statistics="server",
        )
        with caplog.at_level(logging.INFO, logger="blackthorn"):
            result = strategy.start(grid(failing=2), state_of(START), num_rounds=1, timeout=20)
        assert ("rejected" in caplog.text) == expected
        assert bool(result.train_metrics_clientapp[1]) == expected


def test_clients_are_not_asked_for_evaluations_under_a_claim() -> None:
    over = grid()
    strategy = DPFedAvg(plan(), local_rate=LR, statistics="server")
    strategy.start(over, state_of(START), num_rounds=1, timeout=20)
    assert {message.metadata.message_type for message in over.sent} <= {"train"}
    assert list(strategy.configure_evaluate(1, state_of(START), ConfigRecord(), over)) == []


def test_seeded_noise_is_reproducible_and_claims_nothing() -> None:
    def run(seed: int) -> np.ndarray:
        strategy = DPFedAvg(
            plan(claim=False, insecure_seed=seed), local_rate=LR, statistics="server"
        )
        return moved(strategy, grid(), rounds=2)

    assert np.array_equal(run(3), run(3))
    assert not np.array_equal(run(3), run(4))
    assert run(3).std() == pytest.approx(Z * C * math.sqrt(2), rel=WITHIN)


def test_two_unseeded_runs_differ_in_their_noise() -> None:
    one, other = (
        moved(DPFedAvg(plan(), local_rate=LR, statistics="server", seed=1), grid())
        for _ in range(2)
    )
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


@pytest.mark.parametrize("location", ["server", "client"])
@pytest.mark.parametrize(
    "rule",
    [
        ClipUpdate(C, 2 * Z, CLIENTS),
        ClipUpdate(2 * C, Z, CLIENTS),
        ClipUpdate(C, Z, 2 * CLIENTS),
        ClipUpdate(2 * C),
        ClipGradient(C, 1),
    ],
)
def test_another_rule_than_the_plan_s_is_not_sent_under_a_claim(
    rule: LocalRule, location: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever overrides the client's half asks nobody for it, if it were in our own class."""

    class Mixed(DPFedAvg):
        def local_rule(self, context: RoundContext) -> LocalRule:
            del context
            return rule

    options: Any = {"local_rate": LR, "num_clients": CLIENTS, "statistics": "server"}
    with pytest.raises(ValueError, match="Mixed overrides local_rule of PrivateAveraging"):
        Mixed(plan(noise_location=location), **options)
    monkeypatch.setattr(DPFedAvg, "local_rule", Mixed.local_rule, raising=False)
    strategy, seen = DPFedAvg(plan(noise_location=location), **options), grid()
    with pytest.raises(ValueError, match=r"local_rule = clip-.* breaks the claim: by the privacy"):
        strategy.start(seen, state_of(START), num_rounds=1, timeout=20)
    assert not [one for one in seen.sent if one.metadata.message_type == "train"]
    assert strategy.ledger.rounds == 0
    unclaimed = Mixed(plan(noise_location=location, claim=False), **options)
    unclaimed.start(grid(), state_of(START), num_rounds=1, timeout=20)


@pytest.mark.parametrize(
    "options",
    [
        {"claim": False},
        {"claim": False, "insecure_seed": 1},
        {"claim": False, "top_up": False, "noise_location": "client"},
    ],
)
def test_a_plan_that_claims_nothing_says_so(options: dict[str, Any]) -> None:
    unclaimed = plan(**options)
    assert unclaimed.sentence() == "none, as the privacy plan claims nothing"
    assert DPFedAvg(unclaimed).sentence() == unclaimed.sentence()
    assert math.isinf(DPFedAvg(unclaimed).ledger.figure().epsilon)
    assert not unclaimed.covers_clients()


@pytest.mark.parametrize(
    "options", [{}, {"noise_location": "client", "claim": False, "insecure_seed": 1}]
)
def test_nothing_holds_against_a_server_that_has_the_updates_or_the_noise(
    options: dict[str, Any],
) -> None:
    assert math.isinf(plan(**options).local_figure().epsilon)
    assert DPFedAvg(plan(**options)).local_figure() is None


def test_what_a_robust_rule_releases_is_not_claimed_in_words_either() -> None:
    rule = RageFilter(CorruptionBound(1))
    strategy = DPFedAvg(plan(noise_location="client"), aggregator=rule)
    assert math.isinf(strategy.ledger.figure().epsilon)
    assert strategy.sentence().startswith("no central figure: the sensitivity of a robust rule")


def test_a_strategy_says_that_the_arrays_it_is_given_are_taken_to_be_public() -> None:
    given = "; it starts from given weights, which the figure takes to be public"
    assert DPFedAvg(plan()).sentence() == plan().sentence() + given


def test_a_plan_without_a_finite_epsilon_says_that_it_claims_nothing() -> None:
    assert math.isinf(plan(noise_multiplier=1e-3).figure().epsilon)
    assert plan(noise_multiplier=1e-3).sentence().startswith("none, as no finite epsilon holds: ")
    with pytest.raises(ValueError, match=r"noise_multiplier = 0.001 breaks the claim: .*no finite"):
        DPFedAvg(plan(noise_multiplier=1e-3))
    DPFedAvg(plan(noise_multiplier=1e-3, claim=False))
    # Enough for the sum, and too little for one message of three: no claim where that alone is.
    shared = plan(noise_multiplier=0.08, noise_location="client")
    assert math.isfinite(DPFedAvg(shared).privacy.figure().epsilon)
    with pytest.raises(ValueError, match=r"noise_multiplier = 0.08 breaks the claim: .*no finite"):
        DPFedAvg(shared, aggregator=RageFilter(CorruptionBound(0)))
    assert plan().sentence().startswith("client-level differential privacy")
