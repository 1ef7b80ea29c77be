"""BiClip of TailOPT (arXiv 2502.04164): coordinates are clipped from above and from below."""

from dataclasses import dataclass
from typing import Any, ClassVar, Self, Unpack

import torch
from pydantic import Field, model_validator
from torch import Tensor

from blackthorn.settings.config import RunConfig
from blackthorn.settings.declaration import KeyGroup

from .attestation import SentRule
from .base import FederatedStrategy
from .bounding import NormBound, check_bound
from .local_rule import LocalRule
from .options import StrategyOptions
from .rounds import RoundContext


def biclip(values: Tensor, low: float, high: float) -> Tensor:
    """Every coordinate x, of whatever shape and dtype, of a size between l and u: sign(x) l where
    0 < |x| < l, sign(x) u where |x| > u, x elsewhere. Zero stays zero, NaN stays NaN; l = 0 raises
    nothing, u = infinity cuts nothing."""
    return values.sign() * values.abs().clamp(low, high)


class BiClipOptions(KeyGroup):
    """l and u at the clients' steps, of gradients, and at the server's, of its pseudo-gradient
    w_t − mean w_i, in parameter units; a u that is left out leaves that step alone."""

    low: float = Field(0.0, ge=0)
    high: float | None = Field(None, gt=0)
    server_low: float = Field(0.0, ge=0)
    server_high: float | None = Field(None, gt=0)

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.high is None and self.server_high is None:
            raise ValueError("set high, server-high or both: BiClip has to clip something")
        for which, low, high in (
            ("", self.low, self.high),
            ("server-", self.server_low, self.server_high),
        ):
            if low > (high or 0.0):
                raise ValueError(f"{which}low = {low} is not allowed: at most {which}high")
        return self


@dataclass(frozen=True)
class BiClipGradient(LocalRule):
    """Each of K steps' gradients g becomes biclip(g, l, u), l = `low`, u = `high`."""

    name: ClassVar[str] = "biclip-gradient"

    low: float
    high: float
    local_steps: int

    def check_range(self, local_lr: float) -> None:
        """Raises ValueError where float32 does not hold u in both units."""
        check_bound(self.high, local_lr)

    def on_gradient(self, gradients: Tensor, params: Tensor, start: Tensor) -> Tensor:
        """biclip(g, l, u) of every row."""
        del params, start
        return biclip(gradients, self.low, self.high)


class BiClip(FederatedStrategy):
    """w ← w − η_g biclip(η_l (1/|S_t|) Σ u_i, l', u'), every local step's gradient biclip(g, l, u).

    `low` l and `high` u are those of the clients' `local_steps` K steps, `server_low` l' and
    `server_high` u' of the server's; an upper one of None leaves that step alone. What the clients
    do to their gradients the server cannot see, so a reply has to attest it; what follows,
    |u_ij| ≤ K u, it enforces. The other options are those of StrategyOptions.
    Raises ValueError for thresholds that are not in order, or both upper ones None.
    """

    Options = BiClipOptions

    def __init__(
        self,
        local_steps: int,
        *,
        low: float = 0.0,
        high: float | None = None,
        server_low: float = 0.0,
        server_high: float | None = None,
        **options: Unpack[StrategyOptions],
    ) -> None:
        super().__init__(**options)
        if local_steps < 1:
            raise ValueError(f"local_steps = {local_steps} is not allowed: at least 1")
        self._server = BiClipOptions(
            low=low, high=high, server_low=server_low, server_high=server_high
        )
        self._rule = _rule(local_steps, low, high)
        self.needs_attestation = high is not None
        self._most = torch.inf if high is None else local_steps * high
        self._local_steps = local_steps

    @classmethod
    def build(cls, config: RunConfig, options: StrategyOptions) -> Self:
        """With the run's local-steps and algorithm-options."""
        own: dict[str, Any] = cls.option_values(config)
        return cls(config.local_steps, **own, **options)

    @classmethod
    def configured_rule(cls, config: RunConfig, local_lr: float, asked: SentRule) -> LocalRule:
        """The steps' thresholds of algorithm-options."""
        del local_lr, asked
        own = cls.option_values(config)
        return _rule(config.local_steps, own["low"], own["high"])

    def local_rule(self, context: RoundContext) -> LocalRule:
        """What the clients do to each of K gradients."""
        del context
        return self._rule

    def norm_bound(self, context: RoundContext) -> NormBound:
        """K u √d in gradient units; K roundings, as the steps are added to the model one by one."""
        return NormBound(self._most * len(context.model) ** 0.5, self._local_steps)

    def bound(self, updates: Tensor, context: RoundContext) -> Tensor:
        """No coordinate of `updates` [K, d] larger than K u."""
        del context
        return updates.clamp(-self._most, self._most)

    def on_aggregate(self, vector: Tensor, local_lr: float) -> Tensor:
        """biclip(η_l v, l', u')/η_l of the aggregate v [d]."""
        low, high = self._server.server_low, self._server.server_high
        return vector if high is None else biclip(local_lr * vector, low, high) / local_lr


def _rule(local_steps: int, low: float, high: float | None) -> LocalRule:
    return LocalRule() if high is None else BiClipGradient(low, high, local_steps)
