"""The clients' own evaluation, averaged; a lying client cannot break it."""

import math
from collections.abc import Callable, Iterable

from flwr.app import MetricRecord

from blackthorn.flower_port.transports import Delivery

from .screening import RejectedReply, content_of, read_count, scalar_metrics


def average_metrics(
    inbox: Iterable[Delivery], capped: Callable[[int, int | None], int]
) -> MetricRecord | None:
    """Weighted mean of every finite metric, by example counts capped by `capped`.

    An accuracy outside [0, 1] or a broken count leaves the client out; a metric that most clients
    do not report is left out. None if nobody counts.
    """
    sums: dict[str, float] = {}
    weights: dict[str, float] = {}
    reporters: dict[str, int] = {}
    counted = 0
    for delivery in inbox:
        try:
            metrics, weight = _sane(delivery, capped)
        except RejectedReply:
            continue
        counted += 1
        for key, value in metrics.items():
            sums[key] = sums.get(key, 0.0) + weight * value
            weights[key] = weights.get(key, 0.0) + weight
            reporters[key] = reporters.get(key, 0) + 1
    common = [key for key in sums if 2 * reporters[key] > counted]
    return MetricRecord({key: sums[key] / weights[key] for key in common}) if common else None


def _sane(
    delivery: Delivery, capped: Callable[[int, int | None], int]
) -> tuple[dict[str, float], float]:
    if delivery.message is None:
        raise RejectedReply(delivery.problem)
    content = content_of(delivery.message)
    metrics = scalar_metrics(content)
    if not 0 <= metrics.get("accuracy", 0.0) <= 1:
        raise RejectedReply("accuracy is not a number from 0 to 1")
    finite = {key: value for key, value in metrics.items() if math.isfinite(value)}
    return finite, capped(delivery.client, read_count(content))
