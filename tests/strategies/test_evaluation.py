"""The clients' own evaluation: the weighted mean of what is sane."""

import math
from typing import Any

import pytest
from flwr.app import Error, Message, MetricRecord, RecordDict

from blackthorn.flower_port.transports import Delivery
from blackthorn.strategies.evaluation import average_metrics


def reported(client: int, **metrics: Any) -> Delivery:
    order = Message(RecordDict(), dst_node_id=client + 10, message_type="evaluate")
    record = MetricRecord({k.replace("_", "-"): v for k, v in metrics.items()})
    return Delivery(client, Message(RecordDict({"metrics": record}), reply_to=order))


def at_most_100(client: int, claimed: int | None) -> int:
    """Client 0 declared 7 examples, all others 100."""
    return min(claimed or 1, 7 if client == 0 else 100)


def average(*inbox: Delivery) -> dict[str, Any] | None:
    metrics = average_metrics(inbox, at_most_100)
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
        {"accuracy": math.nan},
        {"accuracy": math.inf},
        {"accuracy": 0.9, "num_examples": 1e30},
        {"accuracy": 0.9, "num_examples": 0},
        {"accuracy": 0.9, "num_examples": [3]},
    ],
)
def test_a_lie_that_shows_leaves_the_client_out(lie: dict[str, Any]) -> None:
    inbox = [reported(1, accuracy=0.5, loss=1.0, num_examples=9), reported(2, loss=1e6, **lie)]
    assert average(*inbox) == {"accuracy": 0.5, "loss": 1.0}


@pytest.mark.parametrize("value", [math.nan, math.inf, 10**400])
def test_a_metric_that_is_not_finite_does_not_count(value: float) -> None:
    found = average(
        reported(1, accuracy=0.25, loss=value),
        reported(2, accuracy=0.75, loss=3.0),
        reported(3, accuracy=0.5, loss=5.0),
    )
    assert found == {"accuracy": 0.5, "loss": 4.0}


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
