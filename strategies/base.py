"""What every published system stands on: one Flower Strategy, one flow for every round.

    participation -> broadcast -> local training -> screening -> bounding -> aggregation
    -> server step -> evaluation -> observers

A system is a subclass that sets the aggregator or overrides hooks (`rounds.py: RoundHooks`), and
nothing of the flow.
"""

import logging
import math
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypedDict, cast

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from blackthorn.flower_port.synchronous import attribute_replies
from blackthorn.flower_port.transports import Delivery, Enough, Transport, transport_of
from blackthorn.settings.config import RunConfig
from blackthorn.wire import (
    ARRAYS,
    CLIENT_ID,
    CONFIG,
    LOCAL_LR,
    NONCE,
    ROUNDS_BEGUN,
    RULE,
    SAMPLE_EPSILON,
    SERVER_ROUND,
    UPDATE_NORM,
)

from .aggregators import Aggregator, weighted_mean
from .attestation import Attestation
from .enrolment import ClientRegistry
from .federated_evaluation import average_metrics
from .global_model import GlobalModel
from .inbox import Screened, screen_inbox
from .learning_rate import LocalRate
from .output_iterate import IterateKeeper, OutputIterate
from .participation import (
    FullParticipation,
    Participation,
    send_order,
)
from .quorum import QuorumWatch
from .reports import RoundReport
from .rounds import RoundContext, RoundHooks, RunOver
from .run_state import RunState
from .screening import WHO_ATTESTS, Contribution
from .server_step import ServerStep

logger = logging.getLogger("blackthorn")

Observer = Callable[[RoundReport], None]
EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]


class StrategyOptions(TypedDict, total=False):
    """Options that every strategy takes, with their defaults.

    aggregator: the rule (weighted_mean); a robust one such as RageFilter ignores the weights.
    participation: who joins a round (FullParticipation()).
    local_rate: η_l, or a LocalRate that changes over rounds (1.0: gradient and parameter units
        are the same, which is right for any rule without a threshold).
    server_step: η_g, momentum and projection (ServerStep()).
    weighting: "uniform", or "num-examples" capped by what a client enrolled with (with identity
        "node" nobody was asked, so there the clients' claims count).
    identity: "node" (any Flower ClientApp), "query" (stable ids, asked of each node once), or
        "key" (as "query"; an id stays with the node that had it first, which is what a client's
        registered key means where nodes authenticate).
    num_clients: clients to wait for before the first round (2), at most start_timeout seconds
        (120); the run goes on with fewer if there are at least min_replies. A run with nobody
        connected pauses, and ends after as many seconds. With identity
        "query" or "key" the ids are 0 to num_clients - 1, and others are refused.
    min_replies: accepted replies below which a round leaves the model as it was (1).
    fail_after: rounds in a row below that quorum after which `start` gives up (None: never).
    enough_replies: accepted replies that end a round before its deadline; who has not answered by
        then is surplus (None: everybody is waited for).
    evaluate_every: rounds between evaluations (1).
    output: which iterate `start` hands out (OutputIterate(), the last).
    seed: of the sampling of cohorts and of whatever the rule draws (0).
    observers: called with every round's RoundReport; they read and never change the round.
    """

    aggregator: Aggregator
    participation: Participation
    local_rate: float | LocalRate
    server_step: ServerStep
    weighting: Literal["uniform", "num-examples"]
    identity: Literal["query", "key", "node"]
    num_clients: int
    start_timeout: float
    min_replies: int
    fail_after: int | None
    enough_replies: int | None
    evaluate_every: int
    output: OutputIterate
    seed: int
    observers: Sequence[Observer]


@dataclass(frozen=True)
class _Broadcast:
    """The messages of a round and the clients they go to, in the same order; `attested` is
    what a reply has to hold, None where any client may answer."""

    server_round: int
    clients: list[int]
    messages: list[Message]
    began: float
    # On the monotonic clock, when the time for the replies began to run.
    since: float
    attested: Attestation | None = None
    context: RoundContext | None = None

    def left(self, timeout: float) -> float:
        """What is left of `timeout` seconds."""
        return max(0.0, self.since + timeout - time.monotonic())

    def sort(self, replies: Iterable[Message]) -> list[Delivery]:
        """One Delivery a client, for replies that Flower collected itself."""
        return attribute_replies(replies, self.messages, self.clients)


class FederatedStrategy(RoundHooks, Strategy):
    """Base of all systems: averages screened updates; no reply can raise out of a round."""

    def __init__(
        self,
        *,
        aggregator: Aggregator = weighted_mean,
        participation: Participation | None = None,
        local_rate: float | LocalRate = 1.0,
        server_step: ServerStep | None = None,
        weighting: Literal["uniform", "num-examples"] = "uniform",
        identity: Literal["query", "key", "node"] = "node",
        num_clients: int = 2,
        start_timeout: float = 120.0,
        min_replies: int = 1,
        fail_after: int | None = None,
        enough_replies: int | None = None,
        evaluate_every: int = 1,
        output: OutputIterate | None = None,
        seed: int = 0,
        observers: Sequence[Observer] = (),
    ) -> None:
        _check_options(weighting, identity, evaluate_every)
        super().__init__(aggregator, participation or FullParticipation(), seed)
        self.quorum = max(1, min_replies)
        self._rate = local_rate if isinstance(local_rate, LocalRate) else LocalRate(local_rate)
        self._step = server_step or ServerStep()
        self._weighting = weighting
        self._num_clients = num_clients
        self._start_timeout = start_timeout
        self._min_replies = min_replies
        self._quorum_watch = QuorumWatch(fail_after)
        self._enough_replies = enough_replies
        self._evaluate_every = evaluate_every
        self._output = output or OutputIterate()
        self._observers = list(observers)
        self._registry = ClientRegistry(identity, num_clients)
        self._local_lr = self._rate.initial
        self._accuracy: float | None = None
        self._model: GlobalModel | None = None
        self._iterates = IterateKeeper(self._output, 1, seed)
        self._round = 0
        # How often clients were asked to train: in a resumed run more often than there are rounds.
        self.rounds_begun = 0
        # False: earlier processes may have asked clients for more.
        self.knows_rounds_begun = True
        self.output_round = 0
        # Whether `state` is whole: not from a round's first change of the model or of what
        # accounts for it until the observers have seen the round.
        self.between_rounds = False
        self._broadcast = _Broadcast(0, [], [], 0.0, 0.0)
        self._evaluation = _Broadcast(0, [], [], 0.0, 0.0)
        self._closed: _Broadcast | None = None
        self._told_of_silence = False

    @classmethod
    def build(cls, config: RunConfig, options: StrategyOptions) -> "FederatedStrategy":
        """What the run configuration describes: `options` with what is the algorithm's own."""
        return cls(**options, **cls.option_values(config))

    # A run.

    def start(
        self,
        grid: Grid | Transport,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
        from_state: RunState | None = None,
    ) -> Result:
        """Run `num_rounds` rounds; the arguments and the result are those of Flower's strategies.

        `timeout` is the deadline of one round's replies, in seconds. Without `evaluate_fn` the
        clients evaluate the model on their held-out examples. The result's arrays are those of
        the output iterate; `output_round` says after how many rounds it arose. `from_state`: what
        `state()` was in another process, from the same initial arrays and options: the run goes on
        with the next round, and the result holds the metrics of those that were left.
        Raises NotEnoughClients if too few clients connect in time, or nobody is connected for
        start_timeout seconds (under a central claim noise goes on alone), NotEnoughReplies after
        `fail_after` rounds in a row below the quorum.
        """
        self.summary()
        result = Result()
        transport = transport_of(grid)
        num_rounds = self._begin(transport, initial_arrays, num_rounds, from_state)
        if from_state is None:
            metrics = self._evaluate_initial(result, initial_arrays, evaluate_fn)
            self._iterates.see(0, initial_arrays, metrics)
        self.between_rounds = True
        for server_round in range(self._round + 1, num_rounds + 1):
            self._send_round(server_round, train_config, transport, timeout)
            inbox = self._collect(transport, timeout)
            self.between_rounds = False
            report = self._close_round(inbox)
            result.train_metrics_clientapp[server_round] = report.metric_record()
            if server_round % self._evaluate_every == 0 or server_round == num_rounds:
                self._evaluate(report, result, transport, timeout, evaluate_config, evaluate_fn)
            self._local_lr = self._rate.after_round(
                self._local_lr, self._note_accuracy(report.metrics)
            )
            self._iterates.see(server_round, self._require_model().arrays(), report.metrics)
            self._round = server_round
            report.refusals = self._registry.refusals(transport)
            # Before the observers, who may write down the state.
            self._quorum_watch.count(report)
            self._publish(report)
            self.between_rounds = True
            self._quorum_watch.check(report)
            if report.ends_run:
                break
        result.arrays, self.output_round = self._iterates.arrays, self._iterates.server_round
        return result

    def state(self) -> RunState:
        """Where the run stands after the round that was published last, for `start`.

        To be asked for by the round's observers, or where `between_rounds` holds: in the next
        round model and ledger move apart. The arrays are views: write them down before.
        """
        model, iterates = self._require_model(), self._iterates
        # The round that clients are being asked for is not on record: who goes on counts it.
        under_way = self._broadcast.server_round > self._round
        arrays = model.moving_parts()
        if iterates.server_round != self._round:
            arrays["output"] = model.vector(iterates.arrays).numpy()
        values = {
            "local_lr": self._local_lr,
            "accuracy": self._accuracy,
            "rounds_begun": self.rounds_begun - under_way,
            "below_quorum": self._quorum_watch.in_a_row,
            "clients": self._registry.values(),
            "output": iterates.values(),
            "own": self.own_values(),
        }
        return RunState(self._round, arrays, values)

    def summary(self) -> None:
        """Log which strategy runs, and with what."""
        logger.info(
            "%s: %s, local rate %g, server rate %g, momentum %g, %s weights",
            type(self).__name__,
            self._participation,
            self._rate.initial,
            self._step.server_lr,
            self._step.momentum,
            self._weighting,
        )

    # The same flow, step by step, for whoever drives a Flower Strategy in a loop of their own.

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Draw the cohort and write its messages (nothing is sent yet)."""
        transport = transport_of(grid)
        if self._model is None or not self._model.issued(arrays):
            self._model = GlobalModel.of(arrays)
        if len(self._registry) == 0:
            self._enrol_all(transport)
        self._send_round(server_round, config, transport, None)
        return self._broadcast.messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Screen, bound, combine, step; the global model stays as it was in a skipped round."""
        self._require_model()
        if self._broadcast is self._closed:
            raise RuntimeError(
                f"round {server_round} has been released, and is not released again with the same "
                "cohort and noise: call configure_train for a new one"
            )
        report = self._close_round(self._broadcast.sort(replies))
        self._local_lr = self._rate.after_round(self._local_lr, None)
        self._publish(report)
        return self._require_model().arrays(), report.metric_record()

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Messages that ask every connected client to evaluate the model."""
        self._send_evaluation(server_round, arrays, config, transport_of(grid), None)
        return self._evaluation.messages

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Mean of the clients' sane metrics, weighted by their (capped) example counts."""
        del server_round
        return average_metrics(self._evaluation.sort(replies), self._capped)

    # The steps of a round.

    def _begin(
        self, transport: Transport, initial: ArrayRecord, num_rounds: int, state: RunState | None
    ) -> int:
        """Set up the run, or where it stood, and wait for the clients; its rounds' number."""
        self._model = GlobalModel.of(initial)
        self._local_lr, self._accuracy = self._rate.initial, None
        self._round = 0 if state is None else state.server_round
        num_rounds = self.rounds_allowed(num_rounds, self._round, self._model.current)
        self._iterates = IterateKeeper(self._output, num_rounds, self._seed)
        if state is not None:
            self._restore(state)
        if self._round < num_rounds:
            self._enrol_all(transport)
        if state is not None:
            self.restore_own(state.values["own"])
        return num_rounds

    def _restore(self, state: RunState) -> None:
        model, arrays = self._require_model(), dict(state.arrays)
        output = arrays.pop("output", None)
        model.restore(arrays)
        self._local_lr, self._accuracy = state.values["local_lr"], state.values["accuracy"]
        self.rounds_begun, self.knows_rounds_begun = state.begun, state.counted
        self._quorum_watch.in_a_row = state.values["below_quorum"]
        self._registry.restore(state.values["clients"])
        kept = model.arrays() if output is None else model.arrays_of(torch.from_numpy(output))
        self._iterates.restore(kept, state.values["output"])

    def _least(self) -> int | None:
        """Clients without which the run does not go on. None where nothing of the cohort may be
        told: all others could leave, and see by its end whether the one is there."""
        return None if self.confidential and self.quorum == 0 else self._min_replies

    def _enrol_all(self, transport: Transport) -> None:
        self._registry.wait_for(transport, self._num_clients, self._least(), self._start_timeout)
        # From here on they are the run's.
        self._registry.refusals(transport)
        self.on_enrolment([self._registry[client] for client in self._registry.clients()])

    def _send_round(
        self,
        server_round: int,
        config: ConfigRecord | None,
        transport: Transport,
        timeout: float | None,
    ) -> None:
        """Participation and broadcast: fill `self._broadcast`."""
        began = time.monotonic()
        patience = min(self._start_timeout, timeout or self._start_timeout)
        least = self._least()
        since = self._registry.wait_for_any(
            transport, least, patience, patience if least is None else self._start_timeout
        )
        model = self._require_model()
        context = RoundContext(server_round, self._local_lr, model.current)
        cohort = self.draw_cohort(self._registry.clients(), context)
        context = replace(context, cohort=cohort)
        self.rounds_begun += 1
        shared = {**(config or {}), LOCAL_LR: self._local_lr, ROUNDS_BEGUN: self.rounds_begun}
        content = _round_content(model.arrays(), shared, server_round)
        rule = self.local_rule(context)
        attested = Attestation(rule.sent, server_round) if self.needs_attestation else None
        context = replace(context, rule=rule, attested=attested)
        content[RULE] = rule.sent.record()
        messages = [
            self._message(client, content, cohort.told.get(client, {}), MessageType.TRAIN, timeout)
            for client in cohort.clients
        ]
        for message in messages:
            # When each was written, one after the other, would tell how many lie in between.
            message.metadata.created_at = messages[0].metadata.created_at
        self._broadcast = _Broadcast(
            server_round, cohort.clients, messages, began, since, attested, context
        )

    def _send_evaluation(
        self,
        server_round: int,
        arrays: ArrayRecord,
        config: ConfigRecord | None,
        transport: Transport,
        timeout: float | None,
    ) -> None:
        """Messages to every connected client: fill `self._evaluation`."""
        began = time.monotonic()
        self._registry.refresh(transport, min(self._start_timeout, timeout or self._start_timeout))
        # What clients measure on their own examples is theirs: nobody asks for it under a claim.
        clients = [] if self.confidential else self._registry.online()
        content = _round_content(arrays, config or {}, server_round)
        messages = [
            self._message(client, content, {}, MessageType.EVALUATE, timeout) for client in clients
        ]
        self._evaluation = _Broadcast(server_round, clients, messages, began, began)

    def _message(
        self, client: int, content: RecordDict, own: Mapping[str, Any], kind: str, ttl: float | None
    ) -> Message:
        # Copies: Flower checks every entry that is set, which is most of the work of a message.
        content = content.copy()
        config = cast(ConfigRecord, content[CONFIG]).copy()
        for name, value in own.items():
            config[name] = value
        config[CLIENT_ID] = client
        # On its way a record is known by its digest: nobody may guess that of another's.
        config[NONCE] = secrets.token_hex(16)
        content[CONFIG] = config
        node, group = self._registry[client].node_id, str(config[SERVER_ROUND])
        # A straggler must not spend its time on a round that is over: hence the time to live.
        return Message(content, node, kind, ttl=ttl, group_id=group)

    def _collect(self, transport: Transport, timeout: float) -> list[Delivery]:
        """The replies to the broadcast; no more than are enough."""
        timeout = self._broadcast.left(timeout)
        sent, model, local_lr = self._broadcast, self._require_model(), self._local_lr
        if self._enough_replies is None:
            return transport.exchange(sent.messages, sent.clients, timeout)
        # Clients that answer at the same time must not be preferred by their ids.
        order = send_order(self._seed, sent.server_round, len(sent.clients))
        found = transport.exchange(
            [sent.messages[i] for i in order],
            [sent.clients[i] for i in order],
            timeout,
            Enough(
                self._enough_replies,
                # A reply that will not count must not end the round for those that would.
                lambda delivery: bool(
                    screen_inbox([delivery], model, local_lr, sent.attested).contributions
                ),
            ),
        )
        return sorted(found, key=lambda delivery: delivery.client)

    def _close_round(self, inbox: list[Delivery]) -> RoundReport:
        """Screening, bounding, aggregation and server step of the round that was broadcast."""
        self._closed = self._broadcast
        model = self._require_model()
        replied = time.monotonic()
        surplus = [delivery.client for delivery in inbox if delivery.surplus]
        inbox = [delivery for delivery in inbox if not delivery.surplus]
        screened = screen_inbox(inbox, model, self._local_lr, self._broadcast.attested)
        contributions = screened.contributions
        report = RoundReport(
            server_round=self._broadcast.server_round,
            invited=list(self._broadcast.clients),
            accepted=list(contributions),
            rejected=screened.rejected,
            surplus=surplus,
            local_lr=self._local_lr,
            model=model.current,
            confidential=self.confidential,
            seconds={"training": replied - self._broadcast.began},
        )
        report.seconds["screening"] = time.monotonic() - replied
        if len(contributions) < self.quorum:
            report.below_quorum = True
            report.skipped = f"{len(contributions)} replies, fewer than {self.quorum}"
        else:
            self._update_model(model, screened, report)
        # The observers' own: what they do to it changes nothing.
        report.model = model.current.clone()
        self._log_losses(report)
        return report

    def _log_losses(self, report: RoundReport) -> None:
        """Who was rejected and why; of a confidential round only where DEBUG is asked for."""
        level = logging.DEBUG if report.confidential else logging.WARNING
        for lost in report.rejected:
            told = (report.server_round, lost.client, lost.reason)
            logger.log(level, "round %d: client %d rejected: %s", *told)
        if report.skipped:
            told_of_round = (report.server_round, report.skipped)
            logger.log(level, "round %d left the model as it was: %s", *told_of_round)
        if report.confidential and report.invited and not report.accepted:
            self._tell_of_silence(report)

    def _tell_of_silence(self, report: RoundReport) -> None:
        """Once in a run that nobody counted in a round, without a name or a client's words."""
        if self._told_of_silence:
            return
        self._told_of_silence = True
        attested = self._broadcast.attested
        needed = (
            f", and none would that does not attest {attested.rule}: {WHO_ATTESTS}"
            if attested
            else ""
        )
        left = "stays as it was" if report.skipped else "moves by noise alone"
        logger.warning(
            "round %d: no reply counts%s. The model %s. This is said once; who was rejected and "
            "why is logged at level DEBUG, for the operator alone",
            report.server_round,
            needed,
            left,
        )

    def _update_model(self, model: GlobalModel, screened: Screened, report: RoundReport) -> None:
        began = time.monotonic()
        contributions, updates = screened.contributions, screened.updates
        report.updates = updates
        report.claimed_norms = _claimed(contributions, UPDATE_NORM)
        report.sample_epsilons = _claimed(contributions, SAMPLE_EPSILON)
        context = self._broadcast.context
        assert context is not None
        context = replace(context, accepted=tuple(contributions))
        bound = self.norm_bound(context)
        report.norm_bound = bound.norm
        over = bound.exceeded(updates, context.model, context.local_lr)
        report.over_bound = [c for c, is_over in zip(contributions, over, strict=True) if is_over]
        try:
            aggregate = self.combine(updates, self._weights(contributions, context), context)
            combined = time.monotonic()
            vector = self.on_aggregate(aggregate.vector, self._local_lr)
            if vector.shape != aggregate.vector.shape:
                raise ValueError(f"the server's step has the shape {list(vector.shape)}")
            model.step(self._step, vector, self._local_lr)
        except ValueError as error:
            report.skipped = f"the updates cannot be aggregated: {error}"
            report.ends_run = isinstance(error, RunOver)
            report.seconds["aggregation"] = time.monotonic() - began
            return
        report.seconds["aggregation"] = combined - began
        report.seconds["server-step"] = time.monotonic() - combined
        # With momentum the model may keep the vector itself.
        kept_by_model = model.velocity is not None
        report.aggregate = aggregate.vector.clone() if kept_by_model else aggregate.vector
        report.weights = aggregate.weights
        report.iterations = aggregate.iterations
        kept = aggregate.survivors.tolist()
        report.filtered = [c for c, keep in zip(report.accepted, kept, strict=True) if not keep]

    def _weights(
        self, contributions: Mapping[int, Contribution], context: RoundContext
    ) -> torch.Tensor:
        """Weights [K] of the updates. Declared counts cap what a client claims afterwards."""
        if self._weighting == "uniform":
            return context.cohort.weights(contributions)
        examples = {c: self._capped(c, one.num_examples) for c, one in contributions.items()}
        return context.cohort.weights(contributions, examples)

    def _capped(self, client: int, claimed: int | None) -> int:
        declared = self._registry[client].num_examples
        if claimed is None:
            return declared or 1
        return claimed if declared is None else min(claimed, declared)

    # Evaluation and observers.

    def _evaluate_initial(
        self, result: Result, arrays: ArrayRecord, evaluate_fn: EvaluateFn | None
    ) -> dict[str, float]:
        """Round 0: the initial model's metrics, where the server can evaluate it."""
        if evaluate_fn is None:
            return {}
        model = self._require_model().current.clone()
        report = RoundReport(0, [], [], [], self._local_lr, model, confidential=self.confidential)
        report.metrics = _record(result, 0, evaluate_fn(0, arrays))
        report.evaluated_by = "server" if report.metrics else None
        self._note_accuracy(report.metrics)
        self._publish(report)
        return report.metrics

    def _evaluate(
        self,
        report: RoundReport,
        result: Result,
        transport: Transport,
        timeout: float,
        config: ConfigRecord | None,
        evaluate_fn: EvaluateFn | None,
    ) -> None:
        began = time.monotonic()
        server_round = report.server_round
        arrays = self._require_model().arrays()
        if evaluate_fn is not None:
            report.metrics = _record(result, server_round, evaluate_fn(server_round, arrays))
            report.evaluated_by = "server" if report.metrics else None
        else:
            self._send_evaluation(server_round, arrays, config, transport, timeout)
            asked = self._evaluation
            inbox = transport.exchange(asked.messages, asked.clients, asked.left(timeout))
            metrics = average_metrics(inbox, self._capped)
            if metrics is not None:
                result.evaluate_metrics_clientapp[server_round] = metrics
                report.metrics = _scalars(metrics)
                report.evaluated_by = "clients"
        report.seconds["evaluation"] = time.monotonic() - began

    def _note_accuracy(self, metrics: dict[str, float]) -> float | None:
        """Remember this evaluation's accuracy; returns what was gained since the last one."""
        accuracy = metrics.get("accuracy")
        before, self._accuracy = self._accuracy, self._accuracy if accuracy is None else accuracy
        return None if accuracy is None or before is None else accuracy - before

    def _publish(self, report: RoundReport) -> None:
        for observer in self._observers:
            observer(report)

    def _require_model(self) -> GlobalModel:
        if self._model is None:
            raise RuntimeError("the strategy has no model yet: call start or configure_train")
        return self._model


def _round_content(arrays: ArrayRecord, config: Mapping[str, Any], server_round: int) -> RecordDict:
    """What the messages of a round have in common."""
    shared = ConfigRecord({**config, SERVER_ROUND: server_round})
    return RecordDict({ARRAYS: arrays, CONFIG: shared})


def _check_options(weighting: str, identity: str, evaluate_every: int) -> None:
    if weighting not in ("uniform", "num-examples"):
        raise ValueError(f"weighting = {weighting!r} is not allowed: uniform or num-examples")
    if identity not in ("query", "key", "node"):
        raise ValueError(f"identity = {identity!r} is not allowed: query, key or node")
    if evaluate_every < 1:
        raise ValueError(f"evaluate_every = {evaluate_every} is not allowed: at least 1")


def _claimed(contributions: Mapping[int, Contribution], key: str) -> dict[int, float]:
    """What clients say of themselves under `key`, where it is finite and not negative."""
    claims = {c: contribution.metrics.get(key) for c, contribution in contributions.items()}
    return {
        client: claim
        for client, claim in claims.items()
        if claim is not None and 0 <= claim < math.inf
    }


def _record(result: Result, server_round: int, metrics: MetricRecord | None) -> dict[str, float]:
    if metrics is None:
        return {}
    result.evaluate_metrics_serverapp[server_round] = metrics
    return _scalars(metrics)


def _scalars(metrics: MetricRecord) -> dict[str, float]:
    return {k: float(v) for k, v in metrics.items() if isinstance(v, int | float)}
