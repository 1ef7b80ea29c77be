"""One round: what is known of it at every step, and the hooks by which an algorithm enters it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from blackthorn.randomness import Stream, generator_of
from blackthorn.settings.algorithm_options import read_options
from blackthorn.settings.catalogue import Facts
from blackthorn.settings.config import RunConfig
from blackthorn.settings.declaration import KeyGroup

from .aggregation import Aggregate
from .aggregators import Aggregator
from .attestation import Attestation, SentRule
from .bounding import NormBound
from .enrolment import Client
from .local_rule import LocalRule
from .participation import CohortPlan, Participation


@dataclass(frozen=True)
class RoundContext:
    """What is known of a round; steps give the next one a context that knows more.

    `local_lr` is η_l and `model` w_t [d], from the start on. `cohort`: who is invited and how often
    each counts, once it is drawn. `rule`: the clients' half of the algorithm, once it is made.
    `attested`: what a reply has to hold, None where any client may answer. `accepted`: the clients
    whose updates are the rows of U [K, d], in that order, once replies have been screened.
    """

    server_round: int
    local_lr: float
    model: torch.Tensor
    cohort: CohortPlan = field(default_factory=lambda: CohortPlan({}))
    rule: LocalRule = field(default_factory=LocalRule)
    attested: Attestation | None = None
    accepted: tuple[int, ...] = ()


class RunOver(ValueError):
    """The round leaves the model as it was, and no other one follows; the message says why."""


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
    # Accepted replies below which a round leaves the model as it was.
    quorum: int = 1

    def __init__(self, aggregator: Aggregator, participation: Participation, seed: int) -> None:
        self._aggregate = aggregator
        self._participation = participation
        self._seed = seed

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
        """What the algorithm has to remember between rounds, in JSON's types."""
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
        hold: the round is skipped; RunOver where the run is to end with it, too.
        """
        bounded = self.bound(updates, context)
        return self._aggregate(bounded, weights, self._generator(Stream.RULE, context.server_round))

    def on_aggregate(self, vector: torch.Tensor, local_lr: float) -> torch.Tensor:  # noqa: ARG002
        """What the server steps along in place of the aggregate [d], and of it alone: under a claim
        it is noised, and who took part is not to be told."""
        return vector

    def _generator(self, stream: Stream, server_round: int) -> np.random.Generator:
        return generator_of(stream, self._seed, server_round)
