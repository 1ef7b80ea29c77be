"""Any Flower ClientApp takes part: every update-level rule by the mod, from the message alone."""

import logging
import math
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from memory_grid import MemoryGrid, runs
from own_project import (
    EXAMPLES,
    RATE,
    STEPS,
    counted_mod,
    network,
    plain_fedavg,
    plain_sgd,
    project_app,
    project_grid,
)

from blackthorn import client_app
from blackthorn.client_app import Round, mod
from blackthorn.strategies import (
    CEFedAvg,
    ClipNorm,
    DPFedAvg,
    DPNormFedAvg,
    FatClippingPI,
    FatClippingPR,
    FederatedStrategy,
    FedLangevin,
    FullParticipation,
    GFedAvg,
    ModelClipping,
    NotEnoughClients,
    PrivacyPlan,
    Rage,
    RoundReport,
)
from blackthorn.strategies.bounding import normalize

OPTIONS: dict[str, Any] = {"local_rate": RATE, "num_clients": 3}


def reports_of(strategy: FederatedStrategy) -> list[RoundReport]:
    reports: list[RoundReport] = []
    strategy._observers.append(reports.append)
    return reports


def start(
    strategy: FederatedStrategy, grid: MemoryGrid, model: Any, rounds: int = 2
) -> ArrayRecord:
    arrays = model if isinstance(model, ArrayRecord) else ArrayRecord(model.state_dict())
    return strategy.start(grid, arrays, num_rounds=rounds, timeout=60).arrays


def wrapped(message: Message, model: torch.nn.Module) -> torch.optim.Optimizer:
    return Round.of(message).wrap(torch.optim.SGD(model.parameters(), lr=RATE))


WIDE: dict[str, FederatedStrategy] = {
    "gfedavg": GFedAvg(**OPTIONS),
    "query": GFedAvg(identity="query", weighting="num-examples", **OPTIONS),
    "clipped": FatClippingPR(1e6, **OPTIONS),
    "ce-fedavg": CEFedAvg(1e6, **OPTIONS),
    "models": ModelClipping(1e6, **OPTIONS),
    "rage": Rage(0, **OPTIONS),
    "steps": FatClippingPI(1e6, STEPS, **OPTIONS),
}


@pytest.mark.parametrize("kind", WIDE)
@pytest.mark.parametrize("by_reply", [False, True])
def test_where_no_bound_bites_it_is_plain_fedavg_batch_norm_included(
    kind: str, by_reply: bool
) -> None:
    strategy = WIDE[kind]
    grid = project_grid(prepare=wrapped, mods=[counted_mod()], replies=by_reply)
    reports = reports_of(strategy)
    final = start(strategy, grid, network())
    strategy._observers.clear()
    assert all(len(report.accepted) == 3 for report in reports)
    for name, value in plain_fedavg(2).items():
        if value.is_floating_point():
            np.testing.assert_allclose(final[name].numpy(), value, rtol=2e-4, atol=2e-5)


def updates_of(strategy: FederatedStrategy, **options: Any) -> list[torch.Tensor]:
    reports = reports_of(strategy)
    start(strategy, project_grid(**options), options.get("model", network)(), 1)
    assert reports[0].updates is not None
    assert len(reports[0].accepted) == 3
    assert reports[0].over_bound == []
    return list(reports[0].updates)


@pytest.mark.parametrize("by_reply", [False, True])
def test_the_mod_clips_what_the_app_has_trained_and_once(by_reply: bool) -> None:
    plain = updates_of(GFedAvg(**OPTIONS), mods=[])
    assert min(float(u.norm()) for u in plain) > 0.5
    clipped = updates_of(FatClippingPR(0.5, **OPTIONS), replies=by_reply)
    for u, v in zip(plain, clipped, strict=True):
        np.testing.assert_allclose(v, u * (0.5 / float(u.norm())), rtol=1e-3, atol=1e-5)


def test_without_the_mod_the_server_bounds_and_says_who_did_not() -> None:
    strategy = FatClippingPR(0.5, **OPTIONS)
    reports = reports_of(strategy)
    start(strategy, project_grid(mods=[]), network(), 1)
    assert reports[0].over_bound == [10, 11, 12]


def private(kind: type[DPFedAvg] | type[DPNormFedAvg], z: float, **more: Any) -> FederatedStrategy:
    plan = PrivacyPlan(
        ClipNorm(1.0),
        noise_multiplier=z,
        num_clients=3,
        rounds=1,
        participation=FullParticipation(),
        noise_location="client",
        **more,
    )
    return kind(plan, local_rate=RATE)


@pytest.mark.parametrize("kind", [DPFedAvg, DPNormFedAvg])
def test_noise_of_the_mod_has_the_plan_s_variance(kind: Any) -> None:
    """u_i is g_i plus N(0, (z C)²/s I): deviation z C/√s, over 3 clients' coordinates."""
    z = 40.0
    strategy = private(kind, z)
    big = torch.nn.Linear(5, 3000)
    grid = project_grid(model=lambda: torch.nn.Linear(5, 3000))
    reports = reports_of(strategy)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.nn.functional.cross_entropy", lambda out, _: out.square().mean())
        start(strategy, grid, big, 1)
    assert reports[0].updates is not None
    found = reports[0].updates.double()
    assert found.shape == (3, 18000)
    assert float(found.std()) == pytest.approx(z / math.sqrt(3), rel=0.02)
    # Each its own.
    assert abs(float(torch.corrcoef(found)[0, 1])) < 0.05


def test_under_noise_the_update_is_normalised_first() -> None:
    plain = updates_of(GFedAvg(**OPTIONS), mods=[], model=without_norm)
    strategy = private(DPNormFedAvg, 1e-4, claim=False)
    reports = reports_of(strategy)
    start(strategy, project_grid(model=without_norm), without_norm(), 1)
    assert reports[0].updates is not None
    for u, v in zip(plain, reports[0].updates, strict=True):
        np.testing.assert_allclose(v, normalize(u, 1.0), atol=2e-3)


def without_norm() -> torch.nn.Module:
    return network(norm=False)


def said_under_a_claim(**options: Any) -> list[Message]:
    replies: list[Message] = []
    inner = runs(project_app(0, model=without_norm, mods=[mod], **options), **{"partition-id": 0})

    def answer(message: Message) -> Message | None:
        reply = inner(message)
        assert reply is not None
        replies.append(reply)
        return reply

    nodes = {10: answer} | {
        10 + i: runs(project_app(i, model=without_norm, mods=[mod]), **{"partition-id": i})
        for i in (1, 2)
    }
    start(private(DPFedAvg, 1.0), MemoryGrid(nodes), without_norm(), 1)
    return replies


@pytest.mark.parametrize("by_reply", [False, True])
def test_under_noise_a_client_says_nothing_of_its_examples(by_reply: bool) -> None:
    (reply,) = said_under_a_claim(replies=by_reply)
    assert {k: dict(v) for k, v in reply.content.metric_records.items()} == {
        "metrics": {"num-examples": 1}
    }
    assert set(reply.content) == {"arrays", "metrics", "attested"}


def test_under_noise_an_exception_tells_no_example() -> None:
    def fails(message: Message, model: torch.nn.Module) -> torch.optim.Optimizer:
        del message, model
        raise ValueError("row 17 holds a diagnosis")

    (reply,) = said_under_a_claim(prepare=fails)
    assert reply.has_error()
    reason = str(reply.error.reason)
    assert "diagnosis" not in reason
    assert "under a privacy claim" in reason


# What the app has to do itself.


@pytest.mark.parametrize("mods", [[], [mod]])
def test_clipped_steps_are_asked_for_in_one_line(
    mods: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    strategy = FatClippingPI(1.0, STEPS, **OPTIONS)
    with caplog.at_level(logging.WARNING, logger="blackthorn"):
        final = start(strategy, project_grid(mods=mods), network(), 1)
    for name, value in network().state_dict().items():
        np.testing.assert_array_equal(final[name].numpy(), value)
    lines = [line for line in caplog.messages if "client 10 rejected" in line]
    assert len(lines) == 1
    for word in (
        "clip-gradient (bound = 1, local-steps = 4)",
        "mods=[blackthorn.client_app.mod]",
        "Round.of(message).wrap(optimizer)",
    ):
        assert word in lines[0]


def test_who_does_not_say_which_client_it_is_ends_the_run_at_once() -> None:
    """Not after the two minutes that clients are waited for."""
    strategy = FedLangevin(1e-3, num_clients=3, start_timeout=3600.0)
    line = r"of 3 connected nodes each does not say which client it holds: add mods=\[blackthorn"
    with pytest.raises(NotEnoughClients, match=line) as raised:
        start(strategy, project_grid(mods=[]), network())
    assert "\n" not in str(raised.value)


def test_one_that_says_it_is_waited_for() -> None:
    grid = project_grid(mods=[])
    grid.nodes[12] = runs(project_app(2, mods=[mod]), **{"partition-id": 2})
    strategy = GFedAvg(identity="query", start_timeout=0.5, **OPTIONS)
    reports = reports_of(strategy)
    start(strategy, grid, network(), 1)
    assert reports[0].accepted == [2]


def test_a_posterior_needs_the_clients_counts() -> None:
    strategy = FedLangevin(1e-3, num_clients=3)
    with pytest.raises(ValueError, match=r"client 0 does not say how many examples it has, on"):
        start(strategy, project_grid(), network())


# Enrolment.


def asked(app: ClientApp, claim: bool = False, **node: Any) -> Message:
    config = ConfigRecord({"ask": "enrol"})
    if claim:
        config["claim"] = "client"
    message = Message(RecordDict({"config": config}), dst_node_id=10, message_type="train")
    return app(message, Context(1, 10, node, RecordDict(), {}))


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        ({"partition-id": 4}, {"client-id": 4}),
        ({"partition-id": 4, "client-id": 7}, {"client-id": 7}),
        ({"client-id": 7, "num-examples": 30}, {"client-id": 7, "num-examples": 30}),
    ],
)
def test_the_node_config_says_who_it_is(node: dict[str, Any], expected: dict[str, int]) -> None:
    reply = asked(project_app(0, mods=[mod]), **node)
    assert dict(reply.content.metric_records["metrics"]) == expected


def test_the_number_of_examples_may_be_a_function_and_is_withheld_under_a_claim() -> None:
    app = project_app(0, mods=[counted_mod()])
    for claim, expected in ((False, EXAMPLES), (True, 1)):
        metrics = asked(app, claim, **{"client-id": 7}).content.metric_records["metrics"]
        assert metrics["num-examples"] == expected


def test_a_node_without_an_id_says_what_it_lacks() -> None:
    nodes = {10: runs(project_app(0, mods=[mod]))}
    strategy = GFedAvg(identity="query", num_clients=1, start_timeout=0.3)
    with pytest.raises(NotEnoughClients, match="the node config names no client: give --node-co"):
        start(strategy, MemoryGrid(nodes), network())


# Statistics of one's own, and messages of others.


def test_local_statistics_stay_with_their_client() -> None:
    """FedBN's: each client's are what its own training left, round after round."""
    grid, seen = project_grid(), dict[int, list[ArrayRecord]]()
    answers = dict(grid.nodes)
    for node, answer in answers.items():

        def watched(message: Message, node: int = node, answer: Any = answer) -> Message | None:
            reply = answer(message)
            if message.metadata.message_type == "train":
                seen.setdefault(node, []).append(message.content.array_records["arrays"])
            return reply

        grid.nodes[node] = watched
    final = start(GFedAvg(statistics="local", **OPTIONS), grid, network(), 3)
    first = network().state_dict()["1.running_mean"]
    np.testing.assert_array_equal(final["1.running_mean"].numpy(), first)
    last = {node: arrays[-1]["1.running_mean"].numpy() for node, arrays in seen.items()}
    for node, own in last.items():
        assert not np.array_equal(own, first)
        assert all(not np.array_equal(own, last[other]) for other in last if other != node)


def test_another_strategy_of_the_same_run_begins_with_its_own_statistics() -> None:
    """What the app is given, train and evaluate, of two strategies and of the first going on."""
    given: list[np.ndarray] = []

    def noting(message: Message, context: Context, call_next: Any) -> Message:
        arrays = message.content.array_records.get("arrays")
        if arrays is not None and message.metadata.dst_node_id == 10:
            given.append(arrays["1.running_mean"].numpy())
        return call_next(message, context)

    grid = project_grid(mods=[mod, noting])
    one, other = (GFedAvg(statistics="local", **OPTIONS) for _ in range(2))
    first, second = network(), network()
    with torch.no_grad():
        second.get_buffer("1.running_mean").fill_(3.0)
    start(one, grid, first)
    state = one.state()
    assert not np.array_equal(given[0], given[-1])
    for strategy in (other, one):
        given.clear()
        start(strategy, grid, second)
        assert set(given[0].tolist()) == {3.0}
    given.clear()
    initial = ArrayRecord(first.state_dict())
    one.start(grid, initial, num_rounds=3, timeout=60, from_state=state)
    gone_on = given.copy()
    given.clear()
    start(GFedAvg(statistics="local", **OPTIONS), project_grid(mods=[mod, noting]), first, 3)
    np.testing.assert_array_equal(gone_on, given[-len(gone_on) :])


def test_loading_by_the_round_begins_with_the_statistics_that_were_kept() -> None:
    begun: list[tuple[int, np.ndarray]] = []

    def loaded(message: Message, model: torch.nn.Module) -> torch.optim.Optimizer:
        own = network()
        Round.of(message).load(own)
        for found, expected in zip(own.parameters(), model.parameters(), strict=True):
            assert torch.equal(found, expected)
        node = message.metadata.dst_node_id
        begun.append((node, own.state_dict()["1.running_mean"].numpy()))
        return plain_sgd(message, model)

    final = start(
        GFedAvg(statistics="local", **OPTIONS), project_grid(prepare=loaded), network(), 2
    )
    first = final["1.running_mean"].numpy()
    of_rounds = [[mean for n, mean in begun if n == node] for node in {n for n, _ in begun}]
    assert len(of_rounds) == 3
    for before, after in of_rounds:
        np.testing.assert_array_equal(before, first)
        assert not np.array_equal(after, first)


def test_a_message_without_a_rule_is_the_app_s() -> None:
    app = project_app(0, mods=[mod])
    arrays = ArrayRecord(network().state_dict())
    message = Message(RecordDict({"arrays": arrays}), dst_node_id=10, message_type="train")
    reply = app(message, Context(1, 10, {}, RecordDict(), {}))
    assert set(reply.content) == {"arrays", "metrics"}
    with pytest.raises(ValueError, match="the message names no rule"):
        Round.of(message)


def test_tied_parameters_that_would_count_twice_are_refused() -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = torch.nn.Linear(5, 5), torch.nn.Linear(5, 5)
            self.two.weight = self.one.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.two(self.one(x))

    strategy, arrays = FatClippingPR(1.0, **OPTIONS), ArrayRecord(Tied().state_dict())
    reports = reports_of(strategy)
    start(strategy, project_grid(model=Tied), arrays, 1)
    assert len(reports[0].rejected) == 3
    assert "'two.weight' and 'one.weight' are one parameter" in reports[0].rejected[0].reason
    strategy = FatClippingPR(1.0, **OPTIONS)
    reports = reports_of(strategy)
    strategy.start(project_grid(model=Tied), Tied(), num_rounds=1, timeout=60)
    assert len(reports[0].accepted) == 3


def test_both_names_are_there_from_the_package() -> None:
    assert set(client_app.__all__) == {"Mod", "Round", "TrainerRound", "mod"}
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = client_app.nothing
    assert isinstance(mod, client_app.Mod)
