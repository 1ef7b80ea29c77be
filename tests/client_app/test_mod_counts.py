"""The mod counts in the client's own ledger what it answers; it keeps no policy, and says so."""

import math
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from memory_grid import MemoryGrid, runs
from own_project import EXAMPLES, RATE, counted_mod, network, project_app

from blackthorn.client_app import mod
from blackthorn.client_app.client_ledger import ClientLedger, Sent
from blackthorn.client_app.disclosure import PublicRefusal
from blackthorn.strategies import (
    ClipNorm,
    DPFedAvg,
    FederatedStrategy,
    FullParticipation,
    GFedAvg,
    NotEnoughClients,
    PrivacyPlan,
    RoundReport,
    base,
    enrolment_messages,
)
from blackthorn.strategies.accounting import Release

CLIENTS, Z = 3, 4.0


def grid_of(**named: Any) -> MemoryGrid:
    """`named`: of the node config of client 0."""
    configs = [{"partition-id": i, **(named if i == 0 else {})} for i in range(CLIENTS)]
    apps = [
        project_app(i, mods=[counted_mod()], model=lambda: network(False)) for i in range(CLIENTS)
    ]
    return MemoryGrid(
        {10 + i: runs(app, **own) for i, (app, own) in enumerate(zip(apps, configs, strict=True))}
    )


def private(location: Any) -> FederatedStrategy:
    plan = PrivacyPlan(
        ClipNorm(1.0), Z, CLIENTS, 2, FullParticipation(), delta=0.01, noise_location=location
    )
    return DPFedAvg(plan, identity="query", local_rate=RATE)


def start(strategy: FederatedStrategy, grid: MemoryGrid, rounds: int = 2) -> None:
    arrays = ArrayRecord(network(False).state_dict())
    strategy.start(grid, arrays, num_rounds=rounds, timeout=60)


def ledger_after(strategy: FederatedStrategy, path: Path) -> Sent:
    start(strategy, grid_of(ledger=str(path)))
    return ClientLedger(path).read()


def test_every_noised_answer_is_charged_by_its_share_of_the_noise(tmp_path: Path) -> None:
    sent = ledger_after(private("client"), tmp_path / "ledger.json")
    assert sent.rounds == 2
    charge = (Release(Z / (2 * math.sqrt(CLIENTS))), 2)
    assert (sent.local, sent.sample, sent.told_exactly) == ([charge], [charge], False)


@pytest.mark.parametrize("kind", ["server", "plain"])
def test_an_answer_without_noise_is_charged_without_a_bound(tmp_path: Path, kind: str) -> None:
    plain = GFedAvg(identity="query", local_rate=RATE, num_clients=CLIENTS)
    strategy = plain if kind == "plain" else private("server")
    sent = ledger_after(strategy, tmp_path / "ledger.json")
    assert sent.local == [(Release(0.0), 2)]
    # Without a claim its number of examples was told when it enrolled.
    assert sent.told_exactly is (kind == "plain")


def test_a_server_of_another_version_is_answered_by_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """When it asks who the node is, and under a claim in every round, whoever is asked."""
    for identity in ("query", "node"):
        monkeypatch.setattr(base, "CODE", "0.1.0 0123456789ab")
        monkeypatch.setattr(enrolment_messages, "CODE", "0.1.0 0123456789ab")
        plan = PrivacyPlan(ClipNorm(1.0), Z, CLIENTS, 2, FullParticipation(), delta=0.01)
        reports: list[RoundReport] = []
        strategy = DPFedAvg(
            plan, identity=identity, local_rate=RATE, observers=[reports.append], start_timeout=0.5
        )
        start(strategy, grid_of(), 1)
        assert reports[-1].accepted == []
        if identity == "node":
            said = [rejection.reason for rejection in reports[-1].rejected]
            assert len(said) == CLIENTS
            assert all("the server has 0.1.0 0123456789ab" in reason for reason in said)


@pytest.mark.parametrize("named", ["policy", "another ledger", "relative"])
def test_what_cannot_be_kept_to_is_answered_by_nobody(tmp_path: Path, named: str) -> None:
    policy, other = tmp_path / "policy.toml", tmp_path / "ledger.json"
    policy.write_text("max-rounds = 1\n")
    ClientLedger(other).change(lambda _: None)
    config = {"policy": str(policy), "ledger": str(tmp_path / "new.json")}
    reason = "node 10: this ClientApp keeps no policy"
    if named != "policy":
        config = {"ledger": str(other), "ledger-id": "f" * 32}
        reason = "node 10: the client's ledger cannot be used"
    if named == "relative":
        config = {"ledger": "ledger.json"}
    strategy = GFedAvg(
        identity="query", num_clients=CLIENTS, min_replies=CLIENTS, start_timeout=1.0
    )
    grid = grid_of(**config)
    with pytest.raises(NotEnoughClients, match=reason):
        start(strategy, grid)
    assert not (tmp_path / "new.json").exists()


def test_what_the_app_answers_to_an_error_is_counted_too(tmp_path: Path) -> None:
    """A server can send one, and nobody knows what an app makes of it."""
    path, seen = tmp_path / "ledger.json", []
    asked = Message(RecordDict(), dst_node_id=2, message_type="train")
    error = Message(Error(0, "none"), reply_to=asked)

    def app(message: Message, context: Context) -> Message:
        del context
        seen.append(ClientLedger(path).read().told_exactly)
        return Message(RecordDict(), reply_to=message)

    mod(error, Context(1, 2, {"ledger": str(path)}, RecordDict(), {}), app)
    assert seen == [True]
    with pytest.raises(PublicRefusal, match="keeps no policy"):
        mod(error, Context(1, 2, {"policy": "/policy.toml"}, RecordDict(), {}), app)
    assert seen == [True]


def test_nobody_says_its_count_under_a_claim_whenever_it_is_asked() -> None:
    """Flower's own loop evaluates before the first round: so may one by hand."""
    grid, strategy = grid_of(), private("client")
    told: list[Any] = []
    for node, answer in list(grid.nodes.items()):

        def noted(message: Any, answer: Any = answer) -> Any:
            reply = answer(message)
            if reply is not None and reply.has_content():
                told.extend(dict(r) for r in reply.content.metric_records.values())
            return reply

        grid.nodes[node] = noted
    arrays = ArrayRecord(network(False).state_dict())
    for _ in range(3):
        assert list(strategy.configure_evaluate(0, arrays, ConfigRecord(), grid)) == []
    messages = list(strategy.configure_train(1, arrays, ConfigRecord(), grid))
    strategy.aggregate_train(1, grid.send_and_receive(messages))
    assert len(told) == 2 * CLIENTS
    assert {one["num-examples"] for one in told} == {1}
    assert EXAMPLES != 1
