"""What the private strategies have in common: a bounded, noised sum with a fixed denominator."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

import torch
from flwr.serverapp.strategy import Result

from blackthorn.randomness import Stream, generator_of

from . import bounding
from .accounting import Figure
from .aggregation import Aggregate
from .aggregators import weighted_mean
from .claim_options import check_options
from .enrolment import Client
from .entropy import Randomness, SeededRandomness, SystemRandomness
from .frame import FederatedStrategy, FrameOptions
from .ledger import Ledger, mark_of
from .local_rule import BOUND, CLIP_UPDATE, NOISE_MULTIPLIER, NOISE_SHARES, LocalRule
from .noise import client_deviation, gaussian_noise, longest_noised, missing_share, on_grid
from .privacy_plan import PrivacyPlan
from .reports import RoundReport
from .screening import WHO_ATTESTS

logger = logging.getLogger("blackthorn")


class PrivateAveraging(FederatedStrategy):
    """a_t = (1/r) [ Σ_{i ∈ S_t} g_i + N(0, (z C)² I) ], r = q m fixed, g_i bounded by C.

    `privacy` is the plan that sampler, mechanism and accountant share; its participation replaces
    the frame's. `ledger` is the file that holds what was spent (None: memory alone); it is written
    before the noised model exists, and refused where no central figure is claimed. Every round is
    charged and released, whoever answers: there is no quorum, no report of a client is used, and
    under a claim none leaves the server.

    Where the plan has the clients add the noise, claimed or not, a reply counts only if it attests
    that it was added, with the plan's z and s.

    With another aggregator the noise at the clients still protects each message from the server
    (`local_figure`), but no central figure holds: the rule's sensitivity is not C/r.

    Raises ValueError for options under which the plan's claim would be false.
    """

    constraint = CLIP_UPDATE

    def __init__(
        self,
        privacy: PrivacyPlan,
        *,
        ledger: Path | None = None,
        **frame: Unpack[FrameOptions],
    ) -> None:
        if "participation" in frame:
            raise ValueError("participation is the privacy plan's: give it there")
        frame.setdefault("num_clients", privacy.num_clients)
        frame["participation"] = privacy.participation
        check_options(privacy, frame)
        super().__init__(**frame)
        privacy.bound(self._rate.initial)
        self.privacy = privacy
        self._is_sum = self._aggregate is weighted_mean
        # Who was there when the run began, where ids are nodes'; None: ids have a place each.
        self._population: set[int] | None = None
        self._ids_are_nodes = frame.get("identity", "node") == "node"
        if ledger is not None and not self.has_central_claim:
            raise ValueError(
                f"ledger = {ledger} is not allowed without a central claim: nothing would be "
                "charged to it; omit it"
            )
        self.ledger = Ledger(privacy, ledger)
        self._over_budget = False
        self._told_of_silence = False
        self._released: object | None = None

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

    # What the frame asks.

    @property
    def confidential(self) -> bool:
        """Under a claim nothing of the cohort leaves the server but the noised model."""
        return self.privacy.claim

    def quorum(self) -> int:
        """None: a round that is skipped because few took part would tell how many did."""
        return 0 if self._is_sum else super().quorum()

    def norm_bound(self, local_lr: float) -> float:
        """C in gradient units; with noise at the clients, what C plus a share of it may reach."""
        bound = self.clip_bound(local_lr)
        if self.privacy.noise_location == "server":
            return bound
        plan = self.privacy
        deviation = client_deviation(plan.noise_multiplier, bound, plan.noise_shares)
        return longest_noised(bound, deviation, self._require_model().layout.dimension)

    def clip_bound(self, local_lr: float) -> float:
        """C in gradient units. Raises ValueError where float32 has no such bound."""
        return self.privacy.bound(local_lr)

    def constrain(self, updates: torch.Tensor, bound: float) -> torch.Tensor:
        """g_i of every row of `updates` [K, d], no longer than `bound`."""
        return bounding.clip(updates, bound)

    def bound(self, updates: torch.Tensor, model: torch.Tensor, local_lr: float) -> torch.Tensor:
        """The clients' bound, enforced again; noised messages only against the absurd."""
        del model
        if self.privacy.noise_location == "client":
            return bounding.clip(updates, self.norm_bound(local_lr))
        return self.constrain(updates, self.clip_bound(local_lr))

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

    def draw_cohort(self, clients: Sequence[int], server_round: int) -> list[int]:
        """By the plan, from the operating system's entropy.

        A node that comes when the run has begun is not asked, nor one that was restarted under
        another id: were there a place for it only where another client is not, that client's being
        there would move the sum by both. Raises ValueError for a round after the plan's last, which
        no figure would count.
        """
        if server_round > self.privacy.rounds:
            raise ValueError(
                f"round {server_round} is not allowed: the privacy plan is for "
                f"{self.privacy.rounds}"
            )
        population = clients if self._population is None else self._population
        known = [client for client in clients if client in population]
        randomness = self._randomness(server_round, Stream.PRIVATE_PARTICIPATION)
        return self.privacy.draw(known[: self.privacy.num_clients], randomness)

    @property
    def needs_attestation(self) -> bool:
        """Whether the clients add the noise: it cannot be seen in what they send."""
        return self.privacy.noise_location == "client"

    def local_rule(self, local_lr: float) -> LocalRule:
        """The bound and, where the clients add the noise, z and in how many shares s.

        Raises ValueError where their models could not carry it.
        """
        numbers: dict[str, float] = {BOUND: self.clip_bound(local_lr)}
        plan = self.privacy
        if plan.noise_location == "client":
            if self._model is not None:
                plan.check_resolution(self._model.current, local_lr)
            numbers |= {NOISE_MULTIPLIER: plan.noise_multiplier, NOISE_SHARES: plan.noise_shares}
        return LocalRule(self.constraint, numbers)

    def combine(
        self, updates: torch.Tensor, weights: torch.Tensor, report: RoundReport
    ) -> Aggregate:
        """Bound, charge, then noise: in this order, so that a crash only overstates.

        A row that does not stay finite counts as 0: without a noised round it would be seen.
        Raises RuntimeError for replies to a broadcast that has been released: its cohort, and the
        noise that its clients drew, are no new ones.
        """
        if self._broadcast is self._released:
            raise RuntimeError(
                f"round {report.server_round} has been released, and is not released again with "
                "the same cohort and noise: call configure_train for a new one"
            )
        self._released = self._broadcast
        if not self._is_sum:
            bounded = self.bound(updates, report.model, report.local_lr)
            return self._combine_robustly(bounded, weights, report)
        # In float64: a row that is rounded to float32 after it was bounded is longer than C, and
        # the closed form of the Gaussian has no room for that.
        bounded = self.bound(updates.double(), report.model, report.local_lr)
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
        vector = total + self._noise(self._owed(report), report) / size
        vector = on_grid(vector, self._deviation(report) / size)
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

    def rounds_allowed(self, num_rounds: int, done: int = 0) -> int:
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
            self.privacy.check_resolution(self._require_model().current, last)
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

    def must_stop(self) -> bool:
        """Whether the last round was withheld because it would have passed the budget."""
        return self._over_budget

    def _log_losses(self, report: RoundReport) -> None:
        """Once in a run also that nobody counted in a round, without a name or a client's words."""
        super()._log_losses(report)
        silent = report.confidential and report.invited and not report.accepted
        if not silent or self._told_of_silence:
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

    # The mechanism.

    def _owed(self, report: RoundReport) -> float:
        """The share of the variance (z C)² that the server adds: what the clients' messages did
        not bring."""
        if self.privacy.noise_location == "server":
            return 1.0
        # Only where nothing is claimed is there no top-up.
        missing = missing_share(self.privacy.noise_shares, len(report.accepted))
        return missing if self.privacy.top_up else 0.0

    def _charge(self) -> None:
        if not self.has_central_claim:
            return
        release = self.privacy.release()
        if not self.ledger.allows(release):
            self._over_budget = True
            raise ValueError("the round would pass max_epsilon and is withheld")
        self.ledger.charge(release)

    def _noise(self, share: float, report: RoundReport) -> torch.Tensor:
        dimension = len(report.model)
        if share == 0:
            return torch.zeros(dimension, dtype=torch.float64)
        deviation = self._deviation(report) * share**0.5
        randomness = self._randomness(report.server_round, Stream.SERVER_NOISE)
        return gaussian_noise((dimension,), deviation, randomness, torch.float64)

    def _deviation(self, report: RoundReport) -> float:
        """z C: of the noise on a round's sum."""
        return self.privacy.noise_multiplier * self.clip_bound(report.local_lr)

    def _combine_robustly(
        self, bounded: torch.Tensor, weights: torch.Tensor, report: RoundReport
    ) -> Aggregate:
        generator = generator_of(Stream.RULE, self._seed, report.server_round)
        aggregate = self._aggregate(bounded, weights, generator)
        if self.privacy.noise_location == "client":
            return aggregate
        noise = self._noise(1.0, report) / self.privacy.cohort_size
        vector = (aggregate.vector + noise).to(bounded.dtype)
        return Aggregate(vector, aggregate.weights, aggregate.survivors, aggregate.iterations)

    def _randomness(self, server_round: int, stream: Stream) -> Randomness:
        seed = self.privacy.insecure_seed
        if seed is None:
            return SystemRandomness()
        return SeededRandomness(stream, seed, server_round)
