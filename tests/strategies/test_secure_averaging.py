"""DP-FedAvg by secure aggregation, over grids: what the server learns, is charged and refuses."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import dp_accounting
import numpy as np
import pytest
import torch
from charged_ledgers import read_charges
from flwr.app import ArrayRecord, ConfigRecord, Message

from blackthorn.client_app.masking import Masking
from blackthorn.recording.privacy import privacy_plan
from blackthorn.secure_aggregation import client as protocol
from blackthorn.secure_aggregation.server import SecureServer, Standing
from blackthorn.server_app.build import build_strategy
from blackthorn.server_app.run import execute, prepare
from blackthorn.settings.config import ConfigError, RunConfig, make_config
from blackthorn.simulation.engine import EngineGrid
from blackthorn.strategies.accounting import Accountant, Release, spent
from blackthorn.strategies.bounding import ClipNorm
from blackthorn.strategies.reports import RoundReport
from blackthorn.strategies.secure_averaging import SecureAveraging
from blackthorn.strategies.secure_plan import SecurePlan
from blackthorn.tasks.problem import load_problem
from blackthorn.wire import ARRAYS, CLIENT_ID, CONFIG, RULE, SECURE

SECURE_RUN: dict[str, Any] = {
    **{"algorithm": "secure-dp-fedavg", "task": "digits", "model": "logistic"},
    **{"num-clients": 8, "num-server-rounds": 2, "local-steps": 2, "local-lr": 0.1},
    **{"clip-norm": 0.5, "noise-multiplier": 1.0, "delta": 1e-4, "batch-size": 0},
    **{"report": False, "tensorboard": False, "evaluate-every": 2},
}
CENTRAL = {**SECURE_RUN, "algorithm": "dp-fedavg", "neighbours": "zero-out"}


def config_of(**changes: Any) -> RunConfig:
    return make_config({**SECURE_RUN, **changes})


class LossyGrid(EngineGrid):
    """Clients in `silent`, by exchange, do not answer it; `seen`: what the server is answered."""

    def __init__(self, config: RunConfig, silent: dict[str, Sequence[int]]) -> None:
        super().__init__(config, load_problem(config))
        self.silent, self.seen = silent, list[tuple[str, int, Message]]()

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        del timeout
        asked = list(messages)
        if not asked or SECURE not in asked[0].content:
            return self._answer(asked)
        exchange = str(asked[0].content.config_records[SECURE]["exchange"])
        clients = [int(str(m.content.config_records[CONFIG][CLIENT_ID])) for m in asked]
        there = [
            (c, m)
            for c, m in zip(clients, asked, strict=True)
            if c not in self.silent.get(exchange, ())
        ]
        replies = self._answer([message for _, message in there])
        self.seen += [(exchange, c, r) for (c, _), r in zip(there, replies, strict=True)]
        return replies


def run(config: RunConfig, grid: EngineGrid) -> tuple[SecureAveraging, list[RoundReport]]:
    reports: list[RoundReport] = []
    strategy = build_strategy(config, [reports.append])
    assert isinstance(strategy, SecureAveraging)
    problem = load_problem(config)
    strategy.start(grid, problem.model.module, config.num_server_rounds, timeout=60)
    return strategy, reports[-config.num_server_rounds :]


def updates_of(config: RunConfig) -> list[np.ndarray]:
    """u_i of the first round, clipped, as the clients of plain averaging send them."""
    plain = make_config(
        {**SECURE_RUN, "algorithm": "gfedavg", "clip-norm": 0.0}
        | {"noise-multiplier": 0.0, "num-clients": config.num_clients, "num-server-rounds": 1}
    )
    reports: list[RoundReport] = []
    problem = load_problem(plain)
    strategy = build_strategy(plain, [reports.append])
    strategy.start(EngineGrid(plain, problem), problem.model.module, 1)
    found = reports[-1].updates
    assert found is not None
    rows = found.double().numpy()
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return list(rows * np.minimum(1, config.clip_norm / norms))


@pytest.mark.parametrize("exchange", ["keys", "shares", "masked", "consistency", "unmask"])
def test_the_step_is_the_noised_mean_of_those_who_did_not_vanish(exchange: str) -> None:
    config = config_of(**{"num-server-rounds": 1, "noise-multiplier": 0.01, "secure-bits": 24})
    # So little noise has no finite figure: what is looked at is the arithmetic.
    config = make_config(
        {**SECURE_RUN, "claim-privacy": False, "num-server-rounds": 1}
        | {"noise-multiplier": 0.01, "secure-bits": 24}
    )
    grid = LossyGrid(config, {exchange: [3]})
    _, (report,) = run(config, grid)
    there = [i for i in range(8) if exchange in ("consistency", "unmask") or i != 3]
    assert report.accepted == there
    assert report.aggregate is not None
    rows = updates_of(config)
    due = sum(rows[i] for i in there) / 8
    deviation = 0.01 * 0.5 * math.sqrt(len(there) / 7) / 8
    off = report.aggregate.double().numpy() - due
    assert np.linalg.norm(off) < 2 * deviation * math.sqrt(len(off))
    assert np.linalg.norm(off) > 0.5 * deviation * math.sqrt(len(off))


def test_the_noise_of_the_step_is_that_of_the_fewest_survivors() -> None:
    """With just n' of n clients it is z C/r; with all of them √(n/n') as much."""
    config = config_of(**{"noise-multiplier": 4.0, "num-server-rounds": 1, "secure-dropouts": 0.25})
    assert privacy_plan(config).release() == Release(4.0 * (1 - 1e-9), shares=6, concentrated=True)
    rows = updates_of(config)
    for silent, there in (([0, 1], range(2, 8)), ([], range(8))):
        _, (report,) = run(config, LossyGrid(config, {"masked": silent}))
        assert report.aggregate is not None
        off = report.aggregate.double().numpy() - sum(rows[i] for i in there) / 8
        deviation = 4.0 * 0.5 / 8 * math.sqrt(len([*there]) / 6)
        assert off.std() == pytest.approx(deviation, rel=0.12)


def test_too_few_clients_end_a_round_that_costs_nothing_and_leaves_the_model() -> None:
    config = config_of()
    strategy, reports = run(config, LossyGrid(config, {"masked": [0, 1, 2]}))
    for report in reports:
        assert report.accepted == []
        assert report.skipped is not None
        assert "the round is refused: 5 of 8 clients" in report.skipped
        assert len(report.rejected) == 8
    assert strategy.ledger.rounds == 0


def test_a_round_that_cannot_be_opened_is_charged_all_the_same() -> None:
    """Its server has asked for the shares: what it made of them it knows alone."""
    config = config_of()
    strategy, reports = run(config, LossyGrid(config, {"unmask": [0, 1, 2, 3]}))
    assert all(report.accepted == [] and report.skipped for report in reports)
    assert strategy.ledger.rounds == 2


def test_too_few_that_say_what_they_were_told_end_a_round_that_costs_nothing() -> None:
    config = config_of()
    strategy, reports = run(config, LossyGrid(config, {"consistency": [0, 1, 2]}))
    for report in reports:
        assert report.accepted == []
        assert report.skipped is not None
        assert "5 of a neighbourhood have said what they were told, fewer than 6" in report.skipped
    assert strategy.ledger.rounds == 0


def test_a_server_that_tells_different_lists_has_no_sum_and_a_line_of_every_client_that_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = config_of(**{"num-server-rounds": 1})
    honest = SecureServer.masked

    def lying(self: SecureServer, sent: Any) -> dict[int, Standing]:
        """To the even ones client 7 is in the sum, to the odd ones it has vanished."""
        told = honest(self, sent)
        others = [*range(7)]
        return {
            client: Standing(others, [7]) if client % 2 and client != 7 else one
            for client, one in told.items()
        }

    def passed_on(self: SecureServer, given: Any) -> dict[int, dict[int, bytes]]:
        del self
        return {
            client: {o: tags[client] for o, tags in given.items() if client in tags and o in own}
            for client, own in given.items()
        }

    monkeypatch.setattr(SecureServer, "masked", lying)
    monkeypatch.setattr(SecureServer, "consistency", passed_on)
    strategy, (report,) = run(config, LossyGrid(config, {}))
    assert report.accepted == []
    assert strategy.ledger.rounds == 1
    said = {lost.client: lost.reason for lost in report.rejected}
    for client in range(7):
        assert "the server told different lists of who is in the sum" in said[client]
    # The last has the tags of those alone that were told the same as it.
    assert "5 of a neighbourhood were told one list" in said[7]


def test_nothing_but_masked_updates_reaches_the_server() -> None:
    config = config_of()
    grid = LossyGrid(config, {})
    run(config, grid)
    exchanges = [exchange for exchange, _, _ in grid.seen]
    assert [*dict.fromkeys(exchanges)] == ["keys", "shares", "masked", "consistency", "unmask"]
    for exchange, _, reply in grid.seen:
        if exchange != "masked":
            assert not reply.content.array_records
            continue
        (record,) = reply.content.array_records.values()
        (vector,) = (array.numpy() for array in record.values())
        # Of 1024 uniform numbers of 16 bits the mean is 2^15 to some per cent.
        assert vector.dtype == np.uint16
        assert abs(vector.mean() / 2**15 - 1) < 0.12
        assert reply.content.metric_records["metrics"] == {"num-examples": 1}


def test_epsilon_is_that_of_central_noise_within_a_per_cent() -> None:
    """And by dp-accounting's own Rényi accountant of so many Gaussian releases."""
    for rounds in (2, 40):
        secure = privacy_plan(config_of(**{"num-server-rounds": rounds, "num-clients": 40}))
        central = privacy_plan(
            make_config({**CENTRAL, "num-server-rounds": rounds, "num-clients": 40})
        )
        ours, theirs = secure.figure().epsilon, central.figure().epsilon
        assert theirs <= ours <= 1.01 * theirs
        accountant = dp_accounting.rdp.RdpAccountant()
        accountant.compose(dp_accounting.GaussianDpEvent(1.0), rounds)
        assert accountant.get_epsilon(1e-4) == pytest.approx(ours, rel=0.01)


def test_no_accountant_takes_discrete_noise_for_gaussian() -> None:
    release = Release(2.0, shares=5, concentrated=True)
    by_rdp = spent([(release, 10)], 1e-5)
    accountants: tuple[Accountant, ...] = ("prv", "pld")
    for accountant in accountants:
        figure = spent([(release, 10), (Release(3.0), 1)], 1e-5, accountant)
        assert figure.accountant == "rdp"
        assert spent([(release, 10)], 1e-5, accountant) == by_rdp


def test_a_run_leaves_its_claim_and_its_ledger(tmp_path: Path) -> None:
    config = config_of(**{"output-dir": str(tmp_path / "run")})
    prepared = prepare(config)
    summary = execute(prepared, EngineGrid(config, prepared.problem))
    privacy = summary["privacy"]
    assert privacy["noise_location"] == "client"
    assert privacy["survivors"] == 7
    assert privacy["claim"].startswith("client-level differential privacy of the sums that the")
    assert "against everybody, the server too" in privacy["claim"]
    assert not privacy["covers_clients"]
    charged = read_charges(tmp_path / "run" / "ledger.json")
    assert [(release.concentrated, count) for release, count in charged] == [(True, 2)]
    # A later run, without secure aggregation, on the same clients: its server sees updates.
    later = make_config(
        {**CENTRAL, "ledger": str(tmp_path / "run" / "ledger.json")}
        | {"output-dir": str(tmp_path / "later")}
    )
    prepared = prepare(later)
    claimed = execute(prepared, EngineGrid(later, prepared.problem))["privacy"]
    assert claimed["rounds_charged"] == 4
    assert "against everybody but the server" in claimed["claim"]


def test_a_sum_that_honest_clients_cannot_make_leaves_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = config_of(**{"num-server-rounds": 1})
    honest = protocol.SecureClient.masked

    def lying(self: Any, session: bytes, sealed: Any, terms: Any, numbers: Any, bits: int) -> Any:
        numbers = numbers + 2**13 * (self.client == 2)
        return honest(self, session, sealed, terms, numbers, bits)

    monkeypatch.setattr(protocol.SecureClient, "masked", lying)
    _, (report,) = run(config, EngineGrid(config, load_problem(config)))
    assert report.skipped is not None
    assert "longer than the clients' bounds" in report.skipped


# What a client refuses, and what is refused before it is asked.


def test_no_client_sends_its_update_unmasked_or_by_other_numbers() -> None:
    config = config_of(**{"num-server-rounds": 1})
    grid = LossyGrid(config, {})
    sent: list[Message] = []
    original = grid._answer

    def watched(messages: Sequence[Message]) -> list[Message]:
        sent.extend(messages)
        return original(messages)

    grid._answer = watched  # type: ignore[method-assign]
    run(config, grid)
    trains = [m for m in sent if SECURE in m.content and ARRAYS in m.content]
    (message, *_) = trains
    plain = Message(message.content.copy(), message.metadata.dst_node_id, "train")
    del plain.content[SECURE]

    def never(*_: Any) -> Message:
        raise AssertionError("it was trained")

    mask = grid._masking
    assert isinstance(mask, Masking)
    context: Any = type("Node", (), {"node_config": {"client-id": 0}, "state": {}})()
    with pytest.raises(ValueError, match="without masks"):
        mask(plain, context, never)
    for number, value in (("multiplier", 0.5), ("survivors", 3), ("threshold", 0.5), ("bits", 32)):
        other = Message(message.content.copy(), message.metadata.dst_node_id, "train")
        rule = {**message.content.config_records[RULE], number: value}
        other.content[RULE] = ConfigRecord(rule)
        with pytest.raises(ValueError, match="the server asks for the rule"):
            mask(other, context, never)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"participation": "poisson", "sample-rate": 0.5}, "participation = poisson"),
        ({"participation": "rotating", "bands": 2}, "participation = rotating"),
        ({"weighting": "num-examples"}, "weighting"),
        ({"aggregator": "median"}, "aggregator = median"),
        ({"noise-location": "client"}, "noise-location"),
        ({"accountant": "pld"}, "accountant"),
        ({"instruments": True}, "instruments"),
        ({"num-byzantine": 1, "attack": "sign-flip"}, "num-byzantine"),
        ({"clip-quantile": 0.5}, "clip-quantile"),
        ({"secure-bits": 7}, "secure-bits"),
        ({"secure-dropouts": 0.5}, "secure-dropouts"),
        ({"num-clients": 2}, "survivors = 2"),
        ({"secure-dropouts": 0.4}, "survivors = 5 of 8"),
    ],
)
def test_what_does_not_go_with_it_is_one_line(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        prepare(config_of(**changes))
    assert "\n" not in str(refused.value)


def test_bits_that_are_too_few_are_refused_before_anybody_is_asked() -> None:
    with pytest.raises(ConfigError, match="secure-bits = 8 is not allowed"):
        prepare(config_of(**{"secure-bits": 8}))


def test_flowers_own_loop_is_refused() -> None:
    config = config_of()
    strategy = build_strategy(config)
    problem = load_problem(config)
    arrays = ArrayRecord(problem.state())
    with pytest.raises(RuntimeError, match="call start"):
        strategy.configure_train(1, arrays, ConfigRecord(), EngineGrid(config, problem))


@pytest.mark.parametrize(
    ("clients", "survivors", "threshold", "said"),
    [
        (20, 16, 2 / 3, "fewer than 8 of a round's clients help it"),
        (100, 80, 2 / 3, "fewer than 34 of a round's clients help it"),
        (20, 16, 0.5, "fewer than 2 of a round's clients help it"),
        (21, 17, 0.5, "none of a round's clients help it"),
        (129, 103, 2 / 3, "no more than a fifth of a round's clients help it"),
    ],
)
def test_the_claim_says_how_many_clients_may_help_a_server_that_lies(
    clients: int, survivors: int, threshold: float, said: str
) -> None:
    plan = SecurePlan(
        ClipNorm(1.0),
        2.0,
        num_clients=clients,
        rounds=2,
        delta=1e-4,
        survivors=survivors,
        threshold=threshold,
    )
    sentence = plan.sentence()
    assert f"the server too, as long as {said} in this run" in sentence
    assert f"to ask no more than {clients} clients in a round and to charge" in sentence
    # Beyond 128 clients it is its word who knows whom, and what they are told.
    assert ("to draw by chance who is whose neighbour" in sentence) == (clients > 128)
    assert ("tell all of them the same" in sentence) == (clients > 128)


def test_a_plan_is_for_all_or_a_cohort_and_zeroed_contributions() -> None:
    plan = privacy_plan(config_of(**{"participation": "fixed", "clients-per-round": 5}))
    assert isinstance(plan, SecurePlan)
    assert (plan.terms.clients, plan.survivors) == (5, 4)
    assert plan.figure(colluding=1).epsilon > plan.figure().epsilon
    assert plan.local_release() == Release(0.0)
    assert torch.isfinite(torch.tensor(plan.figure().epsilon))
