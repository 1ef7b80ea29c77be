"""What every published system stands on: one Flower Strategy, one flow for every round.

    participation -> broadcast -> local training -> screening -> bounding -> aggregation
    -> server step -> evaluation -> observers

`start` below is the flow; a round's own steps, and the hooks by which a system changes them, are in
`rounds.py`. A system is a subclass that sets the aggregator or overrides hooks, and nothing else.
"""

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import nn

from blackthorn.flower_port.synchronous import attribute_replies
from blackthorn.flower_port.transports import Transport, transport_of
from blackthorn.installation import CODE
from blackthorn.settings.config import RunConfig
from blackthorn.wire import CLAIM, LOCAL_LR, ROUNDS_BEGUN, SERIES, SERVER_CODE

from . import rounds
from .aggregation.mean import weighted_mean
from .aggregators import Aggregator
from .enrolment import ClientRegistry
from .evaluation import EvaluateFn, Evaluation
from .global_model import GlobalModel, ServerStep
from .layout import STATISTICS, Statistics
from .learning_rate import LocalRate
from .messages import Asked, new_series
from .options import Observer, StrategyOptions
from .output_iterate import IterateKeeper, OutputIterate
from .participation import FullParticipation, Participation
from .release import whole
from .reports import LossLog, RoundReport
from .rounds import RoundContext, RoundHooks
from .run_state import MEAN, QuorumWatch, RunState
from .screening import Screened

logger = logging.getLogger("blackthorn")


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
        shared: Sequence[str] = ("*",),
        statistics: Statistics = "average",
        seed: int = 0,
        observers: Sequence[Observer] = (),
    ) -> None:
        if weighting not in ("uniform", "num-examples"):
            raise ValueError(f"weighting = {weighting!r} is not allowed: uniform or num-examples")
        if evaluate_every < 1:
            raise ValueError(f"evaluate_every = {evaluate_every} is not allowed: at least 1")
        if statistics not in STATISTICS:
            raise ValueError(f"statistics = {statistics!r} is not allowed: {', '.join(STATISTICS)}")
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
        self._evaluate_every = whole("evaluate_every", evaluate_every)
        self._output = output or OutputIterate()
        self._observers = list(observers)
        self._shared, self._statistics = tuple(shared), statistics
        self._registry = ClientRegistry(identity, num_clients, claim=lambda: self.confidential)
        # Clients were waited for, though nobody may have come: they are waited for once.
        self._has_enrolled = False
        self._local_lr = self._rate.first
        self._evaluation = Evaluation(self._registry, start_timeout, self._output)
        self._model: GlobalModel | None = None
        self._series = new_series()
        self._iterates = IterateKeeper(self._output, 1, seed)
        # The last round on record, and the last one that clients were asked for.
        self._round = self._asked_round = 0
        # How often clients were asked to train: in a resumed run more often than there are rounds.
        self.rounds_begun = 0
        # False: earlier processes may have asked clients for more.
        self.knows_rounds_begun = True
        # `is_judged`: whether an evaluation has told how good a model is, which `best` needs.
        self.output_round, self.is_judged = 0, False
        # Whether `state` is whole: not from a round's first change of the model or of what
        # accounts for it until the observers have seen the round.
        self.between_rounds = False
        self._loss_log = LossLog()
        # What Flower's own loop has configured and not aggregated yet; `start` needs neither.
        self._configured: tuple[RoundContext, Asked] | None = None
        self._configured_evaluation: Asked | None = None

    @classmethod
    def build(cls, config: RunConfig, options: StrategyOptions) -> "FederatedStrategy":
        """What the run configuration describes: `options` with what is the algorithm's own."""
        return cls(**options, **cls.option_values(config))

    # A run.

    def start(
        self,
        grid: Grid | Transport,
        initial_arrays: ArrayRecord | nn.Module,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
        from_state: RunState | None = None,
    ) -> Result:
        """Run `num_rounds` rounds; the arguments and the result are those of Flower's strategies.

        `initial_arrays` may be a module, too, which also knows what is frozen (that does not
        travel), tied (that counts once) or a buffer.
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
        model = self._require_model()
        if from_state is None:
            metrics = self._evaluate_initial(model.arrays(), result, evaluate_fn)
            self._iterates.see(0, model.arrays(), metrics)
        self.between_rounds = True
        for server_round in range(self._round + 1, num_rounds + 1):
            context, asked = self._plan_and_write(server_round, train_config, transport, timeout)
            screening, enough = rounds.screening_of(context, model), self._enough_replies
            screened = self.gather(transport, asked, context, screening, timeout, enough)
            # Before the round is charged, which hangs on the link that it went over.
            refusals = self._registry.refusals(transport)
            self.between_rounds = False
            report = self._close_round(context, asked, screened)
            result.train_metrics_clientapp[server_round] = report.metric_record()
            if server_round % self._evaluate_every == 0 or server_round == num_rounds:
                told = self._told(evaluate_config)
                self._evaluation.of_round(
                    report, result, model, evaluate_fn, transport, told, timeout
                )
            gained = self._evaluation.gained(report.metrics)
            self._local_lr = self._rate.after_round(self._local_lr, gained, server_round)
            self._iterates.see(server_round, model.arrays(), report.metrics)
            self._round = server_round
            report.refusals = refusals
            # Before the observers, who may write down the state.
            self._quorum_watch.count(report)
            self._publish(report)
            self.between_rounds = True
            self._quorum_watch.check(report)
            if report.ends_run:
                break
        result.arrays, self.output_round = self._iterates.arrays, self._iterates.server_round
        self.is_judged = self._iterates.is_judged
        return result

    def state(self) -> RunState:
        """Where the run stands after the round that was published last, for `start`.

        To be asked for by the round's observers, or where `between_rounds` holds: in the next
        round model and ledger move apart. It is a copy: what is written into it changes nothing.
        """
        model, iterates = self._require_model(), self._iterates
        # The round that clients are being asked for is not on record: who goes on counts it.
        under_way = self._asked_round > self._round
        arrays = model.moving_parts()
        if iterates.server_round != self._round:
            arrays["output"] = model.vector(iterates.arrays).numpy()
            if len(model.statistics):
                arrays["output-statistics"] = model.statistics_of(iterates.arrays)
        arrays |= {MEAN + name: mean for name, mean in iterates.means().items()}
        values = {
            "local_lr": self._local_lr,
            "accuracy": self._evaluation.accuracy,
            "rounds_begun": self.rounds_begun - under_way,
            "below_quorum": self._quorum_watch.in_a_row,
            "clients": self._registry.values(),
            "output": iterates.values(),
            "series": self._series,
        }
        return RunState.of(self._round, arrays, values, self.own_values())

    def summary(self) -> None:
        """Log which strategy runs, and with what."""
        name, step = type(self).__name__, self._step
        rates = (self._rate.first, step.server_lr, step.momentum)
        form = "%s: %s, local rate %g, server rate %g, momentum %g, %s weights"
        logger.info(form, name, self._participation, *rates, self._weighting)

    # The same flow, step by step, for whoever drives a Flower Strategy in a loop of their own.

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Draw the cohort and write its messages (nothing is sent yet)."""
        transport = transport_of(grid)
        if self._model is None or not self._model.issued(arrays):
            self._model = self._model_of(arrays)
        if not self._has_enrolled:
            self._enrol_all(transport)
        self._registry.refusals(transport)
        self._configured = self._plan_and_write(server_round, config, transport, None)
        return self._configured[1].messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Screen, bound, combine, step; the global model stays as it was in a skipped round.

        Raises RuntimeError where nobody was asked for the round, or it has been released before.
        """
        model = self._require_model()
        if self._configured is None:
            raise RuntimeError(
                f"round {server_round} has been released, and is not released again with the same "
                "cohort and noise: call configure_train for a new one"
            )
        (context, asked), self._configured = self._configured, None
        deliveries = attribute_replies(replies, asked.messages, asked.clients)
        screened = rounds.screening_of(context, model).result(deliveries)
        report = self._close_round(context, asked, screened)
        self._local_lr = self._rate.after_round(self._local_lr, None, server_round)
        self._publish(report)
        return model.arrays(), report.metric_record()

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Messages that ask every connected client to evaluate the model."""
        travelling = arrays if self._model is None else self._model.travelling(arrays)
        asked = self._configured_evaluation = self._evaluation.ask(
            server_round,
            travelling,
            self._told(config),
            transport_of(grid),
            None,
            self.confidential,
        )
        return asked.messages

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Mean of the clients' sane metrics, weighted by their (capped) example counts."""
        del server_round
        asked = self._configured_evaluation
        if asked is None:
            return None
        deliveries = attribute_replies(replies, asked.messages, asked.clients)
        return self._evaluation.average(deliveries).metrics

    # A run's beginning.

    def _begin(
        self,
        transport: Transport,
        initial: ArrayRecord | nn.Module,
        num_rounds: int,
        state: RunState | None,
    ) -> int:
        """Set up the run, or where it stood, and wait for the clients; its rounds' number."""
        self._model, self._series = self._model_of(initial), new_series()
        self._local_lr, self._evaluation.accuracy = self._rate.first, None
        self._round = self._asked_round = 0 if state is None else state.server_round
        num_rounds = self.rounds_allowed(num_rounds, self._round, self._model.current)
        self._iterates = IterateKeeper(self._output, num_rounds, self._seed)
        if state is not None:
            self._restore(state, self._model)
        if self._round < num_rounds:
            self._enrol_all(transport)
        if state is not None:
            self.restore_own(state.own)
        return num_rounds

    def _model_of(self, initial: ArrayRecord | nn.Module) -> GlobalModel:
        model = GlobalModel.of(initial, self._shared, self._statistics)
        self.check_layout(model.layout)
        return model

    def _restore(self, state: RunState, model: GlobalModel) -> None:
        arrays, means = state.arrays_of_run(), state.means()
        output, statistics = arrays.pop("output", None), arrays.pop("output-statistics", None)
        model.restore(arrays)
        self._local_lr = state.values["local_lr"]
        self._evaluation.accuracy = state.values["accuracy"]
        self.rounds_begun, self.knows_rounds_begun = state.begun, state.counted
        self._quorum_watch.in_a_row = state.values["below_quorum"]
        # (Earlier versions did not name it.)
        self._series = state.values.get("series", self._series)
        self._registry.restore(state.values["clients"])
        kept = model.arrays()
        if output is not None:
            kept = model.arrays_of(torch.from_numpy(output), statistics)
        self._iterates.restore(kept, state.values["output"], means)

    def _least(self) -> int | None:
        """Clients without which the run does not go on. None where nothing of the cohort may be
        told: all others could leave, and see by its end whether the one is there."""
        return None if self.confidential and self.quorum == 0 else self._min_replies

    def _enrol_all(self, transport: Transport) -> None:
        self._registry.wait_for(transport, self._num_clients, self._least(), self._start_timeout)
        # From here on they are the run's.
        self._registry.refusals(transport)
        self.on_enrolment([self._registry[client] for client in self._registry.clients()])
        self._has_enrolled = True

    # A round's beginning and end.

    def _plan_and_write(
        self,
        server_round: int,
        config: Mapping[str, Any] | None,
        transport: Transport,
        timeout: float | None,
    ) -> tuple[RoundContext, Asked]:
        """Participation and broadcast: the round's plan, and its messages, which nobody has yet."""
        began = time.monotonic()
        patience = min(self._start_timeout, timeout or self._start_timeout)
        least = self._least()
        since = self._registry.wait_for_any(transport, least, patience, self._start_timeout)
        model, clients = self._require_model(), self._registry.clients()
        context = rounds.plan_round(self, server_round, self._local_lr, model, clients)
        self.rounds_begun += 1
        told = {**self._told(config), LOCAL_LR: self._local_lr, ROUNDS_BEGUN: self.rounds_begun}
        if self.confidential:
            # What is claimed counts on the clients' half, in this version.
            told[CLAIM], told[SERVER_CODE] = "client", CODE
        messages = rounds.train_messages(context, model, told, self._registry, timeout)
        self._asked_round = server_round
        return context, Asked(server_round, context.cohort.clients, messages, began, since)

    def _told(self, config: Mapping[str, Any] | None) -> dict[str, Any]:
        return {**(config or {}), SERIES: self._series}

    def _close_round(self, context: RoundContext, asked: Asked, screened: Screened) -> RoundReport:
        """Bounding, aggregation and server step of the round whose replies have been screened."""
        training = time.monotonic() - asked.began - screened.seconds
        claimed = {c: own.num_examples for c, own in screened.contributions.items()}
        counted = self._weighting == "num-examples"
        examples = {c: self._registry.examples(c, claimed[c]) for c in claimed} if counted else None
        model = self._require_model()
        report = rounds.close_round(self, context, screened, examples, model, self._step)
        report.seconds |= {"training": training, "screening": screened.seconds}
        self._loss_log.note(report, context.attested)
        return report

    # Evaluation and observers.

    def _evaluate_initial(
        self, arrays: ArrayRecord, result: Result, evaluate_fn: EvaluateFn | None
    ) -> dict[str, float]:
        """Round 0: the initial model's metrics, where the server can evaluate it."""
        if evaluate_fn is None:
            return {}
        model = self._require_model().current
        report = RoundReport(0, [], [], [], self._local_lr, model, confidential=self.confidential)
        self._evaluation.at_the_server(report, result, arrays, evaluate_fn)
        self._evaluation.gained(report.metrics)
        self._publish(report)
        return report.metrics

    def _publish(self, report: RoundReport) -> None:
        for observer in self._observers:
            observer(report.copied())

    def _require_model(self) -> GlobalModel:
        if self._model is None:
            raise RuntimeError("the strategy has no model yet: call start or configure_train")
        return self._model
