"""What the private strategies have in common: a bounded, noised sum with a fixed denominator."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from flwr.serverapp.strategy import Result

from blackthorn.randomness import Stream
from blackthorn.settings.config import RunConfig
from blackthorn.settings.derived import noise_shares

from . import bounding
from .accounting import Figure
from .aggregation import Aggregate
from .aggregators import weighted_mean
from .attestation import SentRule
from .base import FederatedStrategy
from .bounded_update import BoundedUpdate, ClipNorm, ClipUpdate
from .bounding import NormBound
from .claim_options import check_options
from .enrolment import Client
from .entropy import Randomness, SeededRandomness, SystemRandomness
from .layout import ModelLayout
from .ledger import Ledger, mark_of
from .local_rule import LocalRule
from .noise import client_deviation, gaussian_noise, longest_noised, missing_share, on_grid
from .options import StrategyOptions
from .participation import CohortPlan
from .privacy_plan import PrivacyPlan
from .rounds import RoundContext, RunOver

logger = logging.getLogger("blackthorn")


class PrivateOptions(StrategyOptions, total=False):
    """Those of every strategy, with the plan and the ledger."""

    privacy: PrivacyPlan
    ledger: Path | None


class PrivateAveraging(FederatedStrategy):
    """a_t = (1/r) [ Σ_{i ∈ S_t} g_i + N(0, (z C)² I) ], r = q m fixed, g_i bounded by C.

    `privacy` is the plan that sampler, mechanism and accountant share; its participation replaces
    the base's. `ledger` is the file that holds what was spent (None: memory alone); it is written
    before the noised model exists, and refused where no central figure is claimed. Every round is
    charged and released, whoever answers: there is no quorum, no report of a client is used, and
    under a claim none leaves the server.

    Where the plan has the clients add the noise, claimed or not, a reply counts only if it attests
    that it was added, with the plan's z and s.

    With another aggregator the noise at the clients still protects each message from the server
    (`local_figure`), but no central figure holds: the rule's sensitivity is not C/r.

    Raises ValueError for options under which the plan's claim would be false.
    """

    # What a client does to its update, and the server again.
    bounded: type[BoundedUpdate] = ClipUpdate

    def __init__(
        self,
        privacy: PrivacyPlan,
        *,
        ledger: Path | None = None,
        **options: Unpack[StrategyOptions],
    ) -> None:
        if "participation" in options:
            raise ValueError("participation is the privacy plan's: give it there")
        options.setdefault("num_clients", privacy.num_clients)
        options["participation"] = privacy.participation
        check_options(privacy, options)
        super().__init__(**options)
        privacy.bound(self._rate.initial)
        self.privacy = privacy
        self._is_sum = self._aggregate is weighted_mean
        # Under a claim nothing of the cohort leaves the server but the noised model.
        self.confidential = privacy.claim
        # Whether the clients add the noise: it cannot be seen in what they send.
        self.needs_attestation = privacy.noise_location == "client"
        if self._is_sum:
            # None: a round that is skipped because few took part would tell how many did.
            self.quorum = 0
        # In what an entry of the clients' models is rounded at most; None: as the server's.
        self._sent_in: torch.dtype | None = None
        # Who was there when the run began, where ids are nodes'; None: ids have a place each.
        self._population: set[int] | None = None
        self._ids_are_nodes = options.get("identity", "node") == "node"
        if ledger is not None and not self.has_central_claim:
            raise ValueError(
                f"ledger = {ledger} is not allowed without a central claim: nothing would be "
                "charged to it; omit it"
            )
        self.ledger = Ledger(privacy, ledger)

    @property
    def has_central_claim(self) -> bool:
        """Whether the ledger's figure may be reported."""
        return self.privacy.claim and self._is_sum

    def figure(self) -> Figure | None:
        """What the released models have cost, earlier runs of the ledger included."""
        return self.ledger.figure() if self.has_central_claim else None

    def local_figure(self) -> Figure | None:
        """The guarantee of one client's messages against the server itself.

        None with noise at the server, without a claim, and after `from_state` with a state that
        was not `counted`: nobody knows what the processes before it asked clients for.
        """
        if not self.privacy.claim or self.privacy.noise_location == "server":
            return None
        if not self.knows_rounds_begun:
            return None
        return self.privacy.local_figure(self.rounds_begun)

    def start(self, *arguments: Any, **options: Any) -> Result:
        """As FederatedStrategy.start; the ledger is this run's alone until it returns.

        Raises LedgerInUse, before any client is asked for anything, where another run has it.
        """
        try:
            self.ledger.hold()
            return super().start(*arguments, **options)
        finally:
            self.ledger.close()

    # The hooks.

    def check_layout(self, layout: ModelLayout) -> None:
        """Under a claim nothing travels back that is not noised, and in full precision where
        clients draw the noise."""
        if self.privacy.claim and layout.averaged:
            raise ValueError(
                "statistics = 'average' is not allowed under a privacy claim: "
                f"{layout.averaged[0]!r} would leave the clients without noise; use 'server' or "
                "'local'"
            )
        if self.privacy.noise_location == "client" and layout.is_half:
            raise ValueError(
                "a model in half precision is not allowed with noise at the clients: it would be "
                "lost in rounding; send it as float32"
            )
        self._sent_in = layout.coarsest

    def norm_bound(self, context: RoundContext) -> NormBound:
        """C in gradient units; with noise at the clients, what C plus a share of it may reach."""
        bound = self.clip_bound(context.local_lr)
        if self.privacy.noise_location == "server":
            return NormBound(bound)
        plan = self.privacy
        deviation = client_deviation(plan.noise_multiplier, bound, plan.noise_shares)
        return NormBound(longest_noised(bound, deviation, len(context.model)))

    def clip_bound(self, local_lr: float) -> float:
        """C in gradient units. Raises ValueError where float32 has no such bound."""
        return self.privacy.bound(local_lr)

    def constrain(self, updates: torch.Tensor, bound: float) -> torch.Tensor:
        """g_i of every row of `updates` [K, d], no longer than `bound`."""
        return self.bounded.constrain(updates, bound)

    def bound(self, updates: torch.Tensor, context: RoundContext) -> torch.Tensor:
        """The clients' bound, enforced again; noised messages only against the absurd."""
        if self.privacy.noise_location == "client":
            return bounding.clip(updates, self.norm_bound(context).norm)
        return self.constrain(updates, self.clip_bound(context.local_lr))

    def on_enrolment(self, clients: Sequence[Client]) -> None:
        """From now on the population, where ids are nodes'. Raises ValueError for more clients than
        the plan's m, from which r is taken."""
        if len(clients) > self.privacy.num_clients:
            raise ValueError(
                f"{len(clients)} clients are not allowed: the privacy plan is for "
                f"{self.privacy.num_clients}"
            )
        if self._ids_are_nodes:
            self._population = {client.client_id for client in clients}

    def draw_cohort(self, clients: Sequence[int], context: RoundContext) -> CohortPlan:
        """By the plan, from the operating system's entropy.

        A node that comes when the run has begun is not asked, nor one that was restarted under
        another id: were there a place for it only where another client is not, that client's being
        there would move the sum by both. Raises ValueError for a round after the plan's last, which
        no figure would count.
        """
        server_round = context.server_round
        if server_round > self.privacy.rounds:
            raise ValueError(
                f"round {server_round} is not allowed: the privacy plan is for "
                f"{self.privacy.rounds}"
            )
        population = clients if self._population is None else self._population
        known = [client for client in clients if client in population]
        randomness = self._randomness(server_round, Stream.PRIVATE_PARTICIPATION)
        return self.privacy.draw(known[: self.privacy.num_clients], randomness)

    def local_rule(self, context: RoundContext) -> LocalRule:
        """The bound and, where the clients add the noise, z and in how many shares s.

        Raises ValueError where their models could not carry it.
        """
        bound, plan = self.clip_bound(context.local_lr), self.privacy
        if plan.noise_location == "server":
            return self.bounded(bound)
        plan.check_resolution(context.model.to(self._sent_in), context.local_lr)
        return self.bounded(bound, plan.noise_multiplier, plan.noise_shares)

    def check_rule(self, rule: LocalRule, context: RoundContext) -> None:
        """Under a claim it is the plan's, with its C, z and s, whoever overrides `local_rule`."""
        due = PrivateAveraging.local_rule(self, context)
        if self.privacy.claim and rule.sent != due.sent:
            raise ValueError(
                f"local_rule = {rule.sent} breaks the claim: by the privacy plan it is {due.sent}"
            )

    @classmethod
    def configured_rule(cls, config: RunConfig, local_lr: float, asked: SentRule) -> LocalRule:
        """As `local_rule`; a z that the configuration leaves to the server, which has a budget, is
        the one asked for: a client checks it where it draws the noise."""
        bound = ClipNorm.of(config).in_gradient_units(local_lr)
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
        self._charge()
        # Without a claim the clients' counts may set the weights; the noise is what it was.
        shares = torch.full_like(weights, 1 / self.privacy.cohort_size)
        if self._weighting == "num-examples":
            shares = weights
        total = torch.einsum("k,kd->d", shares, bounded)
        if not bool(torch.isfinite(total).all()):
            rows = torch.isfinite(bounded).all(dim=1, keepdim=True)
            total = torch.einsum("k,kd->d", shares, bounded.where(rows, 0.0))
        size = self.privacy.cohort_size
        noise = self._noise(self._owed(len(updates)), context)
        vector = total + (noise * self._roundings_owed(len(updates), context)) / size
        vector = on_grid(vector, self._deviation(context) / size)
        kept = torch.ones(len(updates), dtype=torch.bool)
        return Aggregate(vector.to(updates.dtype), shares, kept, 0)

    def own_values(self) -> dict[str, Any]:
        """Which ledger it is, what it holds at least, and which run charges it: another must not
        take its place.
        """
        return {"ledger": self.ledger.mark()}

    def restore_own(self, values: Mapping[str, Any]) -> None:
        """Charge the ledger as the run that left `values`.

        Raises ValueError where the ledger is another one than when `values` were written, or
        does not hold all that it held then.
        """
        try:
            self.ledger.require(mark_of(values))
        except ValueError as error:
            raise ValueError(f"this ledger is not the run's: {error}; put its own back") from None

    def rounds_allowed(self, num_rounds: int, done: int, model: torch.Tensor) -> int:
        """As many as the plan's T and the budget allow.

        Raises ValueError for more rounds than planned, where nothing is left of the budget for a
        run that has had none, and for a rate at which the clients' models cannot carry their noise.
        """
        if num_rounds > self.privacy.rounds:
            raise ValueError(
                f"num_rounds = {num_rounds} is not allowed: the privacy plan is for "
                f"{self.privacy.rounds}"
            )
        if done < num_rounds:
            last = self._rate.at_least(num_rounds)
            self.privacy.check_resolution(model.to(self._sent_in), last)
        if not self.has_central_claim or done >= num_rounds:
            return num_rounds
        left = self.ledger.rounds_allowed(self.privacy.release(), num_rounds - done)
        allowed = done + left
        if allowed == 0:
            raise ValueError(
                f"max_epsilon = {self.privacy.max_epsilon:g} is not allowed: even one more round "
                f"would pass it ({self.ledger.rounds} are in the ledger)"
            )
        if allowed < num_rounds:
            logger.warning(
                "max_epsilon = %g ends the run after %d of %d rounds",
                self.privacy.max_epsilon,
                allowed,
                num_rounds,
            )
        return allowed

    # The mechanism.

    def _owed(self, replies: int) -> float:
        """The share of the variance (z C)² that the server adds: what the clients' messages did
        not bring, and one share more, whoever answered.

        Clients' models are rounded, so that their sum lies on a lattice, and where they alone bring
        the noise the last bits of the new model tell that everybody has answered. A share, four
        roundings wide at least (`check_resolution`), leaves no lattice.
        """
        if self.privacy.noise_location == "server":
            return 1.0
        # Only where nothing is claimed is there no top-up.
        missing = missing_share(self.privacy.noise_shares, replies)
        return missing + 1 / self.privacy.noise_shares if self.privacy.top_up else 0.0

    def _roundings_owed(self, replies: int, context: RoundContext) -> torch.Tensor | float:
        """By how much the server's noise is longer [d] where clients did not answer, whose rounding
        of their models, h_j²/12 for each, would show in the noise's size by its absence."""
        plan = self.privacy
        owed = plan.noise_shares - replies
        if plan.noise_location == "server" or not plan.top_up or owed <= 0:
            return 1.0
        steps = torch.from_numpy(np.spacing(context.model.to(self._sent_in).abs().numpy()))
        rounded = (steps.double() / context.local_lr).square() * (owed / 12)
        added = self._deviation(context) ** 2 * self._owed(replies)
        return torch.sqrt(1 + rounded / added) if added > 0 else 1.0

    def _charge(self) -> None:
        if not self.has_central_claim:
            return
        release = replace(
            self.privacy.release(), link="apart" if self._registry.kept_apart else "open"
        )
        if not self.ledger.allows(release):
            raise RunOver("the round would pass max_epsilon and is withheld")
        self.ledger.charge(release)

    def _noise(self, share: float, context: RoundContext) -> torch.Tensor:
        dimension = len(context.model)
        if share == 0:
            return torch.zeros(dimension, dtype=torch.float64)
        deviation = self._deviation(context) * share**0.5
        randomness = self._randomness(context.server_round, Stream.SERVER_NOISE)
        return gaussian_noise((dimension,), deviation, randomness, torch.float64)

    def _deviation(self, context: RoundContext) -> float:
        """z C: of the noise on a round's sum."""
        return self.privacy.noise_multiplier * self.clip_bound(context.local_lr)

    def _combine_robustly(
        self, bounded: torch.Tensor, weights: torch.Tensor, context: RoundContext
    ) -> Aggregate:
        generator = self._generator(Stream.RULE, context.server_round)
        aggregate = self._aggregate(bounded, weights, generator)
        if self.privacy.noise_location == "client":
            return aggregate
        noise = self._noise(1.0, context) / self.privacy.cohort_size
        vector = (aggregate.vector + noise).to(bounded.dtype)
        return Aggregate(vector, aggregate.weights, aggregate.survivors, aggregate.iterations)

    def _randomness(self, server_round: int, stream: Stream) -> Randomness:
        seed = self.privacy.insecure_seed
        if seed is None:
            return SystemRandomness()
        return SeededRandomness(stream, seed, server_round)
