"""Local SGD: generalised FedAvg (Yang et al., Algorithm 1), two learning rates, uniform weights and
any aggregation rule; and Byzantine-resilient local SGD (Data and Diggavi, Algorithms 1 and 2): that
under RAGE.

Both may have momentum at the clients (Karimireddy, He, Jaggi, ICML 2021, "Learning from History for
Byzantine Robust Optimization"): the noise of single rounds, in which an attacker hides, is averaged
away.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Unpack

import torch
from torch import Tensor

from blackthorn.settings.config import RunConfig

from .aggregation.rage import RageStop
from .aggregators import CorruptionBound, Mixing, RageFilter
from .attestation import SentRule
from .base import FederatedStrategy
from .local_rule import LocalRule, RoundOf
from .options import StrategyOptions
from .rounds import RoundContext


@dataclass(frozen=True)
class ClientMomentum(LocalRule):
    """u_i becomes m_i ← β m_i + (1 − β) u_i, β = `beta`, which the client keeps for its next round.

    A client that has kept nothing, in its first round or after it was started anew, sends u_i: all
    updates have the same scale from the first on. One that misses rounds goes on from the m_i of
    its last. m_i is in gradient units, so that a rate which decays changes nothing of it.
    """

    name: ClassVar[str] = "client-momentum"
    keeps: ClassVar[bool] = True

    beta: float

    def on_update(
        self, start: Tensor, trained: Tensor, local_lr: float, round_of: RoundOf
    ) -> Tensor:
        """w_t − η_l m_i of the clients' models `trained` [B, d]."""
        sent = trained.clone()
        for row, model in enumerate(trained):
            kept = round_of(row).kept
            if kept is None:
                continue
            if kept.shape != model.shape:
                raise ValueError("what the client has kept is not of the model's size")
            before = start - local_lr * kept.to(trained)
            sent[row] = torch.lerp(model, before, self.beta)
        return sent


def _rule(beta: float) -> LocalRule:
    return ClientMomentum(beta) if beta else LocalRule()


class GFedAvg(FederatedStrategy):
    """w ← w − η_g η_l (1/|S_t|) Σ u_i. With η_g = 1 this is FedAvg with uniform weights.

    `client_momentum` β, from 0 (none) to below 1: the clients send their momentum m_i, and a reply
    has to attest it, since the server cannot tell m_i from u_i. The other options are those of
    StrategyOptions; any `aggregator` will do.
    """

    def __init__(self, *, client_momentum: float = 0.0, **options: Unpack[StrategyOptions]) -> None:
        if not 0 <= client_momentum < 1:
            raise ValueError(
                f"client_momentum = {client_momentum} is not allowed: from 0, less than 1"
            )
        super().__init__(**options)
        self._client_momentum = client_momentum
        self.needs_attestation = self.needs_attestation or client_momentum > 0

    @classmethod
    def build(cls, config: RunConfig, options: StrategyOptions) -> FederatedStrategy:
        """With the run's client-momentum and algorithm-options."""
        own: dict[str, Any] = cls.option_values(config)
        if config.client_momentum:
            own["client_momentum"] = config.client_momentum
        return cls(**options, **own)

    @classmethod
    def configured_rule(cls, config: RunConfig, local_lr: float, asked: SentRule) -> LocalRule:
        """The client keeps its momentum, or does nothing more than SGD."""
        del local_lr, asked
        return _rule(config.client_momentum)

    def local_rule(self, context: RoundContext) -> LocalRule:
        """The client keeps its momentum, or does nothing more than SGD."""
        del context
        return _rule(self._client_momentum)


class Rage(GFedAvg):
    """w ← w − η_g η_l RAGE(u_i, i ∈ S_t): the mean of the updates that survive the filter.

    `num_corrupt` is the assumed number of corrupt clients in a round; or `corrupt_fraction`, for
    ⌊fraction · replies⌋. `stop`, `coordinates`, `average`, `sigma0_squared` and
    `spectral_constant` are those of the function `rage`.
    `mixing` is a pre-aggregator, such as `Buckets(2)` or `nearest_neighbours`.
    Or `aggregator` is a RageFilter that has been made of all these. The other options are those of
    GFedAvg; by default a run waits for 3 · num_corrupt + 1 clients, the fewest among which the
    filter can protect.
    Raises ValueError unless exactly one of the first two is given, below a third, or a filter.
    """

    def __init__(
        self,
        num_corrupt: int | None = None,
        *,
        corrupt_fraction: float | None = None,
        stop: RageStop = "count",
        coordinates: int | None = None,
        average: Literal["uniform", "weighted"] = "uniform",
        mixing: Mixing | None = None,
        sigma0_squared: float | None = None,
        spectral_constant: float = 11.0,
        client_momentum: float = 0.0,
        **options: Unpack[StrategyOptions],
    ) -> None:
        given = num_corrupt is not None or corrupt_fraction is not None
        rule = options.get("aggregator")
        if rule is None:
            rule = RageFilter(
                CorruptionBound(num_corrupt, corrupt_fraction),
                stop,
                coordinates,
                average,
                mixing,
                sigma0_squared=sigma0_squared,
                spectral_constant=spectral_constant,
            )
        elif given or not isinstance(rule, RageFilter):
            raise ValueError("aggregator is not allowed: Rage has its own, GFedAvg takes any")
        if num_corrupt is not None:
            options.setdefault("num_clients", max(2, 3 * num_corrupt + 1))
        options["aggregator"] = rule
        super().__init__(client_momentum=client_momentum, **options)

    @classmethod
    def build(cls, config: RunConfig, options: StrategyOptions) -> FederatedStrategy:
        """With the run's filter; a rule that was asked for by name in its place is local SGD under
        that rule, to compare with RAGE."""
        if isinstance(options["aggregator"], RageFilter):
            return super().build(config, options)
        return GFedAvg.build(config, options)
