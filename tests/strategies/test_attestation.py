"""Who may answer: a reply counts under a rule that the clients carry out only if it attests it."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from memory_grid import DIMENSION, Answer, MemoryGrid, initial_model, quadratic_app, runs, vector_of

from blackthorn import attacks, strategies
from blackthorn.attacks.round_config import honest_reply
from blackthorn.client_app.clientapp import app
from blackthorn.server_app.build import build_strategy
from blackthorn.settings.catalogue import ALGORITHMS
from blackthorn.settings.config import make_config, to_mapping
from blackthorn.simulation.engine import EngineGrid
from blackthorn.strategies import (
    CEFedAvg,
    ClipNorm,
    FatClippingPI,
    FatClippingPR,
    FederatedStrategy,
    FedLangevin,
    GFedAvg,
    LocalRate,
    ModelClipping,
    PoissonParticipation,
    PrivacyPlan,
    RoundContext,
    RoundReport,
)
from blackthorn.strategies.attestation import Attestation, SentRule
from blackthorn.strategies.global_model import GlobalModel
from blackthorn.strategies.privacy_plan import NoiseLocation
from blackthorn.strategies.screening import RejectedReply, screen_reply
from blackthorn.tasks.problem import load_problem

LR = 0.25
# These models have BatchNorm's statistics, which under a claim are not averaged.
DPFedAvg = partial(strategies.DPFedAvg, statistics="server")
DPNormFedAvg = partial(strategies.DPNormFedAvg, statistics="server")


def plan(location: NoiseLocation = "client", claim: bool = True) -> PrivacyPlan:
    return PrivacyPlan(
        ClipNorm(1.0),
        noise_multiplier=1.0,
        num_clients=2,
        rounds=2,
        participation=PoissonParticipation(1.0),
        noise_location=location,
        claim=claim,
    )


Make = Callable[..., FederatedStrategy]
NEEDED: dict[str, Make] = {
    "noise at the clients": lambda **f: DPFedAvg(plan(), **f),
    "normalised": lambda **f: DPNormFedAvg(plan(), **f),
    "unclaimed": lambda **f: DPFedAvg(plan(claim=False), **f),
    "steps": lambda **f: FatClippingPI(1.0, 3, **f),
    "langevin": lambda **f: FedLangevin(
        LR, identity="query", **{k: v for k, v in f.items() if k != "local_rate"}
    ),
}
ECHOES: dict[str, Callable[[RecordDict, RecordDict], dict[str, Any]]] = {
    "the content as it is": lambda sent, _: dict(sent),
    "the content with what was trained": lambda sent, trained: {**sent, **trained},
    "the rule": lambda sent, trained: {**trained, "rule": sent["rule"]},
    "attested: the rule": lambda sent, trained: {**trained, "attested": sent["rule"]},
    "attested: the config": lambda sent, trained: {**trained, "attested": sent["config"]},
}
ENFORCED: dict[str, Make] = {
    "gfedavg": GFedAvg,
    "pr": lambda **f: FatClippingPR(1.0, **f),
    "ce": lambda **f: CEFedAvg(1.0, **f),
    "models": lambda **f: ModelClipping(1.0, **f),
    "noise at the server": lambda **f: DPFedAvg(plan("server"), **f),
    "normalised": lambda **f: DPNormFedAvg(plan("server"), **f),
}


def one_round(
    make: Make, attests: bool = False, answer: Answer | None = None
) -> tuple[RoundReport, MemoryGrid]:
    """Two clients; `answer` in place of the first, of which nothing is known but its examples."""
    nodes = {
        10 + i: runs(quadratic_app(i, 10, {"client-id": i, "num-examples": 10}, attests=attests))
        for i in range(2)
    }
    reports: list[RoundReport] = []
    grid = MemoryGrid(nodes)
    if answer is not None:
        honest = grid.nodes[10]
        grid.nodes[10] = lambda m: (answer if m.metadata.message_type == "train" else honest)(m)
    strategy = make(local_rate=LR, num_clients=2, observers=[reports.append])
    strategy.start(grid, initial_model(), num_rounds=1, timeout=30.0)
    return reports[-1], grid


@pytest.mark.parametrize("kind", NEEDED)
def test_a_client_that_knows_nothing_of_the_rule_does_not_count(kind: str) -> None:
    report, _ = one_round(NEEDED[kind])
    assert report.accepted == []
    assert len(report.rejected) == 2
    for rejection in report.rejected:
        assert "attests nothing of the round's rule" in rejection.reason
        assert "mods=[blackthorn.client_app.mod]" in rejection.reason


@pytest.mark.parametrize("kind", NEEDED)
def test_a_client_that_attests_the_rule_counts(kind: str) -> None:
    report, _ = one_round(NEEDED[kind], attests=True)
    assert report.rejected == []
    assert len(report.accepted) == 2


@pytest.mark.parametrize("kind", ENFORCED)
def test_what_the_server_enforces_it_accepts_from_any_client(kind: str) -> None:
    report, _ = one_round(ENFORCED[kind])
    assert report.rejected == []
    assert len(report.accepted) == 2


def test_a_private_run_says_once_that_nobody_counts(caplog: pytest.LogCaptureFixture) -> None:
    def raises(message: Message) -> Message:
        if message.metadata.message_type == "train":
            return Message(Error(2, "no training today"), reply_to=message)
        return Message(RecordDict(), reply_to=message)

    unaware = runs(quadratic_app(0, 10))
    for answer, hint in ((unaware, True), (raises, False)):
        for level, told in ((logging.INFO, 0), (logging.DEBUG, 4)):
            caplog.clear()
            strategy = DPFedAvg(plan("client" if hint else "server"), local_rate=LR, num_clients=2)
            grid = MemoryGrid({10: answer, 11: answer})
            with caplog.at_level(level, logger="blackthorn"):
                strategy.start(grid, initial_model(), num_rounds=2, timeout=30.0)
            (warning,) = (r for r in caplog.records if r.levelno == logging.WARNING)
            said = warning.getMessage()
            assert said.startswith("round 1: no reply counts")
            assert "moves by noise alone" in said
            assert ("mods=[blackthorn.client_app.mod]" in said) == hint
            assert "today" not in said
            assert caplog.text.count("rejected: ") == told


def test_the_noise_that_nobody_added_is_the_server_s() -> None:
    """The claim stays true of a round without a single client of ours: (z C)² is there."""

    def aggregate() -> np.ndarray:
        report, _ = one_round(NEEDED["noise at the clients"])
        assert report.aggregate is not None
        return report.aggregate.double().numpy() * 2

    found = np.concatenate([aggregate() for _ in range(60)])
    assert len(found) == 60 * DIMENSION
    # Normal numbers, z C = 1, and of two shares one more: six standard deviations of their spread.
    expected = np.sqrt(1.5)
    assert found.std() == pytest.approx(expected, abs=6 * expected / np.sqrt(2 * len(found)))


@pytest.mark.parametrize(
    "number", ["bound", "noise-multiplier", "noise-shares", "more", "name", "round"]
)
def test_every_number_is_attested(number: str) -> None:
    honest = runs(quadratic_app(0, attests=True))

    def answer(message: Message) -> Message:
        reply = honest(message)
        assert reply is not None
        rule, server_round = SentRule.of(message.content), 1
        if number == "name":
            rule = SentRule("clip", rule.numbers)
        elif number == "round":
            server_round = 2
        else:
            numbers = {**rule.numbers, number: rule.numbers.get(number, 1.0) * 0.5}
            rule = SentRule(rule.name, numbers)
        reply.content["attested"] = Attestation(rule, server_round).record
        return reply

    report, _ = one_round(NEEDED["noise at the clients"], attests=True, answer=answer)
    assert len(report.accepted) == 1
    (rejection,) = report.rejected
    assert "attests another rule or round than the round's rule clip-update" in rejection.reason


@pytest.mark.parametrize("kind", NEEDED)
@pytest.mark.parametrize("echo", ECHOES)
def test_who_sends_back_what_it_was_sent_attests_nothing(kind: str, echo: str) -> None:
    """Neither the message's own content nor any record of it, under whatever name, is a client's
    word: also a ClientApp that knows nothing of rules may answer with it."""
    honest = runs(quadratic_app(0, 10))

    def answer(message: Message) -> Message:
        trained = honest(message)
        assert trained is not None
        return Message(RecordDict(ECHOES[echo](message.content, trained.content)), reply_to=message)

    report, _ = one_round(NEEDED[kind], attests=True, answer=answer)
    assert len(report.accepted) == 1
    (rejection,) = report.rejected
    attested = echo.startswith("attested")
    said = "attests another rule or round than" if attested else "gives back, which attests nothing"
    assert said in rejection.reason


RULE = Attestation(SentRule("clip-gradient", {"bound": 1.0}), 1)
ODD_RECORDS: dict[str, Any] = {
    "arrays": initial_model(),
    "empty": ConfigRecord(),
    "rule": RULE.rule.record(),
    "text": ConfigRecord({"sha256": "0" * 64}),
    "list": ConfigRecord({"sha256": [str(RULE.record["sha256"])]}),
    "nan": ConfigRecord({"sha256": float("nan")}),
    "many": ConfigRecord({**RULE.record, **{f"k{i}": i for i in range(10_000)}}),
    "bytes": ConfigRecord({"sha256": str(RULE.record["sha256"]).encode()}),
}


@pytest.mark.parametrize("odd", ODD_RECORDS)
def test_an_odd_attestation_is_none_and_raises_nothing_else(odd: str) -> None:
    content = RecordDict({"model": initial_model(), "attested": ODD_RECORDS[odd]})
    order = Message(RecordDict(), dst_node_id=3, message_type="train")
    reply = Message(content, reply_to=order)
    with pytest.raises(RejectedReply, match="attests another rule or round than") as caught:
        screen_reply(reply, GlobalModel.of(initial_model()), LR, attested=RULE)
    assert len(str(caught.value)) < 300


def test_a_reply_that_does_not_attest_ends_no_round() -> None:
    """With enough_replies = 1 the silent attacker's reply is not the one that is enough."""
    plain = runs(quadratic_app(0, 10))
    report, _ = one_round(
        lambda **f: FatClippingPI(1.0, 3, enough_replies=1, **f), attests=True, answer=plain
    )
    assert len(report.accepted) == 1


def test_the_messages_of_a_round_share_one_rule() -> None:
    _, grid = one_round(NEEDED["steps"], attests=True)
    records = [m.content["rule"] for m in grid.sent if m.metadata.message_type == "train"]
    assert len(records) == 2
    assert records[0] is records[1]
    assert dict(records[0]) == {"name": "clip-gradient", "bound": 1.0, "local-steps": 3}


# Our ClientApp.

NOISE = {"noise-location": "client", "noise-multiplier": 1.5}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "gfedavg": {},
    "rage": {"algorithm": "rage"},
    "fat-clipping-pr": {"algorithm": "fat-clipping-pr", "clip-norm": 0.3},
    "pr in parameter units": {
        "algorithm": "fat-clipping-pr",
        "clip-norm": 0.3,
        "clip-units": "parameter",
    },
    "fat-clipping-pi": {"algorithm": "fat-clipping-pi", "clip-norm": 0.3},
    "ce-fedavg": {"algorithm": "ce-fedavg", "clip-norm": 0.3},
    "model-clipping": {"algorithm": "model-clipping", "clip-norm": 0.3},
    "dp-fedavg": {"algorithm": "dp-fedavg", "clip-norm": 0.3, "noise-multiplier": 1.0},
    "dp-normfedavg": {"algorithm": "dp-normfedavg", "clip-norm": 0.3, **NOISE},
    "dp-fedavg with epsilon": {
        "algorithm": "dp-fedavg",
        "clip-norm": 0.3,
        "noise-location": "client",
        "epsilon": 8.0,
    },
    "noised ce-fedavg": {"algorithm": "ce-fedavg", "clip-norm": 0.3, **NOISE},
    "fa-ld": {
        "algorithm": "fa-ld",
        "temperature": 0.5,
        "shared-noise": 0.25,
        "prior-precision": 2.0,
    },
    "biclip": {"algorithm": "biclip", "algorithm-options": "low = 0.1, high = 0.5"},
    "error-feedback": {"algorithm": "error-feedback", "clip-norm": 0.3},
    "smooth error-feedback": {
        "algorithm": "error-feedback",
        "clip-norm": 0.3,
        "algorithm-options": "smooth = true",
    },
    "fsgld, in a fit": {"algorithm": "fsgld"},
    "fsgld, in the chain": {"algorithm": "fsgld", "algorithm-options": 'surrogate = "none"'},
    "sghmc": {"algorithm": "sghmc", "algorithm-options": "friction = 0.4"},
    "psgld, warming up": {"algorithm": "psgld", "burn-in": 1, "algorithm-options": "warm-up = 1"},
    "cyclical fa-ld": {
        "algorithm": "fa-ld",
        "step-size": "cyclical",
        "cycle-rounds": 2,
        "thinning": 2,
    },
    "decaying fa-ld": {"algorithm": "fa-ld", "step-size": "decaying", "strong-convexity": 3.0},
}


def order_of(kind: str) -> tuple[Any, Message, SentRule]:
    """The run's configuration, a round's message in it, and the rule that it names."""
    values = {"num-clients": 3, "model": "logistic", "local-steps": 2, "local-lr": 0.07}
    config = make_config({**values, **CONFIGURATIONS[kind]})
    rule = build_strategy(config).local_rule(RoundContext(1, 0.03, torch.zeros(1))).sent
    shares = {"share": 0.5, "total-examples": 10, "shared-seed": 1}
    instruction = ConfigRecord({"server-round": 2, "local-lr": 0.03, "client-id": 1, **shares})
    problem = load_problem(config)
    arrays = ArrayRecord(problem.state())
    content = RecordDict({"arrays": arrays, "config": instruction, "rule": rule.record()})
    memory = Array(np.zeros(problem.model.dimension, dtype=np.float32))
    content["memory"] = ArrayRecord({"memory": memory})
    return config, Message(content, 1001, "train"), rule


def answered(config: Any, message: Message) -> Message:
    node: dict[str, Any] = {"partition-id": 1, "num-partitions": 3}
    return app(message, Context(1, 1001, node, RecordDict(), to_mapping(config)))


def test_every_algorithm_is_among_the_configurations() -> None:
    # To a message alone secure aggregation has no answer: test_secure_averaging.py.
    alone = set(ALGORITHMS) - {"secure-dp-fedavg"}
    assert {make_config(each).algorithm for each in CONFIGURATIONS.values()} == alone


@pytest.mark.parametrize("kind", CONFIGURATIONS)
def test_our_client_app_attests_the_rule_of_its_configuration_and_no_other(kind: str) -> None:
    config, message, rule = order_of(kind)
    attestation = Attestation(rule, 2)
    assert attestation.is_in(answered(config, message).content)
    (reply,) = EngineGrid(config, load_problem(config)).send_and_receive([message])
    assert attestation.is_in(reply.content)
    others = [SentRule("else", rule.numbers), SentRule(rule.name, {**rule.numbers, "more": 1})]
    for key, value in rule.numbers.items():
        # More noise is the server's to ask where epsilon sets z.
        if (key, kind) != ("noise-multiplier", "dp-fedavg with epsilon"):
            others.append(SentRule(rule.name, {**rule.numbers, key: 1.001 * value + 1}))
        others.append(SentRule(rule.name, {k: v for k, v in rule.numbers.items() if k != key}))
    for other in others:
        message.content["rule"] = other.record()
        with pytest.raises(ValueError, match="the server asks for the rule"):
            answered(config, message)
    del message.content["rule"]
    with pytest.raises(ValueError, match="the server asks for the rule unnamed"):
        answered(config, message)


@pytest.mark.parametrize("name", sorted(set(attacks.names()) - {"raise", "exit", "slow"}))
def test_an_attacker_attests_too(name: str) -> None:
    """Attestation keeps out who does not know the rule, not who breaks it."""
    config, message, rule = order_of("fat-clipping-pi")
    node: dict[str, Any] = {"partition-id": 1, "num-partitions": 3}
    context = Context(1, 1001, node, RecordDict(), to_mapping(config))
    reply = attacks.byzantine_app(app, name)(message, context)
    assert Attestation(rule, 2).is_in(reply.content) == (name != "empty-record")


@pytest.mark.parametrize("kind", CONFIGURATIONS)
def test_a_rogue_that_speaks_the_protocol_attests_as_a_client_does(kind: str) -> None:
    _, message, rule = order_of(kind)
    assert Attestation(rule, 2).is_in(honest_reply(message, 10).content)


def test_a_rule_of_no_numbers_is_refused() -> None:
    for value in (float("nan"), "1", None):
        with pytest.raises(ValueError, match="not a number"):
            SentRule("clip-update", {"bound": value})  # type: ignore[dict-item]


def test_the_rule_follows_the_rate() -> None:
    """In parameter units the bound in gradient units grows as the rate decays."""
    strategy = FatClippingPI(0.5, 2, clip_units="parameter", local_rate=LocalRate(0.5, 0.5))
    apps = {10 + i: runs(quadratic_app(i, attests=True)) for i in range(2)}
    grid = MemoryGrid(apps)
    result = strategy.start(grid, initial_model(), num_rounds=2, timeout=30.0)
    rules = [SentRule.of(m.content) for m in grid.sent if m.metadata.message_type == "train"]
    assert [rule.numbers["bound"] for rule in rules] == [1.0, 1.0, 2.0, 2.0]
    assert np.isfinite(vector_of(result.arrays)).all()
