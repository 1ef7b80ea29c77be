"""What a model is worth: the server's own evaluation, or the clients' on examples of theirs."""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flwr.app import ArrayRecord, MessageType, MetricRecord
from flwr.serverapp.strategy import Result

from blackthorn.flower_port.transports import Delivery, Transport

from .enrolment import ClientRegistry
from .global_model import GlobalModel
from .messages import Asked, content_of_round, write_messages
from .reports import RoundReport
from .screening import RejectedReply, content_of, read_count, scalar_metrics

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]


class Evaluation:
    """Evaluates a run's models as they come, and knows what accuracy the last one had.

    `patience`: seconds to wait for a SuperLink that does not say who is connected.
    """

    def __init__(self, registry: ClientRegistry, patience: float) -> None:
        self._registry = registry
        self._patience = patience
        self.accuracy: float | None = None

    def of_round(
        self,
        report: RoundReport,
        result: Result,
        model: GlobalModel,
        evaluate_fn: EvaluateFn | None,
        transport: Transport,
        config: Mapping[str, Any] | None,
        timeout: float,
    ) -> None:
        """Put a model's metrics into the round's report and the result: the server's where there is
        `evaluate_fn`, else the mean of what the clients measure within `timeout` seconds."""
        began = time.monotonic()
        if evaluate_fn is not None:
            self.at_the_server(report, result, model.arrays(), evaluate_fn)
        else:
            asked = self.ask(
                report.server_round, model.sent(), config, transport, timeout, report.confidential
            )
            left = asked.left(timeout)
            metrics = self.average(transport.exchange(asked.messages, asked.clients, left))
            _note(report, result.evaluate_metrics_clientapp, metrics, "clients")
        report.seconds["evaluation"] = time.monotonic() - began

    def at_the_server(
        self, report: RoundReport, result: Result, arrays: ArrayRecord, evaluate_fn: EvaluateFn
    ) -> None:
        """Put what `evaluate_fn` measures of a model into the round's report and the result."""
        metrics = evaluate_fn(report.server_round, arrays)
        _note(report, result.evaluate_metrics_serverapp, metrics, "server")

    def ask(
        self,
        server_round: int,
        arrays: ArrayRecord,
        config: Mapping[str, Any] | None,
        transport: Transport,
        timeout: float | None,
        confidential: bool,
    ) -> Asked:
        """Messages that ask every connected client to evaluate the model; nothing is sent yet."""
        began = time.monotonic()
        self._registry.refresh(transport, min(self._patience, timeout or self._patience))
        # What clients measure on their own examples is theirs: nobody asks for it under a claim.
        clients = [] if confidential else self._registry.online()
        content = content_of_round(server_round, arrays, config or {})
        messages = write_messages(MessageType.EVALUATE, content, clients, self._registry, timeout)
        return Asked(server_round, clients, messages, began, began)

    def average(self, deliveries: Iterable[Delivery]) -> MetricRecord | None:
        """The clients' sane metrics, weighted by their (capped) numbers of examples."""
        return average_metrics(deliveries, self._registry.examples)

    def gained(self, metrics: dict[str, float]) -> float | None:
        """Remember this evaluation's accuracy; what was gained since the last one."""
        accuracy, before = metrics.get("accuracy"), self.accuracy
        if accuracy is None:
            return None
        self.accuracy = accuracy
        return None if before is None else accuracy - before


def average_metrics(
    deliveries: Iterable[Delivery], examples: Callable[[int, int | None], int]
) -> MetricRecord | None:
    """Weighted mean of every finite metric; a lying client cannot break it.

    `examples` gives a client's weight for the count that it claims. An accuracy outside [0, 1] or a
    broken count leaves the client out; a metric that most clients do not report is left out. None
    if nobody counts.
    """
    sums: dict[str, float] = {}
    weights: dict[str, float] = {}
    reporters: dict[str, int] = {}
    counted = 0
    for delivery in deliveries:
        try:
            metrics, weight = _sane(delivery, examples)
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
    delivery: Delivery, examples: Callable[[int, int | None], int]
) -> tuple[dict[str, float], float]:
    if delivery.message is None:
        raise RejectedReply(delivery.problem)
    content = content_of(delivery.message)
    metrics = scalar_metrics(content)
    if not 0 <= metrics.get("accuracy", 0.0) <= 1:
        raise RejectedReply("accuracy is not a number from 0 to 1")
    finite = {key: value for key, value in metrics.items() if math.isfinite(value)}
    return finite, examples(delivery.client, read_count(content))


def _note(
    report: RoundReport, kept: dict[int, MetricRecord], metrics: MetricRecord | None, by: str
) -> None:
    if metrics is None:
        return
    kept[report.server_round] = metrics
    report.metrics = {k: float(v) for k, v in metrics.items() if isinstance(v, int | float)}
    report.evaluated_by = by if report.metrics else None
