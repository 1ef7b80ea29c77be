"""One round: the hooks by which an algorithm enters it, and its way from the cohort to the new w.

    plan_round -> train_messages -> collect, screened -> close_round: bound, combine, server step

Between the steps goes a frozen RoundContext, which each gives to the next one knowing more.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Message, MessageType

from blackthorn.flower_port.transports import Enough, Transport
from blackthorn.randomness import Stream, generator_of
from blackthorn.settings.catalogue import Facts
from blackthorn.settings.config import RunConfig, read_options
from blackthorn.settings.declaration import KeyGroup
from blackthorn.wire import MEMORY, SAMPLE_EPSILON, UPDATE_NORM

from .aggregation import Aggregate, RoundOfRule
from .aggregators import Aggregator
from .array_codec import encode
from .attestation import Attestation, SentRule
from .bounding import NormBound
from .enrolment import Client, ClientRegistry
from .global_model import GlobalModel, ModelLayout, ServerStep
from .local_rule import LocalRule
from .messages import Asked, content_of_round, write_messages
from .participation import CohortPlan, Participation, send_order
from .release import real
from .reports import RoundReport
from .screening import Contribution, Screened, Screening


@dataclass(frozen=True)
class RoundContext:
    """What is known of a round; steps give the next one a context that knows more.

    `local_lr` is η_l, `model` w_t [d], `population` all clients that ever enrolled; these from the
    start on. `cohort`: who of them is invited and how often each counts, once it is drawn. `rule`:
    the clients' half of the algorithm, once it is made. `attested`: what a reply has to hold, None
    where any client may answer. `accepted`: the clients whose updates are the rows of U [K, d], in
    that order, once replies have been screened.
    """

    server_round: int
    local_lr: float
    model: torch.Tensor
    population: tuple[int, ...] = ()
    cohort: CohortPlan = field(default_factory=lambda: CohortPlan({}))
    rule: LocalRule = field(default_factory=LocalRule)
    attested: Attestation | None = None
    accepted: tuple[int, ...] = ()


class RunOver(ValueError):
    """The round leaves the model as it was, and no other one follows; the message says why."""


class ModelKept(ValueError):
    """The round leaves the model as it was, because it was for something else; the message says
    for what."""


class RoundHooks:
    """What an algorithm may change of a run: it overrides these, and nothing of the flow.

    Hooks get the frozen context and give values back. Updates are in gradient units,
    u_i = (w_t − w_i)/η_l. The facts below hold for all rounds of a run.
    """

    # Of an algorithm of the user's own, what settings have to know; the catalogue says it of ours.
    facts: Facts = Facts(clip_norm="optional")
    # What the key algorithm-options may hold, by the names of the constructor's arguments.
    Options: type[KeyGroup] | None = None
    # Whether a reply counts only if it attests the round's rule: the server can neither do the
    # clients' part of it in their place nor see that it was done.
    needs_attestation: bool = False
    # Whether nothing of single clients or of the cohort may leave the server.
    confidential: bool = False
    # Accepted replies below which any round leaves the model as it was.
    quorum: int = 1

    def __init__(self, aggregator: Aggregator, participation: Participation, seed: int) -> None:
        self._aggregate = aggregator
        self._participation = participation
        self._seed = seed
        # Numbers of the round that was combined last, for whoever is told its metrics: of what is
        # released alone.
        self.told: Mapping[str, float] = {}
        # Whose `on_aggregate` is called: under a claim that of one who sees what is released alone.
        self.after_release: RoundHooks = self

    @classmethod
    def configured_rule(cls, config: RunConfig, local_lr: float, asked: SentRule) -> LocalRule:
        """What a client does in a round at the rate η_l by the run's configuration: the same as
        `local_rule`, or the client does not answer. `asked` is what the server sent, for a number
        that the configuration leaves to the server."""
        del config, local_lr, asked
        return LocalRule()

    @classmethod
    def option_values(cls, config: RunConfig) -> dict[str, Any]:
        """The run's values of `Options`. Raises ConfigError, one line, for a wrong one."""
        return read_options(config.algorithm_options, cls.Options)

    @classmethod
    def check_examples(cls, config: RunConfig, counts: Mapping[int, int]) -> None:
        """Before a run, where its clients' numbers of examples are known: raises ValueError, one
        line, where the algorithm is not what it is called with these."""

    # Before the first round.

    def check_layout(self, layout: ModelLayout) -> None:
        """Raises ValueError where what travels of a model cannot be brought under the algorithm."""

    def rounds_allowed(
        self,
        num_rounds: int,
        done: int,  # noqa: ARG002
        model: torch.Tensor,  # noqa: ARG002
    ) -> int:
        """How many of the rounds wanted a run may have that has had `done` of them.

        `model` is w_1 [d]. Raises ValueError where not even one may follow.
        """
        return num_rounds

    def on_enrolment(self, clients: Sequence[Client]) -> None:
        """Called with the enrolled clients before the first round."""

    def own_values(self) -> dict[str, Any]:
        """What the algorithm has to remember between rounds, by name: JSON's types, and vectors."""
        return {}

    def restore_own(self, values: Mapping[str, Any]) -> None:
        """Go on from `own_values`; called when the clients have enrolled."""

    # In every round, in this order.

    def draw_cohort(self, clients: Sequence[int], context: RoundContext) -> CohortPlan:
        """The round's cohort out of the `clients` that ever enrolled, ascending."""
        return self._participation.sample(
            clients, self._generator(Stream.PARTICIPATION, context.server_round)
        )

    def local_rule(self, context: RoundContext) -> LocalRule:  # noqa: ARG002
        """What every client does in the round, whoever else does."""
        return LocalRule()

    def check_rule(self, rule: LocalRule, context: RoundContext) -> LocalRule:  # noqa: ARG002
        """The rule that is sent, of the `rule` that `local_rule` gave. Raises ValueError where it
        is not the one of which something is claimed."""
        return rule

    def gather(
        self,
        transport: Transport,
        asked: Asked,
        context: RoundContext,  # noqa: ARG002
        screening: Screening,
        timeout: float,
        enough: int | None,
    ) -> Screened:
        """What comes of the round's messages by its deadline: one exchange, every reply
        screened."""
        return collect(transport, asked, screening, timeout, enough, self._seed)

    def replies_needed(self, context: RoundContext) -> int:  # noqa: ARG002
        """Accepted replies below which this round leaves the model as it was."""
        return self.quorum

    def norm_bound(self, context: RoundContext) -> NormBound:  # noqa: ARG002
        """The largest norm that an honest client's update has."""
        return NormBound(math.inf)

    def bound(self, updates: torch.Tensor, context: RoundContext) -> torch.Tensor:  # noqa: ARG002
        """Updates [K, d] with every client's influence bounded (new tensor)."""
        return updates

    def combine(
        self, updates: torch.Tensor, weights: torch.Tensor, context: RoundContext
    ) -> Aggregate:
        """One vector [d] from the round's updates [K, d], still unbounded, and weights [K].

        The weights are float64 and sum to 1. Raises ValueError where the rule's guarantee does not
        hold: the round is skipped; RunOver where the run is to end with it, too, ModelKept where
        the round was for something else than a step.
        """
        return self.aggregate(updates, weights, context)

    def aggregate(
        self, updates: torch.Tensor, weights: torch.Tensor, context: RoundContext
    ) -> Aggregate:
        """The rule on bounded updates, without noise and whatever else a system adds: what an
        attacker who knows the configuration can compute. As `combine`."""
        bounded = self.bound(updates, context)
        return self._aggregate(bounded, weights, self._of_rule(context))

    def on_aggregate(self, vector: torch.Tensor, local_lr: float) -> torch.Tensor:  # noqa: ARG002
        """What the server steps along in place of the aggregate [d], and of it alone: under a claim
        it is noised, and who took part is not to be told."""
        return vector

    def _of_rule(self, context: RoundContext) -> RoundOfRule:
        generator = self._generator(Stream.RULE, context.server_round)
        return RoundOfRule(context.server_round, context.local_lr, context.model, generator)

    def _generator(self, stream: Stream, server_round: int) -> np.random.Generator:
        return generator_of(stream, self._seed, server_round)


def plan_round(
    hooks: RoundHooks,
    server_round: int,
    local_lr: float,
    model: GlobalModel,
    clients: Sequence[int],
) -> RoundContext:
    """Participation: who of the `clients` takes part in the round, and what they are to do."""
    # Python's own float: one of a class of somebody's may be another whenever it is asked.
    rate = real("local rate", local_lr)
    context = RoundContext(server_round, rate, model.current, tuple(clients))
    context = replace(context, cohort=hooks.draw_cohort(clients, context))
    rule = hooks.check_rule(hooks.local_rule(context), context)
    # What is each client's own nobody else can keep.
    is_attested = hooks.needs_attestation or bool(model.layout.local)
    attested = Attestation(rule.sent, server_round) if is_attested else None
    return replace(context, rule=rule, attested=attested)


def train_messages(
    context: RoundContext,
    model: GlobalModel,
    config: Mapping[str, Any],
    registry: ClientRegistry,
    ttl: float | None,
) -> list[Message]:
    """Broadcast: one message a client of the cohort, with w_t, the config and the rule."""
    content = content_of_round(
        context.server_round, model.sent(), config, context.rule.sent, model.layout
    )
    cohort = context.cohort
    kind, clients = MessageType.TRAIN, cohort.clients
    messages = write_messages(kind, content, clients, registry, ttl, cohort.told)
    for client, message in zip(clients, messages, strict=True):
        if client in cohort.memories:
            memory = encode(cohort.memories[client].numpy())
            message.content[MEMORY] = ArrayRecord({MEMORY: memory})
    return messages


def screening_of(context: RoundContext, model: GlobalModel) -> Screening:
    """What screens the round's replies."""
    return Screening(context.cohort.clients, model, context.local_lr, context.attested)


def collect(
    transport: Transport,
    asked: Asked,
    screening: Screening,
    timeout: float,
    enough: int | None,
    seed: int,
) -> Screened:
    """Send a round's messages and screen the replies, no more of them than are `enough`."""
    messages, clients, seconds = asked.messages, asked.clients, asked.left(timeout)
    if enough is None:
        return screening.result(transport.exchange(messages, clients, seconds))
    # Clients that answer at the same time must not be preferred by their ids.
    order = send_order(seed, asked.server_round, len(clients))
    messages, clients = [messages[i] for i in order], [clients[i] for i in order]
    # A reply that will not count must not end the round for those that would.
    until = Enough(enough, screening.counts)
    return screening.result(transport.exchange(messages, clients, seconds, until))


def close_round(
    hooks: RoundHooks,
    context: RoundContext,
    screened: Screened,
    examples: Mapping[int, int] | None,
    model: GlobalModel,
    step: ServerStep,
) -> RoundReport:
    """Bounding, aggregation and the server step, on `model`; it stays as it was where they fail.

    `examples`: by how many of them an accepted client weighs (None: all alike).
    """
    context = replace(context, accepted=tuple(screened.contributions))
    report = RoundReport(
        server_round=context.server_round,
        invited=context.cohort.clients,
        accepted=list(context.accepted),
        rejected=screened.rejected,
        surplus=screened.surplus,
        local_lr=context.local_lr,
        model=context.model,
        confidential=hooks.confidential,
    )
    needed = hooks.replies_needed(context)
    if len(context.accepted) < needed:
        report.below_quorum = True
        report.skipped = f"{len(context.accepted)} replies, fewer than {needed}"
    else:
        _measure(hooks, context, screened, report, model.layout.precision)
        weights = context.cohort.weights(context.accepted, examples)
        _update_model(hooks, context, screened, weights, model, step, report)
    report.model, report.statistics = model.current, model.named_statistics()
    return report


def _measure(
    hooks: RoundHooks,
    context: RoundContext,
    screened: Screened,
    report: RoundReport,
    precision: float,
) -> None:
    """What the report tells of the updates as they came."""
    report.updates = screened.updates
    report.claimed_norms = _claimed(screened.contributions, UPDATE_NORM)
    report.sample_epsilons = _claimed(screened.contributions, SAMPLE_EPSILON)
    bound = hooks.norm_bound(context)
    report.norm_bound = bound.norm
    if bound.norm < math.inf:
        over = bound.exceeded(screened.updates, context.model, context.local_lr, precision)
        accepted = zip(context.accepted, over.tolist(), strict=True)
        report.over_bound = [client for client, is_over in accepted if is_over]


def _claimed(contributions: Mapping[int, Contribution], key: str) -> dict[int, float]:
    """What clients say of themselves under `key`, where it is finite and not negative."""
    claims = {c: contribution.metrics.get(key) for c, contribution in contributions.items()}
    return {
        client: claim
        for client, claim in claims.items()
        if claim is not None and 0 <= claim < math.inf
    }


def _update_model(
    hooks: RoundHooks,
    context: RoundContext,
    screened: Screened,
    weights: torch.Tensor,
    model: GlobalModel,
    step: ServerStep,
    report: RoundReport,
) -> None:
    began = combined = time.monotonic()
    try:
        aggregate = hooks.combine(screened.updates, weights, context)
        combined = time.monotonic()
        report.told = dict(hooks.told)
        # Its own: what is kept, or written into, is not what was released, or is done again.
        vector = hooks.after_release.on_aggregate(aggregate.vector.clone(), context.local_lr)
        if vector.shape != context.model.shape:
            raise ValueError(
                f"the server's step has the shape {list(vector.shape)}, not that of the model, "
                f"{list(context.model.shape)}"
            )
        model.step(step, vector, context.local_lr)
    except ValueError as error:
        meant = isinstance(error, ModelKept)
        report.skipped = str(error) if meant else f"the updates cannot be aggregated: {error}"
        report.ends_run = isinstance(error, RunOver)
        report.seconds["aggregation"] = time.monotonic() - began
        return
    model.average_statistics(screened.statistics, _kept(aggregate))
    report.seconds["aggregation"] = combined - began
    report.seconds["server-step"] = time.monotonic() - combined
    report.aggregate, report.weights = aggregate.vector, aggregate.weights
    report.iterations = aggregate.iterations
    kept = aggregate.survivors.tolist()
    report.filtered = [c for c, keep in zip(context.accepted, kept, strict=True) if not keep]


def _kept(aggregate: Aggregate) -> np.ndarray:
    """What the statistics of every row count for [K]: those of kept rows, by the rule's weights."""
    kept = aggregate.survivors.numpy().astype(np.float64)
    weights = kept * np.nan_to_num(aggregate.weights.numpy()).clip(min=0.0)
    return weights if weights.sum() > 0 else kept
