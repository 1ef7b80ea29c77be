"""The clients' half of what bounds an update: clipped or normalised and, where a claim of privacy
rests on noise that the clients add, with their share of it."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .bounding import check_bound, check_float32, clip, normalize
from .local_rule import LocalRule, RoundOf
from .noise import client_deviation, gaussian_noise, on_grid


@dataclass(frozen=True)
class BoundedUpdate(LocalRule, ABC):
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
    @abstractmethod
    def constrain(updates: Tensor, bound: float) -> Tensor:
        """g_i of every row of `updates` [K, d], or of one [d], no longer than `bound`."""

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


@dataclass(frozen=True)
class NormalizeUpdate(BoundedUpdate):
    """g_i = norm(u_i, C) = C u_i/‖u_i‖, and 0 for 0."""

    name: ClassVar[str] = "normalize-update"

    @staticmethod
    def constrain(updates: Tensor, bound: float) -> Tensor:
        """norm(u_i, C) of every row of `updates` [K, d], or of one [d]."""
        return normalize(updates, bound)
