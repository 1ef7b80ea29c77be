"""The privacy plan of secure aggregation: what the noise of the fewest survivors is worth, against
whom."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from blackthorn.secure_aggregation.graph import Terms
from blackthorn.secure_aggregation.quantisation import CHARGED, Quantisation
from blackthorn.settings.rounding import downward

from .accounting import Charge, is_unbounded
from .participation import FixedParticipation, FullParticipation
from .privacy_plan import GIVEN_WEIGHTS, NO_CLAIM, NO_FIGURE, NoiseLocation, PrivacyPlan
from .release import Release, check_colluding, real, take_over, whole

_SENTENCE = (
    "client-level differential privacy of the sums that the server learns, and so of the released "
    "models, against everybody, the server too, as long as {helpers} of a round's clients help it "
    "in this run; it has to pass on the clients' own keys, {duty}to ask no more than {clients} "
    "clients in a round and to charge every round that it asks for, with "
    "clients that bound and noise their updates as they attest; the run's own clients know their "
    "shares of the noise (k that pool theirs: the multiplier {left}); neighbours differ by one "
    "client whose contributions become zero; no "
    "amplification by sampling"
)
# Where a client knows its neighbours alone.
_SPARSE = "to draw by chance who is whose neighbour, to tell all of them the same of who vanished, "
_OVER_PLAIN_LINKS = (
    "; as the link has no TLS, whoever changes what is on the way is taken to pass on the clients' "
    "own keys, too"
)


@dataclass(frozen=True)
class SecurePlan(PrivacyPlan):
    """A PrivacyPlan whose noise the clients draw and whose sums alone the server learns.

    `survivors` n': with fewer clients a round is refused, and the noise is z with just these, so
    that more bring more. `threshold` and `bits` as in `secure_aggregation`. The accountant is RDP:
    what is known of the sum of discrete noises is a bound in concentrated DP.

    Raises ValueError, one line, as PrivacyPlan, and where nothing is known of the sum.
    """

    survivors: int = 3
    threshold: float = 2 / 3
    bits: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        take_over(self, whole, "survivors", "bits")
        take_over(self, real, "threshold")
        if not isinstance(self.participation, FixedParticipation | FullParticipation):
            raise ValueError(
                "secure aggregation needs FullParticipation or FixedParticipation: the server sees "
                "who takes part, so that sampling amplifies nothing"
            )
        for name, value, needed in (
            ("neighbours", self.relation, "zero-out"),
            ("noise_location", self.noise_location, "server"),
            ("accountant", self.accountant, "rdp"),
            ("adaptive", self.adaptive, None),
        ):
            if value != needed:
                raise ValueError(f"{name} = {value} is not allowed in secure aggregation: {needed}")
        _ = self.terms

    @property
    def drawn_by(self) -> NoiseLocation:
        """Whose noise it is."""
        return "client"

    @cached_property
    def terms(self) -> Terms:
        """Of a round: its clients, of whom so many have to survive."""
        return Terms(int(self.cohort_size), self.survivors, self.threshold)

    def quantisation(self, dimension: int, local_lr: float) -> Quantisation:
        """For models of `dimension` parameters, at the rate η_l. Raises ValueError where they
        cannot be summed so."""
        return Quantisation(
            self.bound(local_lr),
            self.noise_multiplier,
            self.survivors,
            int(self.cohort_size),
            self.bits,
            dimension,
        )

    def check_resolution(self, model: torch.Tensor, local_lr: float) -> None:
        """Raises ValueError where sums of updates of `model` [d] cannot carry their noise."""
        self.quantisation(len(model), local_lr)

    def noise_in_round(self, server_round: int) -> float:
        """As PrivacyPlan's, of a round in which nobody vanishes."""
        return super().noise_in_round(server_round) * math.sqrt(self.terms.clients / self.survivors)

    def release(self, colluding: int = 0) -> Release:
        """What a round is charged: z of n' survivors, less what the sum of discrete noises may lose
        to Gaussian ones. `colluding` clients know their shares: z √(1 − k/n') is left."""
        check_colluding(colluding, self.num_clients)
        z = self.noise_multiplier * CHARGED
        left = z * math.sqrt(max(0.0, 1 - colluding / self.survivors))
        return Release(left, shares=self.survivors, concentrated=True)

    def sentence(self, charges: Sequence[Charge] = (), *, given_weights: bool = False) -> str:
        """As PrivacyPlan's; where the ledger holds rounds of another kind, whose server has seen
        the updates, that of a plan which does not count the server in."""
        if not self.claim:
            return NO_CLAIM
        if not all(release.concentrated for release, _ in charges):
            return super().sentence(charges, given_weights=given_weights)
        counted = charges or [(self.release(), self.rounds)]
        left = f"{downward(self.noise_multiplier, 4)} sqrt(1 - k/{self.survivors})"
        plain = any(release.link == "plain" for release, _ in charges)
        return (
            (NO_FIGURE if is_unbounded(counted, self.delta) else "")
            + _SENTENCE.format(
                left=left,
                helpers=self._helpers,
                duty="" if self.terms.is_complete else _SPARSE,
                clients=self.terms.clients,
            )
            + (_OVER_PLAIN_LINKS if plain else "")
            + (GIVEN_WEIGHTS if given_weights else "")
        )

    @property
    def _helpers(self) -> str:
        """How many clients may help a server that lies, in words."""
        if not self.terms.is_complete:
            return "no more than a fifth"
        needed = self.terms.helpers_needed
        return f"fewer than {needed}" if needed > 1 else "none"
