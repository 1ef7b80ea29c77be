"""DP-FedAvg with clipping (Das et al., Algorithm 1; Zhang et al., Algorithm 3), DP-NormFedAvg, that
normalises in place of clipping (Das et al., Algorithm 2), and what both are: a bounded, noised sum
with a fixed denominator.

Here is the server's half, the clients' is in `bounded_update.py`, and all numbers (q, m, r, C, z,
s, T, δ) and whom they protect from whom in `privacy_plan.py`. Below these `noise.py` draws N(0, σ²)
and `ledger.py` keeps on disk what all released models have cost together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import torch
from flwr.serverapp.strategy import Result

from blackthorn.randomness import Stream
from blackthorn.settings.config import RunConfig
from blackthorn.settings.derived import noise_shares

from . import bounding
from .accounting import Figure
from .adaptive_threshold import SLACK, Threshold
from .aggregation import Aggregate
from .aggregation.mean import weighted_mean
from .attestation import SentRule
from .base import FederatedStrategy
from .bounded_update import BoundedUpdate, ClipUpdate, NormalizeUpdate
from .bounding import ClipNorm, NormBound
from .claim_options import check_mechanism, check_options, check_what_is_sent
from .enrolment import Client
from .global_model import ModelLayout
from .ledger import Ledger
from .local_rule import LocalRule
from .noise import (
    Randomness,
    SeededRandomness,
    SystemRandomness,
    client_deviation,
    finite_sum,
    gaussian_noise,
    longest_noised,
    on_grid,
    signal_to_noise,
)
from .options import Denominator, StrategyOptions
from .own_mechanism import check_published, seeing_releases_alone
from .participation import CohortPlan
from .privacy_plan import ONLY_LOCAL, PrivacyPlan
from .release import Release
from .rounds import RoundContext, RunOver
from .run_state import RunState
from .turns import Turns, check_turns


class PrivateAveraging(FederatedStrategy):
    """a_t = (1/r) [ Σ_{i ∈ S_t} g_i + N(0, (z C)² I) ], r = q m fixed, g_i bounded by C.

    `privacy` is the plan that sampler, mechanism and accountant share; its participation replaces
    the base's. `ledger` is the file of what was spent (None: memory alone), written before the
    noised model exists. Every round is charged and released, whoever answers. `noises`: where
    clients take turns, the folder of each round's noise and release, the same after a death.
    `denominator` "replies", unclaimed: over the number of replies, not r (Zhang et al.).

    Raises ValueError for options and classes under which the plan's claim would be false.
    """

    bounded: type[BoundedUpdate] = ClipUpdate
    # The kind of plan that says what is claimed of it.
    plan_kind: type[PrivacyPlan] = PrivacyPlan

    def __init__(
        self,
        privacy: PrivacyPlan,
        *,
        ledger: Path | None = None,
        noises: Path | None = None,
        denominator: Denominator = "fixed",
        **options: Unpack[StrategyOptions],
    ) -> None:
        if "participation" in options:
            raise ValueError("participation is the privacy plan's: give it there")
        options.setdefault("num_clients", privacy.num_clients)
        options["participation"] = privacy.participation
        check_options(privacy, {**options, "denominator": denominator})
        super().__init__(**options)
        privacy.bound(self._rate.initial)
        self.privacy = privacy
        self._is_sum = self._aggregate is weighted_mean
        privacy.check_figure(central=self._is_sum)
        # Under a claim nothing of the cohort leaves the server but the noised model.
        self.confidential = privacy.claim
        # Whether the clients add the noise: it cannot be seen in what they send.
        self.needs_attestation = privacy.drawn_by == "client"
        self._denominator = denominator
        if self._is_sum and denominator == "fixed":
            # None: a round that is skipped because few took part would tell how many did.
            self.quorum = 0
        # In what an entry of the clients' models is rounded at most; None: as the server's.
        self._sent_in: torch.dtype | None = None
        # Who was there when the run began, where ids are nodes'; None: ids have a place each.
        self._population: set[int] | None = None
        identity = options.get("identity", "node")
        self._ids_are_nodes = identity == "node"
        check_mechanism(privacy, self.bounded, ledger, is_sum=self._is_sum)
        self.ledger = Ledger(privacy, ledger, charged=self.has_central_claim)
        # None: a client may be in any round, and its noise is drawn anew.
        self._turns = Turns(privacy, noises, identity) if privacy.groups > 1 else None
        self._threshold = Threshold(privacy.clip_norm, privacy.adaptive, privacy.cohort_size)
        # By which it is known whether anybody sets anything otherwise.
        self._built = dict(vars(self))
        check_published(self)

    @property
    def has_central_claim(self) -> bool:
        """Whether the ledger's figure may be reported."""
        return self.privacy.claim and self._is_sum

    def figure(self) -> Figure | None:
        """What the released models have cost, earlier runs of the ledger included."""
        check_published(self)
        return self.ledger.figure() if self.has_central_claim else None

    def sentence(self) -> str:
        """Who is protected from whom by `figure`, in words; else that nobody is, and why."""
        check_published(self)
        if self.privacy.claim and not self._is_sum:
            return ONLY_LOCAL
        return self.privacy.sentence(self.ledger.charges, given_weights=True)

    def local_figure(self) -> Figure | None:
        """The guarantee of one client's messages against the server itself.

        None with noise at the server, without a claim, and after `from_state` with a state that
        was not `counted`: nobody knows what the processes before it asked clients for.
        """
        check_published(self)
        if not self.privacy.claim or self.privacy.noise_location == "server":
            return None
        if not self.knows_rounds_begun:
            return None
        return self.privacy.local_figure(self.rounds_begun)

    def start(self, *arguments: Any, from_state: RunState | None = None, **options: Any) -> Result:
        """As FederatedStrategy.start; the ledger is this run's alone until it returns.

        Raises, before any client is asked for anything, LedgerInUse where another run has it, and
        ValueError where `noises` is another run's, or `from_state` none that goes on by this plan.
        """
        check_published(self)
        try:
            if from_state is not None:
                # Before anybody is asked; and which rounds are its own before their number is.
                check_turns(from_state, self.privacy)
                PrivateAveraging.restore_own(self, from_state.own)
            if self._turns is not None:
                self._turns.begin(self.ledger.run, anew=from_state is None)
            self.ledger.hold()
            return super().start(*arguments, **{**options, "from_state": from_state})
        finally:
            self.ledger.close()

    # The hooks.

    def check_layout(self, layout: ModelLayout) -> None:
        """Under a claim nothing travels back that is not noised, and in full precision where
        clients draw the noise."""
        check_published(self)
        self.after_release = seeing_releases_alone(self)
        check_what_is_sent(self.privacy, layout)
        self._sent_in = layout.coarsest

    def norm_bound(self, context: RoundContext) -> NormBound:
        """C in gradient units; with noise at the clients, what C plus a share of it may reach."""
        bound, plan = self.clip_bound(context.local_lr), self.privacy
        if plan.noise_location == "server":
            return NormBound(self._threshold.slack * bound)
        deviation = client_deviation(plan.noise_multiplier, bound, plan.noise_shares)
        return NormBound(longest_noised(bound, deviation, len(context.model)))

    def clip_bound(self, local_lr: float) -> float:
        """C in gradient units. Raises ValueError where float32 has no such bound."""
        return self.privacy.bound(local_lr, self._threshold.clip_norm)

    def bound(self, updates: torch.Tensor, context: RoundContext) -> torch.Tensor:
        """The clients' bound, enforced again; noised messages only against the absurd."""
        if self.privacy.noise_location == "client":
            return bounding.clip(updates, self.norm_bound(context).norm)
        return self.bounded.constrain(updates, self.clip_bound(context.local_lr))

    def on_enrolment(self, clients: Sequence[Client]) -> None:
        """From now on the population, where ids are nodes'; with turns, of the whole run.

        Raises ValueError for more clients than the plan's m, from which r is taken.
        """
        if len(clients) > self.privacy.num_clients:
            raise ValueError(
                f"{len(clients)} clients are not allowed: the privacy plan is for "
                f"{self.privacy.num_clients}"
            )
        if self._ids_are_nodes:
            there = {client.client_id for client in clients}
            self._population = there if self._turns is None else self._turns.population(there)

    def draw_cohort(self, clients: Sequence[int], context: RoundContext) -> CohortPlan:
        """By the plan, from the operating system's entropy.

        A node that comes when the run has begun is not asked, nor one that was restarted under
        another id: were there a place for it only where another client is not, that client's being
        there would move the sum by both. For a round whose release is on record nobody is asked;
        of an open link the ledger knows first. Raises ValueError for a round after the plan's last.
        """
        server_round = context.server_round
        check_published(self)
        self.privacy.check_rounds("round", server_round)
        if self._turns is not None and self._turns.is_on_record(server_round):
            return CohortPlan.of([])
        if self.has_central_claim:
            self.ledger.note_asked(self._due())
        population = clients if self._population is None else self._population
        known = [client for client in clients if client in population]
        randomness = self._randomness(server_round, Stream.PRIVATE_PARTICIPATION)
        return self.privacy.draw(known[: self.privacy.num_clients], randomness, server_round)

    def local_rule(self, context: RoundContext) -> LocalRule:
        """The bound and, where the clients add the noise, z and in how many shares s.

        Raises ValueError where their models could not carry it.
        """
        bound, plan = self.clip_bound(context.local_lr), self.privacy
        if plan.noise_location == "server":
            return self.bounded(self._threshold.slack * bound)
        plan.check_resolution(context.model.to(self._sent_in), context.local_lr)
        return self.bounded(bound, plan.noise_multiplier, plan.noise_shares)

    def check_rule(self, rule: LocalRule, context: RoundContext) -> LocalRule:
        """Under a claim it is the plan's own, with its C, z and s, whoever overrides `local_rule`:
        what another says of itself when it is looked at binds it to nothing."""
        if not self.privacy.claim:
            return rule
        due = PrivateAveraging.local_rule(self, context)
        if rule.sent != due.sent:
            raise ValueError(
                f"local_rule = {rule.sent} breaks the claim: by the privacy plan it is {due.sent}"
            )
        return due

    @classmethod
    def configured_rule(cls, config: RunConfig, local_lr: float, asked: SentRule) -> LocalRule:
        """As `local_rule`; a z that the configuration leaves to the server, which has a budget, is
        the one asked for: a client checks it where it draws the noise."""
        bound = ClipNorm.of(config).in_gradient_units(local_lr)
        if config.clip_quantile > 0:
            # Where C has gone is the server's word, as it is what the clients' lengths made of it.
            return cls.bounded(asked.numbers.get("bound", SLACK * bound))
        if config.noise_location == "server":
            return cls.bounded(bound)
        z = config.noise_multiplier or asked.numbers.get("noise-multiplier", 0.0)
        return cls.bounded(bound, z, noise_shares(config))

    def combine(
        self, updates: torch.Tensor, weights: torch.Tensor, context: RoundContext
    ) -> Aggregate:
        """Bound, charge, then noise: in this order, so that a crash only overstates.

        A row that does not stay finite counts as 0: without a noised round it would be seen.
        """
        if not self._is_sum:
            bounded = self.bound(updates, context)
            return self._combine_robustly(bounded, weights, context)
        # In float64: a row that is rounded to float32 after it was bounded is longer than C, and
        # the closed form of the Gaussian has no room for that.
        bounded = self.bound(updates.double(), context)
        # Without a claim the clients' counts may set the weights; the noise is what it was.
        shares = torch.full_like(weights, 1 / self._divisor(len(updates)))
        if self._weighting == "num-examples":
            shares = weights

        def noised() -> torch.Tensor:
            vector = self._noised(bounded, shares, context)
            bound = self.clip_bound(context.local_lr)
            randomness = self._randomness(context.server_round, Stream.COUNT_NOISE)
            return torch.cat([vector, self._threshold.noised_share(updates, bound, randomness)])

        if self._turns is None:
            self._charge()
            released = noised()
        else:
            ledger = self.ledger if self.has_central_claim else None
            released = self._turns.release(context, ledger, self._due(), noised, self._charge)
        vector = released[: len(context.model)]
        self._tell(vector, len(updates), context)
        self._threshold.follow(released[len(vector) :])
        kept = torch.ones(len(updates), dtype=torch.bool)
        return Aggregate(vector.to(updates.dtype), shares, kept, 0)

    def own_values(self) -> dict[str, Any]:
        """Which ledger it is, what it holds at least, and which run charges it: no other may
        take its place."""
        turns = {} if self._turns is None else self._turns.values(self._round)
        return {"ledger": self.ledger.mark(), **turns, **self._threshold.told()}

    def restore_own(self, values: Mapping[str, Any]) -> None:
        """Charge the ledger as the run that left `values`. Raises ValueError where that is another,
        or does not hold all that it held then, or its own rounds were not charged."""
        self.ledger.go_on(values)
        if self._turns is not None:
            self._turns.restore(values)
        self._threshold.restore(values)

    def rounds_allowed(self, num_rounds: int, done: int, model: torch.Tensor) -> int:
        """As many as the plan's T and the budget allow.

        Raises ValueError for more rounds than planned, where nothing is left of the budget for a
        run that has had none, and for a rate at which the clients' models cannot carry their noise.
        """
        self.privacy.check_rounds("num_rounds =", num_rounds)
        if done < num_rounds:
            last = self._rate.at_least(num_rounds)
            self.privacy.check_resolution(model.to(self._sent_in), last)
        if not self.has_central_claim or done >= num_rounds:
            return num_rounds
        return self.ledger.last_round(self.privacy.release(), done, num_rounds)

    # The mechanism.

    def _noised(
        self, bounded: torch.Tensor, shares: torch.Tensor, context: RoundContext
    ) -> torch.Tensor:
        """The noised sum [d], float64, over the divisor, of bounded updates [K, d]."""
        total = finite_sum(bounded, shares)
        size = self._divisor(len(bounded))
        noised = total + self._noise(self.privacy.owed(len(bounded)), context) / size
        return on_grid(noised, self._deviation(context) / size)

    def _tell(self, vector: torch.Tensor, replies: int, context: RoundContext) -> None:
        """Of what was released alone."""
        deviation = self._deviation(context) * self.privacy.noise_in_round(context.server_round)
        deviation /= self._divisor(replies)
        self.told = {**signal_to_noise(vector, deviation), **self._threshold.told()}

    def _divisor(self, replies: int) -> float:
        """r, fixed beforehand, or the number of replies (at least one: quorum)."""
        return self.privacy.cohort_size if self._denominator == "fixed" else max(1, replies)

    def _due(self) -> Release:
        """A round's, over the link that there is."""
        return replace(self.privacy.release(), link=self._registry.link)

    def _charge(self, release: Release | None = None) -> None:
        if not self.has_central_claim:
            return
        release = release or self._due()
        if not self.ledger.allows(release):
            raise RunOver("the round would pass max_epsilon and is withheld")
        self.ledger.charge(release)

    def _noise(self, share: float, context: RoundContext) -> torch.Tensor:
        """Noise [d] with the `share` of the variance (z C)²."""
        dimension, deviation = len(context.model), self._deviation(context)
        randomness = self._randomness(context.server_round, Stream.SERVER_NOISE)
        if self._turns is None:
            noise = gaussian_noise((dimension,), deviation, randomness, torch.float64)
        else:
            fresh = gaussian_noise((dimension,), 1.0, randomness, torch.float64)
            noise = self._turns.noise(context.server_round, fresh) * deviation
        return noise * share**0.5

    def _deviation(self, context: RoundContext) -> float:
        """z C: of the noise on a round's sum."""
        return self.privacy.update_multiplier * self.clip_bound(context.local_lr)

    def _combine_robustly(
        self, bounded: torch.Tensor, weights: torch.Tensor, context: RoundContext
    ) -> Aggregate:
        aggregate = self._aggregate(bounded, weights, self._of_rule(context))
        if self.privacy.noise_location == "client":
            return aggregate
        noise = self._noise(1.0, context) / self._divisor(len(bounded))
        return replace(aggregate, vector=(aggregate.vector + noise).to(bounded.dtype))

    def _randomness(self, server_round: int, stream: Stream) -> Randomness:
        seed = self.privacy.insecure_seed
        return SystemRandomness() if seed is None else SeededRandomness(stream, seed, server_round)


class DPFedAvg(PrivateAveraging):
    """w ← w − η_g η_l v, v ← β v + (1/r) [ Σ clip(u_i, C) + N(0, (z C)² I) ].

    In gradient units (Das et al.) or, with ClipNorm(c, "parameter"), CE-FedAvg's (Zhang et al.).
    """

    bounded = ClipUpdate


class DPNormFedAvg(PrivateAveraging):
    """w ← w − η_g η_l v, v ← β v + (1/r) [ Σ C u_i/‖u_i‖ + N(0, (z C)² I) ], norm(0) = 0."""

    bounded = NormalizeUpdate
