"""Whole rounds over a grid in memory, against the same recursions written out in NumPy."""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import Strategy
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from memory_grid import (
    DIMENSION,
    Answer,
    MemoryGrid,
    centre,
    initial_model,
    quadratic_app,
    runs,
    silence,
    trained,
    vector_of,
)

from blackthorn import attacks
from blackthorn.strategies import (
    FederatedStrategy,
    FixedParticipation,
    GFedAvg,
    LocalRate,
    NotEnoughClients,
    PoissonParticipation,
    Rage,
    Rejection,
    RoundContext,
    RoundReport,
    ServerStep,
)
from blackthorn.strategies.aggregation import Aggregate

LONG = 60.0
# Enough for those who answer at once, on a busy machine too.
DEADLINE = 3.0
# Node ids on both sides of 2^63, as Flower draws them.
NODES = [2**63 + 11, 7, 2**64 - 5, 90, 2**40, 5000]


def honest_grid(num_clients: int = 5, **options: Any) -> MemoryGrid:
    """Client i on node NODES[i]; plain Flower apps."""
    nodes = {NODES[i]: runs(quadratic_app(i)) for i in range(num_clients)}
    return MemoryGrid(nodes, **options)


def by_hand(
    cohorts: Sequence[Sequence[int]],
    *,
    local_lrs: Sequence[float] | None = None,
    server_lr: float = 1.0,
    momentum: float = 0.0,
    radius: float = math.inf,
    weights: Mapping[int, float] | None = None,
) -> list[np.ndarray]:
    """w after every round, float64: u_i, the mean, the momentum, the step, the ball."""
    w = first = np.arange(DIMENSION) / 4
    v = np.zeros(DIMENSION)
    models = []
    for cohort, lr in zip(cohorts, local_lrs or [1.0] * len(cohorts), strict=True):
        weight = dict.fromkeys(cohort, 1.0) if weights is None else weights
        total = sum(weight[i] for i in cohort)
        mean = np.zeros(DIMENSION)
        for i in cohort:
            mean += weight[i] / total * (w - trained(w, i)) / lr
        v = momentum * v + mean
        w = w - server_lr * lr * v
        distance = np.linalg.norm(w - first)
        if distance > radius:
            w = first + radius / distance * (w - first)
        models.append(w)
    return models


class Diary:
    """An observer that keeps every report."""

    def __init__(self) -> None:
        self.reports: list[RoundReport] = []

    def __call__(self, report: RoundReport) -> None:
        self.reports.append(report)


def close(found: ArrayRecord | torch.Tensor, expected: np.ndarray) -> None:
    vector = vector_of(found) if isinstance(found, ArrayRecord) else found.double().numpy()
    np.testing.assert_allclose(vector, expected, rtol=2e-5, atol=2e-5)


def run(
    strategy: FederatedStrategy, grid: MemoryGrid, rounds: int = 3, timeout: float = LONG
) -> ArrayRecord:
    return strategy.start(grid, initial_model(), num_rounds=rounds, timeout=timeout).arrays


# What a round computes.


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"server_lr": 0.5},
        {"server_lr": 2.0, "momentum": 0.8},
        {"momentum": 0.8, "radius": 0.7},
        {"radius": 100.0},
    ],
)
@pytest.mark.parametrize("decay", [1.0, 0.5])
def test_gfedavg_is_fedavg_by_hand(options: dict[str, Any], decay: float) -> None:
    lrs = [0.25 * decay**t for t in range(4)]
    expected = by_hand([range(5)] * 4, local_lrs=lrs, **options)
    step = ServerStep(
        options.get("server_lr", 1.0), options.get("momentum", 0.0), options.get("radius")
    )
    diary = Diary()
    strategy = GFedAvg(
        local_rate=LocalRate(0.25, decay), server_step=step, num_clients=5, observers=[diary]
    )
    close(run(strategy, honest_grid(), rounds=4), expected[-1])
    for report, model, lr in zip(diary.reports, expected, lrs, strict=True):
        close(report.model, model)
        assert report.local_lr == pytest.approx(lr)


def test_with_rate_one_and_full_participation_it_is_the_mean_of_the_models() -> None:
    """No rate, no momentum: nothing in the frame may be left in the result."""
    w = np.arange(DIMENSION) / 4
    for _ in range(3):
        w = np.mean([trained(w, i) for i in range(5)], axis=0)
    close(run(GFedAvg(num_clients=5), honest_grid()), w)


def test_only_the_cohort_takes_part() -> None:
    diary = Diary()
    strategy = GFedAvg(
        participation=FixedParticipation(2), num_clients=5, seed=3, observers=[diary]
    )
    found = run(strategy, honest_grid(), rounds=6)
    cohorts = [[NODES.index(node) for node in report.invited] for report in diary.reports]
    assert all(len(set(cohort)) == 2 for cohort in cohorts)
    assert len({tuple(cohort) for cohort in cohorts}) > 1
    close(found, by_hand(cohorts)[-1])


def test_example_counts_are_capped_by_what_was_declared() -> None:
    declared, claimed = [10, 20, 30], [10, 10**9, 3]
    apps = [
        quadratic_app(i, claimed[i], {"client-id": i, "num-examples": declared[i]})
        for i in range(3)
    ]
    grid = MemoryGrid({NODES[i]: runs(app) for i, app in enumerate(apps)})
    strategy = GFedAvg(weighting="num-examples", identity="query", num_clients=3)
    expected = by_hand([range(3)] * 3, weights={0: 10, 1: 20, 2: 3})
    close(run(strategy, grid), expected[-1])


def test_a_client_that_declares_nothing_weighs_one_example() -> None:
    apps = [
        quadratic_app(0, 10, {"client-id": 0, "num-examples": 10}),
        quadratic_app(1, 10**12, {"client-id": 1}),
    ]
    grid = MemoryGrid({NODES[i]: runs(app) for i, app in enumerate(apps)})
    strategy = GFedAvg(weighting="num-examples", identity="query")
    expected = by_hand([range(2)] * 3, weights={0: 10, 1: 1})
    close(run(strategy, grid), expected[-1])


def test_plain_apps_are_weighted_by_their_claims() -> None:
    nodes = {NODES[i]: runs(quadratic_app(i, 10 * (i + 1))) for i in range(3)}
    strategy = GFedAvg(weighting="num-examples", num_clients=3)
    expected = by_hand([range(3)] * 3, weights={0: 1, 1: 2, 2: 3})
    close(run(strategy, MemoryGrid(nodes)), expected[-1])


def test_buffers_keep_the_server_s_value_and_are_not_part_of_w() -> None:
    grid, diary = honest_grid(), Diary()
    final = run(GFedAvg(num_clients=5, observers=[diary]), grid)
    received = [m.content.array_records["arrays"] for m in grid.sent if m.has_content()]
    for arrays in [final, *received]:
        assert list(arrays) == list(initial_model())
        for name in ("norm.running_mean", "norm.num_batches_tracked"):
            value, first = arrays[name].numpy(), initial_model()[name].numpy()
            assert value.dtype == first.dtype
            np.testing.assert_array_equal(value, first)
    for report in diary.reports:
        assert report.updates is not None
        assert report.updates.shape == (5, DIMENSION)


def test_a_subclass_bounds_the_updates() -> None:
    class Halved(GFedAvg):
        def bound(self, updates: torch.Tensor, context: RoundContext) -> torch.Tensor:
            assert context.model.shape == (DIMENSION,)
            assert context.local_lr == 1.0
            return updates / 2

    close(run(Halved(num_clients=5), honest_grid()), by_hand([range(5)] * 3, server_lr=0.5)[-1])


def outlier(client: int, factor: float = -50.0) -> Answer:
    """Client i, whose update is multiplied by `factor`."""
    honest = runs(quadratic_app(client))

    def answer(message: Message) -> Message | None:
        reply = honest(message)
        if reply is None or message.metadata.message_type != "train":
            return reply
        received = message.content.array_records["arrays"]
        local = reply.content.array_records["arrays"]
        for name in ("weight", "bias"):
            w, w_i = received[name].numpy(), local[name].numpy()
            local[name] = Array(w + np.float32(factor) * (w_i - w))
        return reply

    return answer


def test_rage_keeps_out_the_attacker_that_owns_the_mean() -> None:
    results = {}
    honest = by_hand([range(5)] * 3)[-1]
    for strategy in (Rage(num_corrupt=1, num_clients=6), GFedAvg(num_clients=6)):
        grid = honest_grid()
        grid.nodes[NODES[5]] = outlier(5)
        results[type(strategy)] = run(strategy, grid)
    close(results[Rage], honest)
    assert np.linalg.norm(vector_of(results[GFedAvg]) - honest) > 10


def test_rage_changes_an_honest_round_too() -> None:
    """b = 1 always costs one client: whoever stretches the covariance most."""
    diary = Diary()
    found = run(Rage(num_corrupt=1, observers=[diary]), honest_grid(), rounds=1)
    w = np.arange(DIMENSION) / 4
    updates = np.array([w - trained(w, i) for i in range(5)])
    centred = updates - updates.mean(axis=0)
    axis = np.linalg.eigh(centred.T @ centred)[1][:, -1]
    # The filter's first step takes out the largest projection, which is enough here.
    worst = int(np.argmax((centred @ axis) ** 2))
    kept = [i for i in range(5) if i != worst]
    assert diary.reports[0].filtered == [NODES[worst]]
    close(found, by_hand([kept])[-1])


# What clients may do.

REASONS = {
    "nan": "not finite",
    "infinite": "not finite",
    "wrong-shape": "weight: shape (7,), expected (2, 3)",
    "wrong-dtype": "weight: dtype complex64, expected float32",
    "missing-key": "missing entry 'bias'",
    "extra-key": "unexpected entry 'extra'",
    "empty-arrays": "missing entry 'weight' (4 missing)",
    "empty-record": "0 array records",
    "lying-header": "weight: shape (7,), expected (2, 3)",
    "lying-payload": "weight: shape (1099511627776,)",
    "object-array": "weight: dtype object, expected float32",
    "garbage": "the payload is not a NumPy array",
    "huge-count": "num-examples = 1e+30",
    "raise": "refuses to answer",
}
SILENT = {"slow", "exit"}


def attacker(name: str) -> Answer:
    """Client 5, which trains honestly and answers with an attack of `misbehaviour`."""
    honest = runs(quadratic_app(5))
    attack: Any = attacks.get(name)

    def answer(message: Message) -> Message | None:
        reply = honest(message)
        if message.metadata.message_type != "train":
            return reply
        if attack.absence == "silence":
            return None
        try:
            return attack(reply)
        except RuntimeError as error:
            return Message(Error(2, str(error)), reply_to=message)

    return answer


def test_every_misbehaviour_has_its_reason() -> None:
    # A huge but finite model is screening's to let through: bounds and filters are for it.
    assert {*REASONS, *SILENT, "huge"} == set(attacks.names("reply"))


@pytest.mark.parametrize("weighting", ["uniform", "num-examples"])
@pytest.mark.parametrize("name", REASONS)
def test_misbehaviour_is_named_and_changes_nothing(name: str, weighting: Any) -> None:
    grid, diary = honest_grid(), Diary()
    grid.nodes[NODES[5]] = attacker(name)
    strategy = GFedAvg(num_clients=6, weighting=weighting, observers=[diary])
    found = run(strategy, grid, rounds=2)
    close(found, by_hand([range(5)] * 2)[-1])
    for report in diary.reports:
        assert [r.client for r in report.rejected] == [NODES[5]]
        assert REASONS[name] in report.rejected[0].reason
        assert report.skipped is None
        assert set(report.accepted) == set(NODES[:5])


def test_a_client_that_never_answers_is_named_and_changes_nothing() -> None:
    assert all(getattr(attacks.get(name), "absence", None) == "silence" for name in SILENT)
    grid, diary = honest_grid(), Diary()
    grid.nodes[NODES[5]] = attacker("slow")
    began = time.monotonic()
    found = run(GFedAvg(num_clients=6, observers=[diary]), grid, rounds=1, timeout=DEADLINE)
    assert DEADLINE <= time.monotonic() - began < DEADLINE + 5
    close(found, by_hand([range(5)])[-1])
    assert diary.reports[0].rejected == [Rejection(NODES[5], "no reply by the deadline")]


def test_a_huge_model_is_rage_s_to_filter() -> None:
    grid, diary = honest_grid(), Diary()
    grid.nodes[NODES[5]] = attacker("huge")
    found = run(Rage(num_corrupt=1, num_clients=6, observers=[diary]), grid)
    close(found, by_hand([range(5)] * 3)[-1])
    assert [report.filtered for report in diary.reports] == [[NODES[5]]] * 3
    assert [report.rejected for report in diary.reports] == [[]] * 3


@pytest.mark.parametrize("make", [lambda **o: Rage(1, **o), GFedAvg])
def test_an_update_that_overflows_ends_no_round(make: Callable[..., FederatedStrategy]) -> None:
    """w_i fits float32, (w - w_i)/η does not: as a row it would make every rule fail, always."""
    grid, diary = honest_grid(), Diary()
    grid.nodes[NODES[5]] = outlier(5, factor=1e38)
    run(make(num_clients=6, local_rate=1e-3, observers=[diary]), grid)
    for report in diary.reports:
        assert [r.client for r in report.rejected] == [NODES[5]]
        assert "too large" in report.rejected[0].reason
        assert report.skipped is None


def test_errors_written_by_the_superlink_are_attributed() -> None:
    def gone(message: Message) -> Message:
        error = Message(Error(5, "node unavailable"), reply_to=message)
        error.metadata.__dict__["_src_node_id"] = 1
        return error

    grid, diary = honest_grid(), Diary()
    grid.nodes[NODES[5]] = gone
    close(
        run(GFedAvg(num_clients=6, observers=[diary]), grid),
        by_hand([range(5)] * 3)[-1],
    )
    assert diary.reports[0].rejected[0].client == NODES[5]
    assert diary.reports[0].rejected[0].reason == "its node is no longer connected"


def test_a_node_that_never_says_who_it_is_delays_no_round() -> None:
    apps = [quadratic_app(i, 10, {"client-id": i}) for i in range(5)]
    grid = MemoryGrid({NODES[i]: runs(app) for i, app in enumerate(apps)})
    grid.nodes[NODES[5]] = silence
    strategy = GFedAvg(identity="query", num_clients=5)
    began = time.monotonic()
    close(run(strategy, grid), by_hand([range(5)] * 3)[-1])
    assert time.monotonic() - began < LONG / 2


# Rounds that leave the model as it was.


def test_a_round_with_too_few_replies_is_skipped(caplog: pytest.LogCaptureFixture) -> None:
    grid, diary = honest_grid(), Diary()
    for node in NODES[2:5]:
        grid.nodes[node] = lambda message: Message(Error(2, "tired"), reply_to=message)
    strategy = GFedAvg(num_clients=5, min_replies=3, observers=[diary])
    with caplog.at_level(logging.WARNING, "blackthorn"):
        found = run(strategy, grid, rounds=1)
    assert diary.reports[0].skipped == "2 replies, fewer than 3"
    assert len(diary.reports[0].rejected) == 3
    np.testing.assert_array_equal(vector_of(found), np.arange(DIMENSION) / 4)
    assert "round 1 left the model as it was: 2 replies, fewer than 3" in caplog.text
    assert f"round 1: client {NODES[2]} rejected: error 2: tired" in caplog.text


def test_rage_with_too_few_replies_never_averages() -> None:
    """b = 2 needs 7 replies; of 8 clients, 2 fail in every round."""
    nodes: dict[int, Answer] = {10 + i: runs(quadratic_app(i)) for i in range(6)}
    for node in (16, 17):
        nodes[node] = lambda message: Message(Error(2, "tired"), reply_to=message)
    diary = Diary()
    found = run(Rage(num_corrupt=2, num_clients=8, observers=[diary]), MemoryGrid(nodes))
    for report in diary.reports:
        assert len(report.accepted) == 6
        assert report.skipped is not None
        assert "num_corrupt = 2 with K = 6" in report.skipped
        assert report.weights is None
    np.testing.assert_array_equal(vector_of(found), np.arange(DIMENSION) / 4)
    # With a fraction, the filter assumes fewer among fewer: floor(0.3 · 6) = 1.
    run(Rage(corrupt_fraction=0.3, num_clients=8, observers=[diary]), MemoryGrid(nodes))
    assert [len(report.filtered) for report in diary.reports[3:]] == [1, 1, 1]


def test_rage_waits_for_the_fewest_clients_it_can_protect() -> None:
    with pytest.raises(NotEnoughClients, match="3 of 4 clients"):
        run(Rage(num_corrupt=1, start_timeout=0.05, min_replies=4), honest_grid(3))


def test_an_empty_cohort_is_a_round() -> None:
    grid, diary = honest_grid(), Diary()
    strategy = GFedAvg(participation=PoissonParticipation(1e-9), num_clients=5, observers=[diary])
    began = time.monotonic()
    found = run(strategy, grid)
    assert time.monotonic() - began < LONG / 2
    assert [report.skipped for report in diary.reports] == ["0 replies, fewer than 1"] * 3
    assert [report.invited for report in diary.reports] == [[], [], []]
    assert not [m for m in grid.sent if m.metadata.message_type == "train"]
    np.testing.assert_array_equal(vector_of(found), np.arange(DIMENSION) / 4)


def test_momentum_does_not_move_the_model_in_a_skipped_round() -> None:
    tired: list[str] = []

    def sometimes(message: Message) -> Message | None:
        if message.metadata.message_type == "train" and message.metadata.group_id == "2":
            tired.append(message.metadata.group_id)
            return Message(Error(2, "tired"), reply_to=message)
        return runs(quadratic_app(0))(message)

    grid, diary = MemoryGrid({1: sometimes}), Diary()
    step = ServerStep(momentum=0.5)
    found = run(GFedAvg(num_clients=1, server_step=step, observers=[diary]), grid)
    assert tired == ["2"]
    assert diary.reports[1].skipped is not None
    close(found, by_hand([[0]] * 2, momentum=0.5)[-1])


def test_a_step_that_leaves_the_range_is_not_taken() -> None:
    """The mean is defenceless, but the model must stay one that clients can train on."""
    grid, diary = honest_grid(1), Diary()
    grid.nodes[NODES[5]] = outlier(5, factor=1e37)
    step = ServerStep(server_lr=100.0)
    found = run(GFedAvg(server_step=step, observers=[diary]), grid)
    assert {report.skipped for report in diary.reports} == {
        "the updates cannot be aggregated: the model would not stay finite"
    }
    np.testing.assert_array_equal(vector_of(found), np.arange(DIMENSION) / 4)


def test_a_rule_that_refuses_is_skipped_and_one_that_is_broken_is_not() -> None:
    def rule(error: Exception) -> Callable[..., Aggregate]:
        def refuse(*given: Any) -> Aggregate:
            assert len(given) == 3
            raise error

        return refuse

    diary = Diary()
    refusing = GFedAvg(aggregator=rule(ValueError("too few")), num_clients=5, observers=[diary])
    run(refusing, honest_grid(), rounds=1)
    assert diary.reports[0].skipped == "the updates cannot be aggregated: too few"
    with pytest.raises(RuntimeError, match="a bug"):
        run(GFedAvg(aggregator=rule(RuntimeError("a bug")), num_clients=5), honest_grid())


# What the clients are told, and when.


def test_what_the_messages_say() -> None:
    grid = honest_grid(3)
    config = ConfigRecord({"seed": 5, "local-lr": 99.0})
    strategy = GFedAvg(local_rate=LocalRate(0.5, 0.5), num_clients=3)
    strategy.start(grid, initial_model(), num_rounds=2, timeout=17.0, train_config=config)
    orders = [m for m in grid.sent if m.metadata.message_type == "train"]
    assert [m.metadata.dst_node_id for m in orders] == sorted(NODES[:3]) * 2
    for position, message in enumerate(orders):
        server_round = position // 3 + 1
        told = dict(message.content.config_records["config"])
        assert len(str(told.pop("nonce"))) == 32
        assert told == {
            "seed": 5,
            "local-lr": 0.5**server_round,
            "rounds-begun": server_round,
            "server-round": server_round,
            "client-id": message.metadata.dst_node_id,
        }
        assert message.metadata.ttl == 17.0
        assert message.metadata.group_id == str(server_round)
        assert get_all_nested_objects(message)  # Flower can send it, large ids included
    assert dict(config) == {"seed": 5, "local-lr": 99.0}
    # Nobody works on an evaluation that is over either.
    asked = [m for m in grid.sent if m.metadata.message_type == "evaluate"]
    assert len(asked) == 6
    assert {m.metadata.ttl for m in asked} == {17.0}


def test_the_run_waits_for_its_clients_and_says_who_is_missing() -> None:
    apps = [quadratic_app(i, 10, {"client-id": i}) for i in (0, 2)]
    grid = MemoryGrid({NODES[i]: runs(app) for i, app in enumerate(apps)})
    strategy = GFedAvg(identity="query", num_clients=4, min_replies=3, start_timeout=1.5)
    with pytest.raises(NotEnoughClients, match=r"2 of 4 clients connected.*missing: 1, 3"):
        run(strategy, grid)


def test_a_run_whose_clients_are_all_gone_does_not_go_on_for_its_other_rounds() -> None:
    class Leaving(MemoryGrid):
        def get_node_ids(self) -> list[int]:
            # All leave once they have answered the second round.
            trained = [m for m in self.sent if m.metadata.message_type == "train"]
            return super().get_node_ids() if len(trained) < 6 else []

    diary = Diary()
    strategy = GFedAvg(num_clients=3, start_timeout=0.5, observers=[diary])
    with pytest.raises(NotEnoughClients, match=r"nobody has been connected for 0.5 s"):
        run(strategy, Leaving(honest_grid(3).nodes), rounds=50)
    assert [report.server_round for report in diary.reports] == [1, 2]


def test_a_client_keeps_its_place_when_its_node_registers_anew() -> None:
    apps = [quadratic_app(i, 10, {"client-id": i}) for i in range(3)]

    class Restarting(MemoryGrid):
        def push_messages(self, messages: Any) -> list[str]:
            sent = list(messages)
            ids = super().push_messages(sent)
            if sent[0].metadata.group_id == "1" and sent[0].metadata.message_type == "train":
                self.later = {NODES[0]: 4, NODES[1]: 5, NODES[2]: 6}
            return ids

        def get_node_ids(self) -> list[int]:
            for old, new in getattr(self, "later", {}).items():
                if old in self.nodes:
                    self.nodes[new] = self.nodes.pop(old)
            return super().get_node_ids()

    grid = Restarting({NODES[i]: runs(app) for i, app in enumerate(apps)})
    diary = Diary()
    strategy = GFedAvg(identity="query", num_clients=3, min_replies=3, observers=[diary])
    close(run(strategy, grid), by_hand([range(3)] * 3)[-1])
    assert [report.invited for report in diary.reports] == [[0, 1, 2]] * 3
    assert [report.rejected for report in diary.reports] == [[]] * 3


def test_a_second_run_of_the_same_strategy_begins_anew() -> None:
    step = ServerStep(momentum=0.5)
    lrs, diary = [0.5, 0.25, 0.125], Diary()
    rate = LocalRate(0.5, 0.5)
    strategy = GFedAvg(local_rate=rate, server_step=step, num_clients=5, observers=[diary])
    expected = by_hand([range(5)] * 3, local_lrs=lrs, momentum=0.5)[-1]
    for _ in range(2):
        close(run(strategy, honest_grid()), expected)
    assert [report.local_lr for report in diary.reports] == lrs * 2


# Evaluation and observers.


def test_the_server_evaluates_and_the_rate_follows() -> None:
    accuracies = [0.1, 0.5, 0.5004, 0.9, 0.8]
    seen: list[tuple[int, np.ndarray]] = []

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        seen.append((server_round, vector_of(arrays)))
        return MetricRecord({"accuracy": accuracies[server_round], "classes": [1, 2]})

    diary = Diary()
    rate = LocalRate(0.5, 0.5, "plateau", 0.001)
    strategy = GFedAvg(local_rate=rate, num_clients=5, observers=[diary])
    result = strategy.start(
        honest_grid(), initial_model(), num_rounds=4, timeout=LONG, evaluate_fn=evaluate
    )
    # Round 2 gained 0.0004: the rate falls for round 3. Round 4's loss is the end's.
    assert [report.local_lr for report in diary.reports] == [0.5, 0.5, 0.5, 0.25, 0.25]
    assert [report.metrics for report in diary.reports] == [{"accuracy": a} for a in accuracies]
    assert {report.evaluated_by for report in diary.reports} == {"server"}
    assert list(result.evaluate_metrics_serverapp) == [0, 1, 2, 3, 4]
    models = [np.arange(DIMENSION) / 4, *by_hand([range(5)] * 4)]
    for (server_round, found), expected in zip(seen, models, strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5, err_msg=str(server_round))


def test_evaluation_may_be_rare_and_the_last_round_always_has_one() -> None:
    diary = Diary()
    strategy = GFedAvg(num_clients=5, evaluate_every=2, observers=[diary])
    strategy.start(
        honest_grid(),
        initial_model(),
        num_rounds=5,
        timeout=LONG,
        evaluate_fn=lambda server_round, _: MetricRecord({"loss": float(server_round)}),
    )
    assert [r.metrics for r in diary.reports] == [
        {"loss": 0.0},
        {},
        {"loss": 2.0},
        {},
        {"loss": 4.0},
        {"loss": 5.0},
    ]
    assert "evaluation" not in diary.reports[1].seconds


def test_without_a_test_set_the_clients_evaluate() -> None:
    diary = Diary()
    nodes = {NODES[i]: runs(quadratic_app(i, 10 * (i + 1))) for i in range(3)}
    strategy = GFedAvg(num_clients=3, observers=[diary])
    result = strategy.start(MemoryGrid(nodes), initial_model(), num_rounds=2, timeout=LONG)
    for report, w in zip(diary.reports, by_hand([range(3)] * 2), strict=True):
        losses = [0.5 * np.sum((w - centre(i)) ** 2) for i in range(3)]
        assert report.metrics == {
            "loss": pytest.approx(float(np.average(losses, weights=[1, 2, 3])), rel=1e-4)
        }
        assert report.evaluated_by == "clients"
    assert list(result.evaluate_metrics_clientapp) == [1, 2]
    assert list(result.evaluate_metrics_serverapp) == []


def test_observers_get_the_round_and_cannot_change_it() -> None:
    diary = Diary()

    def meddler(report: RoundReport) -> None:
        report.model.fill_(1e6)
        report.invited.clear()
        if report.updates is not None:
            report.updates.zero_()

    grid = honest_grid()
    grid.nodes[NODES[5]] = attacker("nan")
    strategy = GFedAvg(num_clients=6, observers=[diary, meddler])
    close(run(strategy, grid), by_hand([range(5)] * 3)[-1])
    assert [report.server_round for report in diary.reports] == [1, 2, 3]
    for report in diary.reports:
        assert sorted(report.accepted) == sorted(NODES[:5])
        assert report.weights is not None
        np.testing.assert_allclose(report.weights.numpy(), np.full(5, 0.2))
        phases = ("training", "screening", "aggregation", "server-step", "evaluation")
        assert sorted(report.seconds) == sorted(phases)
        assert dict(report.metric_record())["rejected"] == 1


def test_the_rows_of_a_report_are_the_accepted_clients_updates() -> None:
    diary = Diary()
    grid = honest_grid()
    grid.nodes[NODES[0]] = attacker("nan")
    strategy = GFedAvg(local_rate=0.125, num_clients=5, observers=[diary])
    run(strategy, grid, rounds=1)
    report, w = diary.reports[0], np.arange(DIMENSION) / 4
    assert report.updates is not None
    for client, row in zip(report.accepted, report.updates, strict=True):
        expected = (w - trained(w, NODES.index(client))) / 0.125
        np.testing.assert_allclose(row.numpy(), expected, rtol=1e-4, atol=1e-4)


# Flower's own loop.


@pytest.mark.parametrize("message_ids", [True, False])
def test_flower_s_own_loop_drives_the_same_run(message_ids: bool) -> None:
    step = ServerStep(server_lr=0.5, momentum=0.8)
    strategy = GFedAvg(local_rate=LocalRate(0.5, 0.5), server_step=step, num_clients=6)
    grid = honest_grid(message_ids=message_ids)
    grid.nodes[NODES[5]] = attacker("nan")
    result = Strategy.start(strategy, grid, initial_model(), num_rounds=3, timeout=LONG)
    lrs = [0.5, 0.25, 0.125]
    expected = by_hand([range(5)] * 3, local_lrs=lrs, server_lr=0.5, momentum=0.8)
    close(result.arrays, expected[-1])
    assert dict(result.train_metrics_clientapp[3]) == {
        "invited": 6,
        "accepted": 5,
        "rejected": 1,
        "filtered": 0,
    }
    # The attacker evaluates like the others.
    loss = np.mean([0.5 * np.sum((expected[-1] - centre(i)) ** 2) for i in range(6)])
    assert result.evaluate_metrics_clientapp[3]["loss"] == pytest.approx(loss, rel=1e-4)


def test_flower_s_own_loop_with_rage_and_a_server_that_evaluates() -> None:
    grid = honest_grid()
    grid.nodes[NODES[5]] = outlier(5)
    result = Strategy.start(
        Rage(num_corrupt=1, num_clients=6),
        grid,
        initial_model(),
        num_rounds=2,
        timeout=LONG,
        evaluate_fn=lambda _, arrays: MetricRecord({"first": vector_of(arrays)[0]}),
    )
    expected = by_hand([range(5)] * 2)
    close(result.arrays, expected[-1])
    assert result.evaluate_metrics_serverapp[1]["first"] == pytest.approx(expected[0][0], abs=1e-5)


def test_in_flower_s_own_loop_too_few_replies_leave_the_model() -> None:
    result = Strategy.start(
        Rage(num_corrupt=2, num_clients=5), honest_grid(), initial_model(), 2, LONG
    )
    np.testing.assert_array_equal(vector_of(result.arrays), np.arange(DIMENSION) / 4)


# Options.


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GFedAvg(weighting="examples"), "weighting = 'examples'"),  # type: ignore[arg-type]
        (lambda: GFedAvg(identity="name"), "identity = 'name'"),  # type: ignore[arg-type]
        (lambda: GFedAvg(evaluate_every=0), "evaluate_every = 0"),
        (lambda: GFedAvg(local_rate=0.0), "local rate = 0.0"),
        (lambda: Rage(), "either num_corrupt or corrupt_fraction"),
        (lambda: Rage(1, corrupt_fraction=0.1), "either num_corrupt or corrupt_fraction"),
        (lambda: Rage(-1), "num_corrupt = -1"),
        (lambda: Rage(corrupt_fraction=1 / 3), "corrupt_fraction = 0.333"),
        (lambda: Rage(corrupt_fraction=0.4), "less than a third"),
        (lambda: Rage(corrupt_fraction=0.7), "corrupt_fraction = 0.7"),
        (lambda: Rage(1, stop="soon"), "stop = 'soon'"),  # type: ignore[arg-type]
        (lambda: Rage(1, average="median"), "average = 'median'"),  # type: ignore[arg-type]
        (lambda: Rage(1, coordinates=0), "coordinates = 0"),
        (lambda: Rage(1, aggregator=GFedAvg()._aggregate), "aggregator is not allowed"),
    ],
)
def test_options_that_make_no_sense_are_refused_at_once(
    make: Callable[[], FederatedStrategy], message: str
) -> None:
    with pytest.raises(ValueError) as caught:
        make()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_option_is_a_type_error() -> None:
    with pytest.raises(TypeError):
        GFedAvg(num_client=3)  # type: ignore[call-arg]


def test_aggregating_before_anything_was_sent() -> None:
    with pytest.raises(RuntimeError, match="no model yet"):
        GFedAvg().aggregate_train(1, [])


def test_an_empty_model_is_refused() -> None:
    with pytest.raises(ValueError, match="no floating-point parameter"):
        GFedAvg().start(honest_grid(), ArrayRecord(), num_rounds=1)


def test_a_reply_with_the_wrong_content_type_is_not_fatal() -> None:
    grid, diary = honest_grid(), Diary()
    grid.nodes[NODES[5]] = lambda message: Message(
        RecordDict({"config": ConfigRecord({"a": 1})}), reply_to=message
    )
    close(
        run(GFedAvg(num_clients=6, observers=[diary]), grid),
        by_hand([range(5)] * 3)[-1],
    )
    assert "0 array records" in diary.reports[0].rejected[0].reason
