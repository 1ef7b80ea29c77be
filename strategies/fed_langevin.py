"""Federated averaging Langevin dynamics, FA-LD, on the server (Deng et al., Algorithms 1-6)."""

import logging
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Unpack

from blackthorn.randomness import Stream, generator_of
from blackthorn.wire import SHARE, SHARED_SEED, TOTAL_EXAMPLES

from .base import FederatedStrategy, StrategyOptions
from .enrolment import Client
from .langevin import Langevin, LangevinRate, require_balance, shares
from .local_rule import (
    LANGEVIN,
    LOCAL_STEPS,
    PRIOR_PRECISION,
    SHARED_FRACTION,
    STEP_SIZE,
    STRONG_CONVEXITY,
    TEMPERATURE,
    LocalRule,
)
from .participation import CohortPlan
from .rounds import RoundContext
from .shared_noise import MAX_SHARED_SEED

logger = logging.getLogger("blackthorn")

Scheme = Literal["full", "with-replacement", "without-replacement"]


class FedLangevin(FederatedStrategy):
    """θ ← average of the clients' θ^c after K Langevin steps each; every θ is a step of the chain.

    `scheme`: "full", θ = Σ p_c θ^c; "with-replacement" (scheme I), `draws` clients drawn with
    probabilities p_c, each counted as often as it was drawn; "without-replacement" (scheme II),
    `draws` clients drawn uniformly, which needs balanced data.

    The population, and with it the posterior, is who has enrolled when the first round begins:
    p_c = n_c/n from the counts declared then, which nothing a client says later can change. A
    client that enrols after that is not asked. Every client is told its p_c, n, and the seed of
    the shared noise (from the operating system unless `shared_seed` is given). The steps are the
    clients' work: a reply that does not attest them does not count.

    `langevin` is what all their steps have in common (Langevin(), the posterior itself under a
    flat prior). `step_size`: η, or a LangevinRate that decays. The other options are those of
    StrategyOptions, but for `participation` and `weighting`, which the scheme sets, and
    `server_step`, which is 1.
    Raises ValueError for a wrong scheme or number of draws; `start` does for unbalanced data.
    """

    needs_attestation = True

    def __init__(
        self,
        step_size: float | LangevinRate,
        *,
        langevin: Langevin | None = None,
        scheme: Scheme = "full",
        draws: int = 0,
        shared_seed: int | None = None,
        **options: Unpack[StrategyOptions],
    ) -> None:
        for option in ("participation", "weighting", "server_step", "local_rate"):
            if option in options:
                raise ValueError(f"{option} is not an option of FedLangevin: its scheme sets it")
        if scheme not in ("full", "with-replacement", "without-replacement"):
            raise ValueError(
                f"scheme = {scheme!r} is not allowed: full, with-replacement, without-replacement"
            )
        if scheme != "full" and draws < 1:
            raise ValueError(f"draws = {draws} is not allowed with {scheme}: at least 1")
        if options.setdefault("identity", "query") == "node":
            raise ValueError("identity = 'node' is not allowed: clients must declare their counts")
        rate = step_size if isinstance(step_size, LangevinRate) else LangevinRate(step_size)
        options["local_rate"] = rate
        super().__init__(**options)
        self._langevin = langevin or Langevin()
        self._step_sizes = rate
        self._scheme = scheme
        self._draws = draws
        self._shared_seed = (
            secrets.randbelow(MAX_SHARED_SEED) if shared_seed is None else shared_seed
        )
        self._shares: dict[int, float] = {}
        self._total = 0

    def summary(self) -> None:
        """Log which scheme runs, and with what."""
        draws = "" if self._scheme == "full" else f" of {self._draws} draws"
        logger.info(
            "FedLangevin: participation %s%s, step size %g",
            self._scheme,
            draws,
            self._rate.initial,
        )

    def local_rule(self, context: RoundContext) -> LocalRule:
        """The round's first step size, how it decays, τ, ρ and λ."""
        numbers: dict[str, float] = {
            STEP_SIZE: context.local_lr,
            TEMPERATURE: self._langevin.temperature,
            SHARED_FRACTION: self._langevin.shared_fraction,
            PRIOR_PRECISION: self._langevin.prior_precision,
        }
        if self._step_sizes.strong_convexity > 0:
            numbers[STRONG_CONVEXITY] = self._step_sizes.strong_convexity
            numbers[LOCAL_STEPS] = self._step_sizes.local_steps
        return LocalRule(LANGEVIN, numbers)

    def on_enrolment(self, clients: Sequence[Client]) -> None:
        """Fix the population and its shares p_c."""
        counts = {client.client_id: client.num_examples or 1 for client in clients}
        self._shares, self._total = shares(counts), sum(counts.values())
        if self._scheme == "without-replacement":
            require_balance(self._shares)

    def own_values(self) -> dict[str, Any]:
        """The population, and the seed of the noise that all clients share."""
        return {
            "shared_seed": self._shared_seed,
            "total": self._total,
            "shares": [[client, share] for client, share in self._shares.items()],
        }

    def restore_own(self, values: Mapping[str, Any]) -> None:
        """The same posterior and noise: who has enrolled since is not asked."""
        self._shared_seed, self._total = values["shared_seed"], values["total"]
        self._shares = dict(values["shares"])

    def draw_cohort(self, clients: Sequence[int], context: RoundContext) -> CohortPlan:
        """The scheme's clients: each counts by its p_c, or as often as it was drawn.

        Each is told its p_c, n and the shared seed, for its local steps.
        """
        del clients
        known = sorted(self._shares)
        if self._scheme == "full":
            return self._plan({client: self._shares[client] for client in known})
        generator = generator_of(Stream.PARTICIPATION, self._seed, context.server_round)
        # Positions are drawn, not ids: NumPy would turn ids of 64 bits into floats.
        if self._scheme == "with-replacement":
            p = [self._shares[client] for client in known]
            drawn = generator.choice(len(known), self._draws, replace=True, p=p)
        else:
            size = min(self._draws, len(known))
            drawn = generator.choice(len(known), size, replace=False)
        return self._plan(dict(sorted(Counter(known[i] for i in drawn).items())))

    def _plan(self, counts: Mapping[int, float]) -> CohortPlan:
        everybody = {TOTAL_EXAMPLES: self._total, SHARED_SEED: self._shared_seed}
        told = {client: {SHARE: self._shares[client], **everybody} for client in counts}
        return CohortPlan(counts, told)
