"""A bound on every client's update: its unit, and what a client does to keep to it."""

import math
from dataclasses import dataclass
from numbers import Real
from typing import ClassVar, Self

import torch
from torch import Tensor

from blackthorn.settings.catalogue import Units
from blackthorn.settings.derived import clip_units
from blackthorn.settings.keys import Keys

from .bounding import clip
from .local_rule import LocalRule, RoundOf
from .noise import client_deviation, gaussian_noise, on_grid

_FLOAT32 = torch.finfo(torch.float32)


def check_float32(name: str, value: float) -> None:
    """Raises ValueError unless `value` is a positive number that float32 holds in full precision:
    products of smaller ones come out too long or are 0, of larger ones infinite."""
    if not _FLOAT32.smallest_normal <= value <= _FLOAT32.max:
        raise ValueError(
            f"{name} = {value:g} is not allowed: {_FLOAT32.smallest_normal:.3g} to "
            f"{_FLOAT32.max:.3g}, which float32 holds in full precision"
        )


@dataclass(frozen=True)
class ClipNorm:
    """A threshold C with its unit. C_parameter = η_l · C_gradient, since Δ_i = −η_l u_i.

    "gradient": u_i = (w_t − w_i)/η_l, the sum of K gradients. "parameter": Δ_i = w_i − w_t.
    Raises ValueError unless the value is a positive number, and the unit one of the two.
    """

    value: float
    units: Units = "gradient"

    def __post_init__(self) -> None:
        if not (isinstance(self.value, Real) and self.value > 0):
            raise ValueError(f"clip_norm = {self.value!r} is not allowed: a number greater than 0")
        if self.units not in ("gradient", "parameter"):
            raise ValueError(f"clip_units = {self.units!r} is not allowed: gradient or parameter")
        object.__setattr__(self, "value", float(self.value))

    @classmethod
    def of(cls, config: Keys) -> Self:
        """The run configuration's."""
        return cls(config.clip_norm, clip_units(config))

    def in_gradient_units(self, local_lr: float) -> float:
        """The threshold for u_i at the local learning rate η_l = `local_lr`.

        Raises ValueError where float64 has no such number.
        """
        bound = self.value if self.units == "gradient" else self.value / local_lr
        if not bound > 0:
            raise ValueError(
                f"clip_norm = {self.value} is not allowed at local rate {local_lr}: in gradient "
                f"units it is {bound}"
            )
        return bound

    def scale(self, local_lr: float) -> float:
        """What gradient units are multiplied by to be the threshold's."""
        return 1.0 if self.units == "gradient" else local_lr


def check_bound(bound: float, local_lr: float) -> None:
    """Raises ValueError where float32 does not hold a bound in both units."""
    check_float32("the server's bound", bound)
    check_float32("the server's bound x local-lr", bound * local_lr)


@dataclass(frozen=True)
class BoundedUpdate(LocalRule):
    """An update becomes g_i = constrain(u_i, C), C = `bound`; with the other two numbers a client
    adds its share N(0, (z C)²/s I) of the noise, z = `noise_multiplier`, s = `noise_shares`.

    Update and noise are added in float64 and rounded to the model's dtype with it, once: what is
    rounded before the noise could be moved by more than C by a server whose model is large. An
    update that is not finite counts as 0, since NaN would pass through any noise. Their sum is
    `on_grid`.
    """

    bound: float
    noise_multiplier: float | None = None
    noise_shares: int | None = None

    @staticmethod
    def constrain(updates: Tensor, bound: float) -> Tensor:
        """g_i of every row of `updates` [K, d], or of one [d], no longer than `bound`."""
        raise NotImplementedError

    def check_range(self, local_lr: float) -> None:
        """Raises ValueError where float32 does not hold the bound in both units, or there is no
        such share of the noise."""
        check_bound(self.bound, local_lr)
        z, shares = self.noise_multiplier, self.noise_shares
        if z is None and shares is None:
            return
        if (
            z is None
            or shares is None
            or not 0 < z < math.inf
            or int(shares) != shares
            or shares < 1
        ):
            raise ValueError(
                f"the rule {self.name} has noise-multiplier = {z} and noise-shares = {shares}: the "
                "one has to be positive, the other a number of clients"
            )
        check_float32("the noise that the server asks for", self.deviation(local_lr))

    @property
    def adds_noise(self) -> bool:
        """Whether a share of the noise is added."""
        return self.noise_multiplier is not None

    def deviation(self, local_lr: float) -> float:
        """η_l z C/√s: of a client's share of the noise, in the units of the model; 0 without."""
        if self.noise_multiplier is None or self.noise_shares is None:
            return 0.0
        shares = int(self.noise_shares)
        return client_deviation(self.noise_multiplier, self.bound, shares) * local_lr

    def on_update(
        self, start: Tensor, trained: Tensor, local_lr: float, round_of: RoundOf
    ) -> Tensor:
        """w_t − η_l g_i of the clients' models `trained` [B, d], with their noise."""
        bound = local_lr * self.bound
        if self.noise_multiplier is None:
            return start - self.constrain(start - trained, bound)
        deviation, origin = self.deviation(local_lr), start.double()
        noised = torch.empty_like(trained)
        for i, (row, model) in enumerate(zip(noised, trained, strict=True)):
            update = self.constrain(origin - model.double(), bound)
            randomness = round_of(i).randomness()
            noise = gaussian_noise(tuple(row.shape), deviation, randomness, torch.float64)
            finite = bool(torch.isfinite(update).all())
            row.copy_(origin - on_grid(update + noise if finite else noise, deviation))
        return noised


@dataclass(frozen=True)
class ClipUpdate(BoundedUpdate):
    """g_i = clip(u_i, C)."""

    name: ClassVar[str] = "clip-update"
    shortens: ClassVar[bool] = True

    @staticmethod
    def constrain(updates: Tensor, bound: float) -> Tensor:
        """clip(u_i, C) of every row of `updates` [K, d], or of one [d]."""
        return clip(updates, bound)
