"""The rules of `aggregation/trusted.py` as strategies call them."""

from dataclasses import dataclass
from typing import Protocol

import torch

from . import aggregation
from .aggregation import Aggregate, RoundOfRule
from .aggregators import CorruptionBound


class TrustedData(Protocol):
    """Examples that the server knows to be right."""

    def update(self, at: RoundOfRule) -> torch.Tensor:
        """u_0 [d] in gradient units: what a client's local training makes of them in the round."""

    def losses(self, models: torch.Tensor) -> torch.Tensor:
        """The mean loss on them of each of the models [B, d]: [B]."""


@dataclass(frozen=True)
class FLTrust:
    """Updates weigh by how much they go the way of the trusted data's, all of its length."""

    trusted: TrustedData

    def __call__(
        self,
        updates: torch.Tensor,
        weights: torch.Tensor,  # noqa: ARG002 (what a client says of itself gives no influence)
        at: RoundOfRule,
    ) -> Aggregate:
        """The round's aggregate."""
        return aggregation.fltrust(updates, self.trusted.update(at))


@dataclass(frozen=True)
class Validated:
    """The mean of the updates after which the loss on the trusted data is smallest; all but the
    number that is assumed corrupt count, none longer than the trusted data's own update."""

    trusted: TrustedData
    corruption: CorruptionBound

    def __call__(
        self,
        updates: torch.Tensor,
        weights: torch.Tensor,  # noqa: ARG002 (as above)
        at: RoundOfRule,
    ) -> Aggregate:
        """The round's aggregate."""
        length = float(torch.linalg.vector_norm(self.trusted.update(at), dtype=torch.float64))
        factors = aggregation.clipped_to(updates, length).to(updates.dtype)
        steps = at.local_lr * factors[:, None] * updates
        losses = self.trusted.losses(at.model - steps)
        return aggregation.validated(updates, losses, self.corruption.among(len(updates)), length)
