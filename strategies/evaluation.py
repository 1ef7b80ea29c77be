"""What a model is worth: the server's own evaluation, or the clients' on examples of theirs."""

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.app import ArrayRecord, MessageType, MetricRecord
from flwr.serverapp.strategy import Result

from blackthorn.flower_port.transports import Delivery, Transport
from blackthorn.wire import ROUND_FIELDS

from .enrolment import ClientRegistry
from .global_model import GlobalModel
from .messages import Asked, content_of_round, write_messages
from .output_iterate import OutputIterate
from .reports import RoundReport
from .screening import RejectedReply, content_of, read_count, scalar_metrics

logger = logging.getLogger("blackthorn")

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]


class Evaluation:
    """Evaluates a run's models as they come, and knows how good the last one was by the judge of
    the `output` iterate: by its accuracy, where that names no other metric.

    `patience`: seconds to wait for a SuperLink that does not say who is connected.
    """

    def __init__(self, registry: ClientRegistry, patience: float, output: OutputIterate) -> None:
        self._registry = registry
        self._patience = patience
        self._output = output
        self._checked = False
        self._warned: set[str] = set()
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
        `evaluate_fn`, else the mean of what the clients measure within `timeout` seconds.

        Raises MetricMissing where the run's first metrics cannot be judged as they are to be.
        """
        began = time.monotonic()
        if evaluate_fn is not None:
            self.at_the_server(report, result, model.arrays(), evaluate_fn)
        else:
            asked = self.ask(
                report.server_round, model.sent(), config, transport, timeout, report.confidential
            )
            left = asked.left(timeout)
            found = self.average(transport.exchange(asked.messages, asked.clients, left))
            if found.metrics is None and asked.clients:
                report.unevaluated = found.why_none
                self._warn(report, "unevaluated", f"nothing is evaluated: {found.why_none}")
            self._note(report, result.evaluate_metrics_clientapp, found.metrics, "clients")
            self._warn_of(report, found.not_finite)
        report.seconds["evaluation"] = time.monotonic() - began

    def at_the_server(
        self, report: RoundReport, result: Result, arrays: ArrayRecord, evaluate_fn: EvaluateFn
    ) -> None:
        """Put what `evaluate_fn` measures of a model into the round's report and the result.

        Raises MetricMissing as `of_round`.
        """
        metrics = evaluate_fn(report.server_round, arrays)
        self._note(report, result.evaluate_metrics_serverapp, metrics, "server")
        self._warn_of(report, {k: v for k, v in report.metrics.items() if not math.isfinite(v)})

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
        began, clients = time.monotonic(), list[int]()
        # What clients measure on their own examples is theirs: nobody asks for it under a claim.
        if not confidential:
            self._registry.refresh(transport, min(self._patience, timeout or self._patience))
            clients = self._registry.online()
        content = content_of_round(server_round, arrays, config or {})
        messages = write_messages(MessageType.EVALUATE, content, clients, self._registry, timeout)
        return Asked(server_round, clients, messages, began, began)

    def average(self, deliveries: Iterable[Delivery]) -> "ClientMetrics":
        """The clients' sane metrics, weighted by their (capped) numbers of examples."""
        return average_metrics(deliveries, self._registry.examples)

    def gained(self, metrics: dict[str, float]) -> float | None:
        """Remember how good this evaluation finds the model; what was gained since the last one."""
        accuracy, before = self._output.judge.progress(metrics), self.accuracy
        if accuracy is None:
            return None
        self.accuracy = accuracy
        return None if before is None else accuracy - before

    def _note(
        self,
        report: RoundReport,
        kept: dict[int, MetricRecord],
        metrics: MetricRecord | None,
        by: str,
    ) -> None:
        if metrics is None:
            return
        kept[report.server_round] = metrics
        numbers = {k: float(v) for k, v in metrics.items() if isinstance(v, int | float)}
        report.metrics = {k: v for k, v in numbers.items() if k not in ROUND_FIELDS}
        report.evaluated_by = by if report.metrics else None
        if not self._checked:
            self._output.judge.check(report.metrics, self._output.rule)
            self._checked = True

    def _warn_of(self, report: RoundReport, not_finite: Mapping[str, float]) -> None:
        for name, value in not_finite.items():
            told = f"the metric {name} is {value} in round {report.server_round}"
            self._warn(report, f"metric {name}", told)

    def _warn(self, report: RoundReport, what: str, told: str) -> None:
        """Once in a run."""
        if what not in self._warned:
            self._warned.add(what)
            report.warnings.append(told)
            logger.warning("%s", told)


@dataclass(frozen=True)
class ClientMetrics:
    """The mean of the clients' `metrics`, None where nobody counts; why it is without those that
    are `lost`, by client; and of the metrics that are left out, those `not_finite` anywhere."""

    metrics: MetricRecord | None
    lost: dict[int, str] = field(default_factory=dict)
    not_finite: dict[str, float] = field(default_factory=dict)

    @property
    def why_none(self) -> str:
        """Why there are no metrics, one line."""
        if self.not_finite:
            told = ", ".join(f"{name} = {value}" for name, value in self.not_finite.items())
            return f"the clients' metrics are not finite: {told}"
        if not self.lost:
            return "the clients give no metrics in common"
        client, reason = next(iter(self.lost.items()))
        others = len(self.lost) - 1
        if not others:
            return f"client {client}: {reason}"
        if len(set(self.lost.values())) == 1:
            return f"all {others + 1} clients: {reason}"
        return f"client {client}: {reason}; and {others} more clients"


def average_metrics(
    deliveries: Iterable[Delivery], examples: Callable[[int, int | None], int]
) -> ClientMetrics:
    """Weighted mean of every finite metric; a lying client cannot break it.

    `examples` gives a client's weight for the count that it claims. An accuracy outside [0, 1] or a
    broken count leaves the client out; a metric that most clients do not report, or not as a
    finite number, is left out. No metrics if nobody counts.
    """
    lost: dict[int, str] = {}
    unfit: dict[str, float] = {}
    sums: dict[str, float] = {}
    weights: dict[str, float] = {}
    reporters: dict[str, int] = {}
    counted = 0
    for delivery in deliveries:
        try:
            metrics, weight = _sane(delivery, examples)
        except RejectedReply as rejected:
            lost[delivery.client] = str(rejected)
            continue
        counted += 1
        for key, value in metrics.items():
            if not math.isfinite(value):
                unfit[key] = value
                continue
            sums[key] = sums.get(key, 0.0) + weight * value
            weights[key] = weights.get(key, 0.0) + weight
            reporters[key] = reporters.get(key, 0) + 1
    common = [key for key in sums if 2 * reporters[key] > counted]
    mean = MetricRecord({key: sums[key] / weights[key] for key in common}) if common else None
    return ClientMetrics(mean, lost, {k: v for k, v in unfit.items() if k not in common})


def _sane(
    delivery: Delivery, examples: Callable[[int, int | None], int]
) -> tuple[dict[str, float], float]:
    if delivery.message is None:
        raise RejectedReply(delivery.problem)
    content = content_of(delivery.message)
    metrics = scalar_metrics(content)
    accuracy = metrics.get("accuracy", 0.0)
    if math.isfinite(accuracy) and not 0 <= accuracy <= 1:
        raise RejectedReply("accuracy is not a number from 0 to 1")
    return metrics, examples(delivery.client, read_count(content))
