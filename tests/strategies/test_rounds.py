"""What a round computes, and when it leaves the model as it was, against NumPy."""

import logging
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Error, Message
from memory_grid import (
    DIMENSION,
    Answer,
    MemoryGrid,
    initial_model,
    quadratic_app,
    runs,
    trained,
    vector_of,
)
from rounds_by_hand import (
    LONG,
    NODES,
    Diary,
    attacker,
    by_hand,
    close,
    honest_grid,
    outlier,
    run,
)

from blackthorn.strategies import (
    FixedParticipation,
    GFedAvg,
    LocalRate,
    NotEnoughClients,
    PoissonParticipation,
    Rage,
    RoundContext,
    ServerStep,
)
from blackthorn.strategies.aggregation import Aggregate

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
    """No rate, no momentum: nothing of the server may be left in the result."""
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


def test_buffers_keep_the_server_s_value_where_that_is_asked_for() -> None:
    grid, diary = honest_grid(), Diary()
    final = run(GFedAvg(num_clients=5, observers=[diary], statistics="server"), grid)
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


def test_the_coordinates_of_rage_are_drawn_by_the_seed_and_the_round() -> None:
    """Row j alone stands out in coordinate j, so that who is removed tells which was drawn."""
    updates, weights = torch.eye(12) * 5.0, torch.full((12,), 1 / 12, dtype=torch.float64)
    for seed in (0, 5):
        strategy = Rage(1, coordinates=1, seed=seed)
        found, expected = [], []
        for server_round in range(1, 15):
            context = RoundContext(server_round, 0.1, torch.zeros(12))
            survivors = strategy.aggregate(updates, weights, context).survivors
            found.append(torch.nonzero(~survivors).flatten().tolist())
            key = np.random.SeedSequence(seed, spawn_key=(8, server_round, 0))
            drawn = np.random.Generator(np.random.Philox(key))
            expected.append(drawn.choice(12, 1, replace=False, shuffle=False).tolist())
        assert found == expected
