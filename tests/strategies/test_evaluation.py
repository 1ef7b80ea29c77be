"""What a model is worth, by the server or by the mean of what clients say that is sane."""

import math
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Error, Message, MetricRecord, RecordDict
from memory_grid import (
    DIMENSION,
    MemoryGrid,
    centre,
    initial_model,
    quadratic_app,
    runs,
    vector_of,
)
from rounds_by_hand import LONG, NODES, Diary, attacker, by_hand, close, honest_grid, run

from blackthorn.flower_port.transports import Delivery
from blackthorn.strategies import (
    GFedAvg,
    LocalRate,
    RoundReport,
)
from blackthorn.strategies.evaluation import average_metrics


def reported(client: int, **metrics: Any) -> Delivery:
    order = Message(RecordDict(), dst_node_id=client + 10, message_type="evaluate")
    record = MetricRecord({k.replace("_", "-"): v for k, v in metrics.items()})
    return Delivery(client, Message(RecordDict({"metrics": record}), reply_to=order))


def at_most_100(client: int, claimed: int | None) -> int:
    """Client 0 declared 7 examples, all others 100."""
    return min(claimed or 1, 7 if client == 0 else 100)


def average(*deliveries: Delivery) -> dict[str, Any] | None:
    metrics = average_metrics(deliveries, at_most_100).metrics
    return None if metrics is None else dict(metrics)


def test_the_mean_is_weighted_by_capped_counts() -> None:
    found = average(
        reported(0, accuracy=1.0, loss=4.0, num_examples=10**9),
        reported(1, accuracy=0.5, loss=1.0, num_examples=10**9),
        reported(2, accuracy=0.0, loss=2.0, num_examples=20),
    )
    assert found == {
        "accuracy": pytest.approx((7 * 1.0 + 100 * 0.5) / 127),
        "loss": pytest.approx((7 * 4.0 + 100 * 1.0 + 20 * 2.0) / 127),
    }


def test_without_a_count_the_cap_decides() -> None:
    assert average(reported(1, loss=1.0), reported(2, loss=4.0, num_examples=2)) == {"loss": 3.0}


@pytest.mark.parametrize(
    "lie",
    [
        {"accuracy": 1.5},
        {"accuracy": -0.1},
        {"accuracy": 0.9, "num_examples": 1e30},
        {"accuracy": 0.9, "num_examples": 0},
        {"accuracy": 0.9, "num_examples": [3]},
    ],
)
def test_a_lie_that_shows_leaves_the_client_out(lie: dict[str, Any]) -> None:
    deliveries = [reported(1, accuracy=0.5, loss=1.0, num_examples=9), reported(2, loss=1e6, **lie)]
    assert average(*deliveries) == {"accuracy": 0.5, "loss": 1.0}


@pytest.mark.parametrize("value", [math.nan, math.inf, 10**400])
def test_a_metric_that_is_not_finite_does_not_count(value: float) -> None:
    found = average(
        reported(1, accuracy=0.25, loss=value),
        reported(2, accuracy=0.75, loss=3.0),
        reported(3, accuracy=0.5, loss=5.0),
    )
    assert found == {"accuracy": 0.5, "loss": 4.0}


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_an_accuracy_that_is_not_finite_takes_no_other_metric_with_it(value: float) -> None:
    found = average_metrics(
        [reported(1, accuracy=value, auc=0.25), reported(2, accuracy=value, auc=0.75)], at_most_100
    )
    assert dict(found.metrics or {}) == {"auc": 0.5}
    assert list(found.not_finite) == ["accuracy"]


def test_a_metric_that_most_do_not_report_is_left_out() -> None:
    found = average(
        reported(1, loss=1.0, round=99.0), reported(2, loss=2.0), reported(3, loss=3.0, f1=0.5)
    )
    assert found == {"loss": 2.0}


def test_errors_and_missing_replies_do_not_count() -> None:
    order = Message(RecordDict(), dst_node_id=10, message_type="evaluate")
    failed = Delivery(4, Message(Error(2, "no held-out examples"), reply_to=order))
    late = Delivery(5, None, "no reply by the deadline")
    assert average(failed, late, reported(1, loss=2.0)) == {"loss": 2.0}
    assert average(failed, late) is None
    assert average() is None
    assert average(reported(1, num_examples=3)) is None


# In a run.


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
