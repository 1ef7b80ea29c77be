"""Federated averaging Langevin dynamics, FA-LD (Deng et al., Algorithms 1-6).

The target is π(θ) ∝ exp(−f(θ)/τ) with the energy f = Σ_c p_c f^c, f^c = ℓ^c/p_c − ln prior, where
ℓ^c is the *sum* of the negative log-likelihood over client c's examples and p_c = n_c/n its share
of all n examples. So f is the total negative log-likelihood minus the log prior, once.

    θ ← θ − η ∇̃f^c(θ) + √(2ητρ²) ξ_k + √(2η(1 − ρ²)τ/p_c) ξ^c_k

ξ_k is the same on every client, ξ^c_k the client's own. Averaged with the weights p_c the noises
have covariance ρ² 2ητ I + Σ p_c² (1 − ρ²) 2ητ/p_c I = 2ητ I, whatever ρ and p.
"""

import logging
import math
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, Unpack

import numpy as np
import torch
from torch import Tensor

from blackthorn.randomness import Stream, generator_of
from blackthorn.settings.config import RunConfig
from blackthorn.wire import SHARE, SHARED_SEED, TOTAL_EXAMPLES

from .attestation import SentRule
from .base import FederatedStrategy
from .enrolment import Client
from .learning_rate import LangevinRate, step_size
from .local_rule import LocalRule, LocalSGD, LocalSteps, RoundOf
from .options import StrategyOptions
from .participation import CohortPlan
from .rounds import RoundContext
from .shared_noise import MAX_SHARED_SEED, shared_noise

logger = logging.getLogger("blackthorn")

Scheme = Literal["full", "with-replacement", "without-replacement"]
Missing = Literal["rescale", "skip"]
# By the key `participation`.
_SCHEMES: dict[str, Scheme] = {
    "full": "full",
    "with-replacement": "with-replacement",
    "fixed": "without-replacement",
}
# Largest relative difference of the shares that counts as balanced data.
BALANCE_TOLERANCE = 0.01


@dataclass(frozen=True)
class Langevin:
    """What the local steps of all clients have in common.

    ``temperature`` τ; ``shared_fraction`` ρ in [0, 1], the part of the noise that all clients
    share; ``prior_precision`` λ of the prior N(0, I/λ), 0: the flat prior.
    Raises ValueError for values out of range.
    """

    temperature: float = 1.0
    shared_fraction: float = 0.0
    prior_precision: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature = {self.temperature} is not allowed: 0 or more")
        if not 0 <= self.shared_fraction <= 1:
            raise ValueError(f"shared noise = {self.shared_fraction} is not allowed: 0 to 1")
        if not 0 <= self.prior_precision < math.inf:
            raise ValueError(f"prior precision = {self.prior_precision} is not allowed: 0 or more")

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """The run configuration's."""
        return cls(config.temperature, config.shared_noise, config.prior_precision)

    def energy_gradient(self, params: Tensor, mean_gradient: Tensor, total_examples: int) -> Tensor:
        """∇̃f^c [R, d] = n · mean_gradient + λθ: the mean over a batch times n, all clients' number.

        (n/B) Σ_batch ∇l estimates ∇ℓ^c/p_c = (n/n_c) Σ_all ∇l, for any client and batch size B.
        """
        gradient = mean_gradient * total_examples
        return gradient.add_(params, alpha=self.prior_precision)

    def shared_scale(self, step_size: float) -> float:
        """√(2ητρ²), the standard deviation of the shared noise."""
        return self.shared_fraction * math.sqrt(2 * step_size * self.temperature)

    def own_scale(self, step_size: float, share: Tensor) -> Tensor:
        """√(2η(1 − ρ²)τ/p_c) [R] for the shares p_c [R], those of the clients' own noises."""
        variance = 2 * step_size * (1 - self.shared_fraction**2) * self.temperature
        return torch.sqrt(variance / share)

    def step(
        self,
        params: Tensor,
        energy_gradient: Tensor,
        step_size: float,
        share: Tensor,
        shared: Tensor | None,
        own: Tensor | None,
    ) -> None:
        """One local step of R clients, in place on ``params`` [R, d].

        ``share`` p_c [R]; ``shared`` ξ_k [d] (or [R, d], of several chains) and ``own`` ξ^c_k
        [R, d] are standard normal, None where their scale is 0.
        """
        params.add_(energy_gradient, alpha=-step_size)
        if shared is not None:
            params.add_(shared, alpha=self.shared_scale(step_size))
        if own is not None:
            params.addcmul_(own, self.own_scale(step_size, share).to(params.dtype)[:, None])


@dataclass(frozen=True, eq=False)
class LocalLangevin:
    """A round's local steps of B clients, for `train_clients`.

    Client b has the share ``share[b]`` p_c of the ``total_examples`` n, draws ξ^c from
    ``own_noise[b]`` and shares ξ with all of the same ``shared_seeds[b]`` in this round.
    ``first_step_size`` η of the round's first step; it decays by ``strong_convexity`` m k/12.
    """

    langevin: Langevin
    steps: int
    batch_size: int
    first_step_size: float
    strong_convexity: float
    server_round: int
    total_examples: int
    share: Tensor
    shared_seeds: Sequence[int]
    own_noise: Sequence[np.random.Generator]

    def move(
        self, params: Tensor, gradients: Tensor, step: int, clients: Sequence[int], start: Tensor
    ) -> None:
        """One step in place on ``params`` [R, d], the rows of ``clients``, positions among the B;
        ``gradients`` [R, d] of their mean losses over the batch."""
        del start
        eta = step_size(self.first_step_size, self.strong_convexity, step)
        rho = self.langevin.shared_fraction
        self.langevin.step(
            params,
            self.langevin.energy_gradient(params, gradients, self.total_examples),
            eta,
            self.share[list(clients)].to(params.device),
            self._shared(params, step, clients).to(params.device) if rho > 0 else None,
            self._own(params, clients).to(params.device) if rho < 1 else None,
        )

    def _shared(self, params: Tensor, step: int, clients: Sequence[int]) -> Tensor:
        seeds = [self.shared_seeds[client] for client in clients]
        noise = {
            seed: shared_noise(seed, self.server_round, step, params.shape[1], params.dtype)
            for seed in set(seeds)
        }
        return noise[seeds[0]] if len(noise) == 1 else torch.stack([noise[s] for s in seeds])

    def _own(self, params: Tensor, clients: Sequence[int]) -> Tensor:
        dtype = np.float64 if params.dtype == torch.float64 else np.float32
        rows = np.empty(params.shape, dtype=dtype)
        for row, client in zip(rows, clients, strict=True):
            self.own_noise[client].standard_normal(dtype=dtype, out=row)
        return torch.from_numpy(rows)


@dataclass(frozen=True)
class LangevinSteps(LocalRule):
    """A client's K steps are FA-LD's; it is told its p_c, n and the seed of the shared noise."""

    name: ClassVar[str] = "langevin"

    step_size: float
    temperature: float
    shared_fraction: float
    prior_precision: float
    strong_convexity: float | None = None
    local_steps: int | None = None

    @classmethod
    def of(cls, langevin: Langevin, rate: LangevinRate, local_lr: float, **more: Any) -> Self:
        """At the round's first step size η = `local_lr`; how it decays, where it does."""
        decay: dict[str, Any] = {}
        if rate.strong_convexity > 0:
            decay = {"strong_convexity": rate.strong_convexity, "local_steps": rate.local_steps}
        tau, rho, prior = langevin.temperature, langevin.shared_fraction, langevin.prior_precision
        return cls(local_lr, tau, rho, prior, **decay, **more)

    def steps(self, sgd: LocalSGD, num_clients: int, round_of: RoundOf) -> LocalSteps:
        """Raises ValueError where a client was not told its share of the examples."""
        rounds = [round_of(row) for row in range(num_clients)]
        for one in rounds:
            share, total = one.told.get(SHARE, 0.0), one.told.get(TOTAL_EXAMPLES, 0)
            if not 0 < share <= 1 or total < 1:
                raise ValueError(
                    f"client {one.client} was told share = {share:g} of {total} examples: fa-ld "
                    "needs a share above 0, at most 1, of at least 1 example"
                )
        return LocalLangevin(
            Langevin(self.temperature, self.shared_fraction, self.prior_precision),
            steps=sgd.steps,
            batch_size=sgd.batch_size,
            first_step_size=self.step_size,
            strong_convexity=self.strong_convexity or 0.0,
            server_round=rounds[0].server_round,
            total_examples=int(rounds[0].told[TOTAL_EXAMPLES]),
            share=torch.tensor([one.told[SHARE] for one in rounds], dtype=torch.float64),
            shared_seeds=[int(one.told.get(SHARED_SEED, 0)) for one in rounds],
            own_noise=[one.generator() for one in rounds],
        )


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

    `missing`: where a client of the cohort does not answer, "rescale" lets the others stand in for
    it, so that this θ has more noise than 2ητ (in a full round 2ητ/Σ_S p_c); "skip" leaves θ as it
    was, a round below its quorum.

    `langevin` is what all their steps have in common (Langevin(), the posterior itself under a
    flat prior). `step_size`: η, or a LangevinRate that decays. The other options are those of
    StrategyOptions, but for `participation` and `weighting`, which the scheme sets, and
    `server_step`, which is 1.
    Raises ValueError for a wrong scheme, number of draws or `missing`; `start` does for unbalanced
    data.
    """

    needs_attestation = True
    # Of what 1/share the clients' own noise has its variance, so that the round's has 2ητ: of p_c,
    # right for full rounds alone (Algorithms 1 to 3), or of what the client weighs in the round.
    share_of_noise: Literal["population", "round"] = "population"

    def __init__(
        self,
        step_size: float | LangevinRate,
        *,
        langevin: Langevin | None = None,
        scheme: Scheme = "full",
        draws: int = 0,
        missing: Missing = "rescale",
        shared_seed: int | None = None,
        **options: Unpack[StrategyOptions],
    ) -> None:
        for option in ("participation", "weighting", "server_step", "local_rate"):
            if option in options:
                raise ValueError(f"{option} is not an option of FedLangevin: its scheme sets it")
        if scheme not in _SCHEMES.values():
            raise ValueError(f"scheme = {scheme!r} is not allowed: {', '.join(_SCHEMES.values())}")
        if scheme != "full" and draws < 1:
            raise ValueError(f"draws = {draws} is not allowed with {scheme}: at least 1")
        if missing not in ("rescale", "skip"):
            raise ValueError(f"missing = {missing!r} is not allowed: rescale or skip")
        if options.setdefault("identity", "query") == "node":
            raise ValueError("identity = 'node' is not allowed: clients must declare their counts")
        rate = step_size if isinstance(step_size, LangevinRate) else LangevinRate(step_size)
        options["local_rate"] = rate
        super().__init__(**options)
        self._langevin = langevin or Langevin()
        self._step_sizes = rate
        self._scheme = scheme
        self._draws = draws
        self._missing = missing
        drawn = secrets.randbelow(MAX_SHARED_SEED)
        self._shared_seed = drawn if shared_seed is None else shared_seed
        self._shares: dict[int, float] = {}
        self._total = 0

    @classmethod
    def build(cls, config: RunConfig, options: StrategyOptions) -> Self:
        """With the run's scheme, step size and temperature, which leave these options no choice."""
        for key in ("participation", "weighting", "server_step", "local_rate"):
            options.pop(key)  # type: ignore[misc]
        return cls(
            LangevinRate.of(config),
            langevin=Langevin.of(config),
            scheme=_SCHEMES[config.participation],
            draws=config.clients_per_round,
            missing=config.missing,
            shared_seed=None if config.langevin_seed < 0 else config.langevin_seed,
            **cls.option_values(config),
            **options,
        )

    @classmethod
    def configured_rule(cls, config: RunConfig, local_lr: float, asked: SentRule) -> LocalRule:
        """The steps that the run's temperature, noise, prior and step size ask for."""
        del asked
        return LangevinSteps.of(Langevin.of(config), LangevinRate.of(config), local_lr)

    @classmethod
    def check_examples(cls, config: RunConfig, counts: Mapping[int, int]) -> None:
        """Raises ValueError where scheme II has unbalanced data."""
        if _SCHEMES[config.participation] == "without-replacement":
            require_balance(shares(counts))

    def summary(self) -> None:
        """Log which scheme runs, and with what."""
        told = (self._scheme, self._draws, self._rate.first)
        logger.info("FedLangevin: participation %s, draws %d, step size %g", *told)

    def local_rule(self, context: RoundContext) -> LocalRule:
        """The round's first step size, how it decays, τ, ρ and λ."""
        return LangevinSteps.of(self._langevin, self._step_sizes, context.local_lr)

    def on_enrolment(self, clients: Sequence[Client]) -> None:
        """Fix the population and its shares p_c."""
        silent = [client.client_id for client in clients if not client.declared]
        if silent:
            raise ValueError(
                f"client {silent[0]} does not say how many examples it has, on which the posterior "
                "hangs: use mods=[blackthorn.client_app.Mod(num_examples=...)], or node config "
                "num-examples"
            )
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

    def replies_needed(self, context: RoundContext) -> int:
        """All of the cohort, where a round with a missing client is to be skipped."""
        needed = super().replies_needed(context)
        return needed if self._missing == "rescale" else max(needed, len(context.cohort.clients))

    def _plan(self, counts: Mapping[int, float]) -> CohortPlan:
        everybody = {TOTAL_EXAMPLES: self._total, SHARED_SEED: self._shared_seed}
        share, total = self._shares, 1.0
        if self.share_of_noise == "round":
            share, total = dict(counts), sum(counts.values())
        told = {client: {SHARE: share[client] / total, **everybody} for client in counts}
        return CohortPlan(counts, told)


def shares(num_examples: Mapping[int, int]) -> dict[int, float]:
    """p_c = n_c/n by client. Raises ValueError where there are no examples."""
    total = sum(num_examples.values())
    if total < 1:
        raise ValueError("the clients have 0 examples: at least 1 is needed")
    return {client: count / total for client, count in num_examples.items()}


def require_balance(share: Mapping[int, float]) -> None:
    """Raises ValueError where the largest and smallest p_c differ by more than 1 %."""
    small, large = min(share, key=share.__getitem__), max(share, key=share.__getitem__)
    if share[large] > (1 + BALANCE_TOLERANCE) * share[small]:
        raise ValueError(
            f"uniform sampling without replacement needs balanced data: client {large} has "
            f"{share[large] / share[small]:.3g} times the examples of client {small}, allowed "
            f"is {1 + BALANCE_TOLERANCE:g} (with-replacement takes any shares)"
        )
