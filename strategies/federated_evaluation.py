"""The clients' own evaluation, averaged; a lying client cannot break or own it beyond its share."""

import math
from collections.abc import Callable, Iterable

from flwr.app import MetricRecord

from .delivery import Delivery
from .screening import NUM_EXAMPLES, RejectedReply, content_of, sane_count, scalar_metrics


def average_metrics(
    inbox: Iterable[Delivery], capped: Callable[[int, int | None], int]
) -> MetricRecord | None:
    """Weighted mean of every metric that is finite, by example counts capped by `capped`.

    An accuracy outside [0, 1] or a broken count leaves the client out. None if nobody counts.
    """
    sums: dict[str, float] = {}
    weights: dict[str, float] = {}
    for delivery in inbox:
        try:
            metrics, weight = _sane(delivery, capped)
        except RejectedReply:
            continue
        for key, value in metrics.items():
            sums[key] = sums.get(key, 0.0) + weight * value
            weights[key] = weights.get(key, 0.0) + weight
    if not sums:
        return None
    return MetricRecord({key: sums[key] / weights[key] for key in sums})


def _sane(
    delivery: Delivery, capped: Callable[[int, int | None], int]
) -> tuple[dict[str, float], float]:
    if delivery.message is None:
        raise RejectedReply(delivery.problem)
    metrics = scalar_metrics(content_of(delivery.message))
    claimed = sane_count(metrics.pop(NUM_EXAMPLES)) if NUM_EXAMPLES in metrics else None
    if not 0 <= metrics.get("accuracy", 0.0) <= 1:
        raise RejectedReply("accuracy is not a number from 0 to 1")
    finite = {key: value for key, value in metrics.items() if math.isfinite(value)}
    return finite, capped(delivery.client, claimed)
