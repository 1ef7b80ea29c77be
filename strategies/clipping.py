"""Clipping against heavy tails: per round and per iteration (FAT-Clipping, Yang et al., Algorithms
2 and 3), of updates in parameter units (CE-FedAvg, Zhang et al., Algorithm 2), and of whole models,
the baseline that Claim 2.1 of Zhang et al. warns of."""

from dataclasses import dataclass
from typing import ClassVar, Self, Unpack

from torch import Tensor

from blackthorn.settings.config import RunConfig
from blackthorn.settings.derived import clip_units

from .attestation import SentRule
from .base import FederatedStrategy
from .bounded_update import ClipUpdate
from .bounding import ClipNorm, NormBound, Units, check_bound, check_float32, clip
from .local_rule import LocalRule, RoundOf
from .options import StrategyOptions
from .rounds import RoundContext


class FatClippingPR(FederatedStrategy):
    """w ← w − η_g η_l (1/|S_t|) Σ clip(u_i, λ), u_i the client's sum of K gradients.

    An honest client clips what it sends; the server clips again and reports who did not.
    `clip_norm` is λ, in `clip_units`. The other options are those of StrategyOptions.
    """

    def __init__(
        self,
        clip_norm: float,
        *,
        clip_units: Units = "gradient",
        **options: Unpack[StrategyOptions],
    ) -> None:
        super().__init__(**options)
        self._clip_norm = ClipNorm(clip_norm, clip_units)

    @classmethod
    def build(cls, config: RunConfig, options: StrategyOptions) -> Self:
        """With the run's clip-norm."""
        return cls(config.clip_norm, clip_units=clip_units(config), **options)

    @classmethod
    def configured_rule(cls, config: RunConfig, local_lr: float, asked: SentRule) -> LocalRule:
        """The update is clipped to λ."""
        del asked
        return ClipUpdate(ClipNorm.of(config).in_gradient_units(local_lr))

    def local_rule(self, context: RoundContext) -> LocalRule:
        """The update is clipped to λ."""
        return ClipUpdate(self.norm_bound(context).norm)

    def norm_bound(self, context: RoundContext) -> NormBound:
        """λ in gradient units."""
        return NormBound(self._clip_norm.in_gradient_units(context.local_lr))

    def bound(self, updates: Tensor, context: RoundContext) -> Tensor:
        """clip(u_i, λ) of every row of `updates` [K, d]."""
        return clip(updates, self.norm_bound(context).norm)


class CEFedAvg(FatClippingPR):
    """w ← w + η_g (1/|P_t|) Σ clip(Δ_i, c), Δ_i = w_i − w_t: parameter units by default.

    The same map as FAT-Clipping-PR up to the unit of the threshold. `clip_norm` is c. The other
    options are those of StrategyOptions.
    """

    def __init__(
        self,
        clip_norm: float,
        *,
        clip_units: Units = "parameter",
        **options: Unpack[StrategyOptions],
    ) -> None:
        super().__init__(clip_norm, clip_units=clip_units, **options)


@dataclass(frozen=True)
class ClipGradient(LocalRule):
    """Each of K steps' gradients g becomes clip(g, λ), λ = `bound`."""

    name: ClassVar[str] = "clip-gradient"

    bound: float
    local_steps: int

    def check_range(self, local_lr: float) -> None:
        """Raises ValueError where float32 does not hold the bound in both units."""
        check_bound(self.bound, local_lr)

    def on_gradient(self, gradients: Tensor, params: Tensor, start: Tensor) -> Tensor:
        """clip(g, λ) of every row; lengths and factors are computed in float64 on the processor."""
        del params, start
        return clip(gradients.cpu(), self.bound).to(gradients.device)


class FatClippingPI(FederatedStrategy):
    """w ← w − η_g η_l (1/|S_t|) Σ u_i, where every local step's gradient was clipped to λ.

    The clients clip before each of their `local_steps` K steps, and say so: a reply that does not
    attest the rule does not count. What the server can enforce of it is the consequence
    ‖u_i‖ ≤ K λ, and it does. `clip_norm` is λ, in `clip_units`. The other options are those of
    StrategyOptions.
    """

    needs_attestation = True

    def __init__(
        self,
        clip_norm: float,
        local_steps: int,
        *,
        clip_units: Units = "gradient",
        **options: Unpack[StrategyOptions],
    ) -> None:
        super().__init__(**options)
        if local_steps < 1:
            raise ValueError(f"local_steps = {local_steps} is not allowed: at least 1")
        self._clip_norm = ClipNorm(clip_norm, clip_units)
        self._local_steps = local_steps

    @classmethod
    def build(cls, config: RunConfig, options: StrategyOptions) -> Self:
        """With the run's clip-norm and local-steps."""
        units = clip_units(config)
        return cls(config.clip_norm, config.local_steps, clip_units=units, **options)

    @classmethod
    def configured_rule(cls, config: RunConfig, local_lr: float, asked: SentRule) -> LocalRule:
        """Each of K gradients is clipped to λ."""
        del asked
        return ClipGradient(ClipNorm.of(config).in_gradient_units(local_lr), config.local_steps)

    def local_rule(self, context: RoundContext) -> LocalRule:
        """Each of K gradients is clipped to λ."""
        bound = self._clip_norm.in_gradient_units(context.local_lr)
        return ClipGradient(bound, self._local_steps)

    def norm_bound(self, context: RoundContext) -> NormBound:
        """K λ in gradient units; K roundings, as the steps are added to the model one by one."""
        bound = self._clip_norm.in_gradient_units(context.local_lr)
        return NormBound(self._local_steps * bound, self._local_steps)

    def bound(self, updates: Tensor, context: RoundContext) -> Tensor:
        """clip(u_i, K λ) of every row of `updates` [K, d]."""
        return clip(updates, self.norm_bound(context).norm)


@dataclass(frozen=True)
class ClipModel(LocalRule):
    """The model w_i becomes clip(w_i, c), c = `bound` in parameter units."""

    name: ClassVar[str] = "clip-model"

    bound: float

    def check_range(self, local_lr: float) -> None:
        """Raises ValueError where float32 does not hold the bound."""
        del local_lr
        check_float32("the server's bound", self.bound)

    def on_update(
        self, start: Tensor, trained: Tensor, local_lr: float, round_of: RoundOf
    ) -> Tensor:
        """clip(w_i, c) of every row of `trained` [B, d]."""
        del start, local_lr, round_of
        return clip(trained, self.bound)


class ModelClipping(FederatedStrategy):
    """w ← mean of clip(w_i, c): the local *models* are clipped, not what they learned.

    `clip_norm` is c, in parameter units. Here for comparison only: it pulls the model to the
    origin. The other options are those of StrategyOptions.
    """

    def __init__(self, clip_norm: float, **options: Unpack[StrategyOptions]) -> None:
        super().__init__(**options)
        self._clip_norm = ClipNorm(clip_norm, "parameter").value

    @classmethod
    def build(cls, config: RunConfig, options: StrategyOptions) -> Self:
        """With the run's clip-norm."""
        return cls(config.clip_norm, **options)

    @classmethod
    def configured_rule(cls, config: RunConfig, local_lr: float, asked: SentRule) -> LocalRule:
        """The model is clipped to c."""
        del local_lr, asked
        return ClipModel(config.clip_norm)

    def local_rule(self, context: RoundContext) -> LocalRule:
        """The model is clipped to c."""
        del context
        return ClipModel(self._clip_norm)

    def bound(self, updates: Tensor, context: RoundContext) -> Tensor:
        """(w_t − clip(w_i, c))/η_l for every row of `updates` [K, d]."""
        model, local_lr = context.model, context.local_lr
        local_models = model - local_lr * updates
        return (model - clip(local_models, self._clip_norm)) / local_lr
