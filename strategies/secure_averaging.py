"""DP-FedAvg by secure aggregation: the server learns a round's noised sum, and no single update
(Bonawitz et al. 2017, Bell et al. 2020; Kairouz et al., arXiv 2102.06387).

The clients' half is the rule of `secure_update.py` and `client_app/masking.py`; the protocol is
`secure_aggregation/`, its messages are `secure_exchange.py`'s, and what is claimed is
`secure_plan.py`'s. Nothing of single updates can be screened: no robust rule, no instruments, and
of a client that breaks its bound only what the length of the sum says.
"""

import math
import os
import time
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid

from blackthorn.flower_port.transports import Transport
from blackthorn.randomness import Stream, generator_of
from blackthorn.secure_aggregation.client import SESSION_BYTES
from blackthorn.secure_aggregation.quantisation import CHARGED, Quantisation
from blackthorn.secure_aggregation.server import SecureServer
from blackthorn.settings.config import RunConfig
from blackthorn.settings.derived import secure_cohort, secure_survivors, secure_threshold

from .accounting import spent
from .aggregation import Aggregate
from .attestation import SentRule
from .bounding import ClipNorm, NormBound
from .global_model import ModelLayout
from .local_rule import LocalRule
from .messages import Asked
from .noise import signal_to_noise
from .private_averaging import DPFedAvg
from .release import Release
from .rounds import RoundContext
from .screening import Contribution, Rejection, Screened, Screening
from .secure_exchange import SecureExchange
from .secure_plan import SecurePlan
from .secure_update import SecureUpdate

# Deviations by which the length of noise is beyond √d of them but with probability 2^-40.
_BEYOND = 8.0


class SecureAveraging(DPFedAvg):
    """a_t = (1/r) Σ_{i ∈ S_t} [ clip(u_i, C) + the noise of client i ], r fixed, of which the
    server learns the sum alone; refused, and not charged, with fewer than n' clients.

    `privacy` is a SecurePlan. A round is charged before its sum is opened. Raises ValueError for
    options under which nothing would be secure.
    """

    privacy: SecurePlan
    plan_kind = SecurePlan

    def __init__(self, privacy: SecurePlan, **options: Any) -> None:
        if not isinstance(privacy, SecurePlan):
            raise ValueError("secure aggregation needs a SecurePlan for its privacy plan")
        super().__init__(privacy, **options)
        if not self._is_sum or self._denominator != "fixed" or self._weighting != "uniform":
            raise ValueError(
                "secure aggregation gives a sum over a fixed denominator: leave aggregator, "
                "weighting and denominator as they are"
            )
        if self._enough_replies is not None:
            raise ValueError("enough_replies is not allowed in secure aggregation: omit it")
        # Why the last round has no sum; None: it has one.
        self._refusal: ValueError | None = None

    def check_layout(self, layout: ModelLayout) -> None:
        """As PrivateAveraging; statistics that are averaged would come unmasked, claim or not."""
        super().check_layout(layout)
        if layout.averaged:
            raise ValueError(
                "statistics = 'average' is not allowed in secure aggregation: "
                f"{layout.averaged[0]!r} would leave the clients unmasked; use 'server' or 'local'"
            )

    def local_rule(self, context: RoundContext) -> LocalRule:
        """C, z, n, n', the threshold and k. Raises ValueError where they cannot be kept to."""
        plan = self.privacy
        plan.check_resolution(context.model, context.local_lr)
        return SecureUpdate(
            self.clip_bound(context.local_lr),
            plan.noise_multiplier,
            plan.terms.clients,
            plan.survivors,
            plan.threshold,
            plan.bits,
        )

    def check_rule(self, rule: LocalRule, context: RoundContext) -> LocalRule:
        """The plan's own, claim or not."""
        due = SecureAveraging.local_rule(self, context)
        if rule.sent != due.sent:
            raise ValueError(f"local_rule = {rule.sent} is not the plan's, {due.sent}")
        return due

    @classmethod
    def configured_rule(cls, config: RunConfig, local_lr: float, asked: SentRule) -> LocalRule:
        """As `local_rule`; of a budget z is the one asked for. Raises ValueError where all rounds
        would then cost more than it: the server is an adversary of the figure."""
        z, survivors = config.noise_multiplier, secure_survivors(config)
        if z == 0:
            z = asked.numbers.get("multiplier", 0.0)
            _check_budget(config, z, survivors)
        return SecureUpdate(
            ClipNorm.of(config).in_gradient_units(local_lr),
            z,
            secure_cohort(config),
            survivors,
            secure_threshold(config),
            config.secure_bits,
        )

    def norm_bound(self, context: RoundContext) -> NormBound:
        """None: no update is seen."""
        del context
        return NormBound(math.inf)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Raises RuntimeError: a round has five exchanges, which Flower's own loop does not
        know."""
        del server_round, arrays, config, grid
        raise RuntimeError(
            "a round of secure aggregation is five exchanges of messages: call start"
        )

    def gather(
        self,
        transport: Transport,
        asked: Asked,
        context: RoundContext,
        screening: Screening,
        timeout: float,
        enough: int | None,
    ) -> Screened:
        """The round's five exchanges, and the sum [1, d], float64, in place of the updates; charged
        in between, when all are masked, and told alike, and none is opened."""
        del screening, enough
        began = time.monotonic()
        plan, numbers = self.privacy, self._numbers(context)
        session = self._session(context.server_round)
        server = SecureServer(session, plan.terms, numbers.padded, numbers.bits)
        exchange = SecureExchange(transport, asked, timeout, server, numbers, context.attested)
        alive: list[int] = []
        self._refusal = None
        updates = torch.empty(0, len(context.model), dtype=torch.float64)
        try:
            exchange.collect(np.random.Generator(np.random.Philox()))
            self._charge()
            total = exchange.total()
            updates, alive = torch.from_numpy(numbers.restored(total, session))[None], server.alive
        except ValueError as refusal:
            self._refusal = refusal
        rejected = exchange.rejected
        for client in context.cohort.clients:
            if client not in alive:
                reason = Rejection(client, str(self._refusal or "it is not in the sum"))
                rejected.setdefault(client, reason)
        nothing = torch.empty(0)
        return Screened(
            {c: Contribution(nothing, None, exchange.metrics.get(c, {})) for c in alive},
            updates,
            [rejected[client] for client in sorted(rejected)],
            [],
            time.monotonic() - began,
        )

    def combine(
        self, updates: torch.Tensor, weights: torch.Tensor, context: RoundContext
    ) -> Aggregate:
        """The sum over r. Raises ValueError where there is none, or it is longer than clients that
        bound their updates and noise them can make it."""
        if self._refusal is not None:
            raise self._refusal
        numbers, alive, size = self._numbers(context), len(context.accepted), self._divisor(0)
        deviation = numbers.deviation * math.sqrt(alive / numbers.survivors)
        longest = alive * numbers.bound + deviation * (math.sqrt(len(updates[0])) + _BEYOND)
        if not float(updates[0].norm()) <= longest:
            raise ValueError(
                "the sum is longer than the clients' bounds and noises can make it: one of them "
                "has not kept to the rule that it attests"
            )
        vector = updates[0] / size
        self.told = signal_to_noise(vector, deviation / size)
        kept = torch.ones(alive, dtype=torch.bool)
        shares = torch.full_like(weights, 1 / size)
        return Aggregate(vector.to(context.model.dtype), shares, kept, 0)

    def _numbers(self, context: RoundContext) -> Quantisation:
        return self.privacy.quantisation(len(context.model), context.local_lr)

    def _session(self, server_round: int) -> bytes:
        seed = self.privacy.insecure_seed
        if seed is None:
            return os.urandom(SESSION_BYTES)
        return generator_of(Stream.SECURE_SESSION, seed, server_round).bytes(SESSION_BYTES)


def _check_budget(config: RunConfig, multiplier: float, survivors: int) -> None:
    if multiplier <= 0:
        return
    cost = _cost(multiplier, survivors, config.num_server_rounds, config.delta)
    # With room for what two machines' float64 differ by.
    if cost > config.epsilon * (1 + 1e-9):
        raise ValueError(
            f"the server asks for a noise multiplier of {multiplier:.6g}, with which all rounds "
            f"cost more than epsilon = {config.epsilon:g}"
        )


# Asked by every client for every message of a simulation.
@lru_cache(maxsize=8)
def _cost(multiplier: float, survivors: int, rounds: int, delta: float) -> float:
    release = Release(multiplier * CHARGED, shares=survivors, concentrated=True)
    return spent([(release, rounds)], delta).epsilon
