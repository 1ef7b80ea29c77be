"""The clients' half of secure aggregation: an update that is clipped, and leaves its client masked.

The rule clips; what becomes of the clipped update is `client_app/masking.py`, which does not let a
message out that is not masked. Its numbers are all on which both sides have to agree.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from blackthorn.secure_aggregation.graph import Terms
from blackthorn.secure_aggregation.quantisation import Quantisation

from .bounding import check_bound, clip
from .local_rule import LocalRule, RoundOf


@dataclass(frozen=True)
class SecureUpdate(LocalRule):
    """g_i = clip(u_i, C), C = `bound`, to be sent as integers modulo 2^`bits` under masks, with
    noise of which any `survivors` of the n `clients` together bring the multiplier z, `multiplier`;
    more than the share `threshold` of a neighbourhood opens its secrets."""

    name: ClassVar[str] = "secure-update"
    shortens: ClassVar[bool] = True
    is_masked: ClassVar[bool] = True

    bound: float
    multiplier: float
    clients: float
    survivors: float
    threshold: float
    bits: float

    @property
    def terms(self) -> Terms:
        """Raises ValueError for numbers with which no sum would be secure."""
        return Terms(int(self.clients), int(self.survivors), self.threshold)

    def quantisation(self, dimension: int) -> Quantisation:
        """For updates of that length. Raises ValueError where they cannot be summed so."""
        return Quantisation(
            self.bound,
            self.multiplier,
            int(self.survivors),
            int(self.clients),
            int(self.bits),
            dimension,
        )

    def check_range(self, local_lr: float) -> None:
        """Raises ValueError where float32 does not hold the bound in both units, a number of
        clients or bits is none, or nothing would be secure."""
        check_bound(self.bound, local_lr)
        counts = {"clients": self.clients, "survivors": self.survivors, "bits": self.bits}
        for name, value in counts.items():
            if not 1 <= value < 2**53 or int(value) != value:
                raise ValueError(
                    f"the rule {self.name} has {name} = {value:g}: not a number of them"
                )
        if not self.multiplier > 0:
            raise ValueError(f"the rule {self.name} has multiplier = {self.multiplier:g}: no noise")
        _ = self.terms

    def on_update(
        self, start: Tensor, trained: Tensor, local_lr: float, round_of: RoundOf
    ) -> Tensor:
        """w_t − η_l clip(u_i, C) of the clients' models `trained` [B, d], not masked yet."""
        del round_of
        return start - clip(start - trained, local_lr * self.bound)
