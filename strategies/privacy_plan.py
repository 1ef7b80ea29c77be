"""The one object from which sampler, mechanism and accountant take q, m, C, z, T and δ."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from blackthorn.settings.rounding import downward

from .accounting import (
    ACCOUNTANTS,
    Accountant,
    Charge,
    Figure,
    Release,
    calibrate,
    check_delta,
    is_unbounded,
    spent,
)
from .bounded_update import ClipNorm, check_float32
from .entropy import Randomness
from .noise import check_resolution, client_deviation
from .participation import (
    CohortPlan,
    FixedParticipation,
    FullParticipation,
    Participation,
    PoissonParticipation,
)
from .release import LARGEST_MULTIPLIER, real, whole

Neighbours = Literal["add-remove", "zero-out", "replace-one"]
NoiseLocation = Literal["server", "client"]

_SENTENCES = {
    "add-remove": "neighbours differ by one client added or removed",
    "zero-out": "neighbours differ by one client whose contributions become zero; no amplification "
    "by sampling",
    "replace-one": "neighbours differ by one client replaced by another; sensitivity 2C",
}


# What a claim begins with that is none.
NO_FIGURE = "none, as no finite epsilon holds: "
_APART = "whose SuperLink, if others reach it, has Blackthorn's guard, which keeps them apart"


@dataclass(frozen=True)
class PrivacyPlan:
    """Client-level differential privacy of a run, before it starts.

    clip_norm: C, the longest contribution of a client. noise_multiplier: z; the noise in a round's
    sum is N(0, (z C)² I) in total. num_clients: m. rounds: T. participation: PoissonParticipation
    (neighbours add-remove), FixedParticipation (zero-out or replace-one) or FullParticipation (any
    of the three). noise_location: "server" draws the noise once; "client": every invited client
    adds its share 1/s of the variance, s = `noise_shares`. top_up: the server adds the shares that
    nobody brought and one of its own, (1 + 1/s)(z C)² in all; without it nothing is claimed, since
    the variance would tell who answered.
    max_epsilon: the run ends before the round that would cost more. claim: whether a figure may be
    reported. insecure_seed: sampling and noise from this seed, which forfeits the claim.

    Raises ValueError, one line, for values out of range and for combinations without an analysis.
    """

    clip_norm: ClipNorm
    noise_multiplier: float
    num_clients: int
    rounds: int
    participation: Participation = field(default_factory=FullParticipation)
    delta: float = 1e-5
    neighbours: Neighbours | None = None
    accountant: Accountant = "rdp"
    noise_location: NoiseLocation = "server"
    top_up: bool = True
    max_epsilon: float | None = None
    claim: bool = True
    insecure_seed: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_clients", "rounds"):
            object.__setattr__(self, name, whole(name, getattr(self, name)))
        for name in ("noise_multiplier", "delta", "max_epsilon"):
            if name != "max_epsilon" or self.max_epsilon is not None:
                object.__setattr__(self, name, real(name, getattr(self, name)))
        check_delta(self.delta)
        if not isinstance(self.clip_norm, ClipNorm):
            raise ValueError(f"clip_norm = {self.clip_norm!r} is not allowed: a ClipNorm")
        if self.accountant not in ACCOUNTANTS:
            raise ValueError(
                f"accountant = {self.accountant!r} is not allowed: {', '.join(ACCOUNTANTS)}"
            )
        if self.noise_location not in ("server", "client"):
            raise ValueError(f"noise_location = {self.noise_location!r}: server or client")
        if not 0 < self.noise_multiplier <= LARGEST_MULTIPLIER:
            raise ValueError(
                f"noise_multiplier = {self.noise_multiplier} is not allowed: greater than 0, at "
                f"most {LARGEST_MULTIPLIER:g}"
            )
        if self.max_epsilon is not None and not self.max_epsilon > 0:
            raise ValueError(f"max_epsilon = {self.max_epsilon} is not allowed: greater than 0")
        if self.claim and self.insecure_seed is not None:
            raise ValueError(
                "a seed for the noise breaks the claim: whoever knows it can subtract the noise; "
                "omit insecure_seed, or set claim = False"
            )
        if self.claim and not self.top_up and self.noise_location == "client":
            raise ValueError(
                "top_up = False breaks the claim: how much noise there is would tell who answered, "
                "and where nobody does there is none; use True, or claim = False"
            )
        if self.claim and self.delta > 1 / self.num_clients:
            raise ValueError(
                f"delta = {self.delta} breaks the claim: above 1/num_clients = "
                f"{1 / self.num_clients:g} it covers a server that publishes one client's data in "
                "full; use less, or set claim = False"
            )
        check_float32("clip_norm", self.clip_norm.value)
        self._check_neighbours()

    def _check_neighbours(self) -> None:
        if isinstance(self.participation, FixedParticipation):
            if self.participation.size > self.num_clients:
                raise ValueError(
                    f"a cohort of {self.participation.size} of {self.num_clients} clients is not "
                    "allowed: at most all of them"
                )
            allowed: tuple[str, ...] = ("zero-out", "replace-one")
        elif isinstance(self.participation, PoissonParticipation):
            allowed = ("add-remove",)
        elif isinstance(self.participation, FullParticipation):
            allowed = ("zero-out", "replace-one", "add-remove")
        else:
            raise ValueError(f"no accountant knows the participation {self.participation}")
        if self.neighbours is not None and self.neighbours not in allowed:
            raise ValueError(
                f"neighbours = {self.neighbours} breaks the claim with this participation, whose "
                f"figure is for {' or '.join(allowed)}"
            )

    @property
    def relation(self) -> Neighbours:
        """Whose influence the figure bounds."""
        if self.neighbours is not None:
            return self.neighbours
        return "add-remove" if self.sample_rate < 1 or self._poisson else "zero-out"

    @property
    def _poisson(self) -> bool:
        return isinstance(self.participation, PoissonParticipation)

    @property
    def sample_rate(self) -> float:
        """q of Poisson sampling; 1 without it."""
        kind = self.participation
        return kind.sample_rate if isinstance(kind, PoissonParticipation) else 1.0

    @property
    def cohort_size(self) -> float:
        """r, the fixed denominator: q m, the size of a fixed cohort, or m. Never a head count."""
        if isinstance(self.participation, FixedParticipation):
            return float(self.participation.size)
        return self.sample_rate * self.num_clients

    def draw(self, clients: Sequence[int], randomness: Randomness) -> CohortPlan:
        """The cohort of a round from the clients' stable ids, ascending.

        A fixed cohort is drawn from m places, of which those without a client stay empty: the
        rate of sampling must not rise because some clients have not enrolled.
        """
        known = sorted(clients)
        if isinstance(self.participation, PoissonParticipation):
            joins = randomness.uniform(len(known)) < self.participation.sample_rate
            drawn = zip(known, joins, strict=True)
            return CohortPlan.of(client for client, joined in drawn if joined)
        if isinstance(self.participation, FixedParticipation):
            places = max(self.num_clients, len(known))
            order = randomness.uniform(places).argsort()[: self.participation.size]
            return CohortPlan.of(known[place] for place in order if place < len(known))
        return CohortPlan.of(known)

    def release(self, colluding: int = 0) -> Release:
        """What a round is charged, whoever answers.

        `colluding`: what it is against k other clients of the run that pool what they know. Where
        the clients draw the noise, z √(1 − k/s) is left of it, and of a cohort of n of m clients,
        none of them theirs, they know that it was n of m − k. Raises ValueError unless k is an
        integer from 0 to m − 1.
        """
        if not isinstance(colluding, int) or not 0 <= colluding < self.num_clients:
            raise ValueError(
                f"colluding = {colluding} is not allowed: an integer from 0 to "
                f"{self.num_clients - 1}, the other clients"
            )
        z, shares = self.noise_multiplier, None
        if self.noise_location == "client":
            shares = self.noise_shares
            z *= math.sqrt(max(0.0, 1 - colluding / shares))
        if self.relation != "replace-one":
            return Release(z, self.sample_rate, shares=shares)
        drawn = None
        if isinstance(self.participation, FixedParticipation):
            size, others = self.participation.size, self.num_clients - colluding
            drawn = (size, others) if size <= others else None
        return Release(z / 2, drawn=drawn, shares=shares)

    def figure(self, rounds: int | None = None, colluding: int = 0) -> Figure:
        """ε of `rounds` (by default all T) planned rounds; `colluding` as for `release`."""
        count = self.rounds if rounds is None else rounds
        return spent([(self.release(colluding), count)], self.delta, self.accountant)

    def covers_clients(self, charges: Sequence[Charge] = ()) -> bool:
        """Whether the other clients of the run, all of them together, may be the adversary of its
        figure, or of that of all `charges` of its ledger."""
        return all(release.covers_clients for release, _ in [(self.release(), 1), *charges])

    def _known_to_clients(self) -> list[str]:
        """What the run's clients know that the figure counts on nobody's knowing."""
        n, m, known = self.cohort_size, self.num_clients, []
        if self.relation == "replace-one" and n < m:
            # Poisson draws are independent, but of a fixed cohort whoever knows all but one of the
            # clients knows of that one, too.
            known.append(f"when they were asked (k that pool it: a cohort of {n:g} of {m} - k)")
        if self.noise_location == "client":
            left = f"{downward(self.noise_multiplier, 4)} sqrt(1 - k/{self.noise_shares})"
            known.append(f"their shares of the noise (k that pool theirs: the multiplier {left})")
        return known

    def sentence(self, charges: Sequence[Charge] = ()) -> str:
        """Who is protected from whom by the figure of the plan, or of all `charges` of its ledger,
        in words; without any, with what is assumed of the link between server and clients."""
        known = " and ".join(self._known_to_clients())
        links = {release.link for release, _ in charges}
        if "open" in links:
            known = "what others sent, which a SuperLink without Blackthorn's guard tells"
        elif not known and not self.covers_clients(charges):
            known = (
                "when they were asked, or their shares of the noise, in other runs of the ledger"
            )
            if any(release.shares == "unknown" for release, _ in charges):
                known += ", of which an earlier version did not note who drew the noise"
            elif "unknown" in links:
                known = (
                    "what others sent in runs of the ledger of which an earlier version did not "
                    "note whether the SuperLink has Blackthorn's guard"
                )
        clients = f" and the run's own clients, who know {known}" if known else ""
        # A plan alone, or a run that has charged nothing, knows no link.
        assumed = "" if charges else f" ({_APART})"
        others = "" if known else f", all other clients together included{assumed}"
        release = self.release(), self.rounds
        claimed = "" if charges or not is_unbounded([release], self.delta) else NO_FIGURE
        return claimed + (
            "client-level differential privacy of the released models, against everybody but the "
            f"server{clients}{others}; {_SENTENCES[self.relation]}"
        )

    def bound(self, local_lr: float) -> float:
        """C in gradient units at the rate η_l = `local_lr`.

        Raises ValueError where the rate, or C in either unit, is not a float32 number of full
        precision: what is longer than C, or infinite, would pass for bounded.
        """
        check_float32("local rate", local_lr)
        bound = self.clip_norm.in_gradient_units(local_lr)
        for units, value in (("gradient", bound), ("parameter", bound * local_lr)):
            check_float32(f"clip_norm in {units} units at local rate {local_lr:g}", value)
        return bound

    def check_resolution(self, model: torch.Tensor, local_lr: float) -> None:
        """Raises ValueError where models near `model` [d] cannot carry the clients' shares of the
        noise at the rate η_l = `local_lr`."""
        if self.noise_location == "server":
            return
        bound = self.bound(local_lr)
        deviation = client_deviation(self.noise_multiplier, bound, self.noise_shares)
        check_resolution(model, local_lr, bound, deviation)

    @property
    def noise_shares(self) -> int:
        """s, of which each client that is asked adds one: as many as can ever be asked at once.

        Of the plan alone, never of a round: a client that knows how many were asked, and talks to
        the others, knows who was. Fewer shares than clients would not do either: who brings one
        more would show in the size of the noise.
        """
        if isinstance(self.participation, FixedParticipation):
            return self.participation.size
        return self.num_clients

    def local_figure(self, rounds: int = 0) -> Figure:
        """ε at δ against the server itself, where the clients add the noise, of T rounds, or of
        `rounds` where a run was resumed and asked for more.

        A client's message carries N(0, (z C)²/s I) and moves by up to 2 C with its data: multiplier
        z/(2 √s), without amplification, and for a client that is drawn in every round.
        """
        return spent([(self.local_release(), max(self.rounds, rounds))], self.delta, "rdp")

    def local_release(self) -> Release:
        """What one message, with one of s shares of the noise, tells the server of its client."""
        return Release(self.noise_multiplier / (2 * math.sqrt(self.noise_shares)))


def calibrated(plan: PrivacyPlan, epsilon: float) -> PrivacyPlan:
    """`plan` with the smallest z whose T rounds cost at most (`epsilon`, δ), which no run of it
    ever passes: with what an earlier run has spent, or a round that is done twice, it ends sooner.
    """
    probe = replace(plan, noise_multiplier=1.0)
    z = calibrate(
        epsilon,
        plan.delta,
        lambda z: replace(probe, noise_multiplier=z).release(),
        plan.rounds,
        plan.accountant,
    )
    return replace(plan, noise_multiplier=z, max_epsilon=min(epsilon, plan.max_epsilon or epsilon))
