"""The one object from which sampler, mechanism and accountant take q, m, C, z, T and δ."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from blackthorn.settings.rounding import downward, exact

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
from .adaptive_threshold import AdaptiveThreshold, update_multiplier
from .bounding import ClipNorm, check_float32
from .neighbours import check_neighbours, check_turns
from .noise import Randomness, check_resolution, client_deviation, missing_share, roundings_needed
from .noise_record import round_deviations
from .participation import (
    CohortPlan,
    FixedParticipation,
    FullParticipation,
    Participation,
    PoissonParticipation,
    RotatingParticipation,
)
from .release import LARGEST_MULTIPLIER, check_colluding, message_release, real, take_over, whole

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
NO_CLAIM = "none, as the privacy plan claims nothing"
_READ = (
    ", whoever is on the way to it, who reads what clients send, as the link has no TLS, and the "
    "run's own clients, who may be there"
)
# What it ends with where the first model is not drawn from a seed.
GIVEN_WEIGHTS = "; it starts from given weights, which the figure takes to be public"
ONLY_LOCAL = "no central figure: the sensitivity of a robust rule is unknown; see local"
_APART = (
    "whose SuperLink, if others reach it, has TLS and Blackthorn's guard, which keeps them apart"
)


@dataclass(frozen=True)
class PrivacyPlan:
    """Client-level differential privacy of a run, before it starts.

    clip_norm: C, the longest contribution of a client. noise_multiplier: z; the noise in a round's
    sum is N(0, (z C)² I) in total. num_clients: m. rounds: T. participation: PoissonParticipation
    (neighbours add-remove), FixedParticipation (zero-out or replace-one), FullParticipation or
    RotatingParticipation (any of the three). bands: over how many rounds the noise hangs together
    (`noise_record`), at most as many as there are groups that take turns; 1: noise is drawn anew in
    every round. adaptive: C begins at clip_norm, and follows a quantile of the updates' lengths, of
    which a noised count is released, too; z is what both cost together. noise_location: "server"
    draws the noise once; "client": every invited client adds its share 1/s of the variance, s =
    `noise_shares`. top_up: the server adds the shares that nobody brought and one of its own,
    (1 + 1/s)(z C)² in all; without it nothing is claimed, since the variance would tell who
    answered.
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
    bands: int = 1
    adaptive: AdaptiveThreshold | None = None
    noise_location: NoiseLocation = "server"
    top_up: bool = True
    max_epsilon: float | None = None
    claim: bool = True
    insecure_seed: int | None = None

    def __post_init__(self) -> None:
        take_over(self, whole, "num_clients", "rounds", "bands")
        take_over(self, real, "noise_multiplier", "delta")
        if self.max_epsilon is not None:
            take_over(self, real, "max_epsilon")
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
        check_neighbours(self)
        check_turns(self)

    def check_rounds(self, name: str, rounds: int) -> None:
        """Raises ValueError, which begins with `name`, for more rounds than T: no figure would
        count them."""
        if rounds > self.rounds:
            raise ValueError(
                f"{name} {rounds} is not allowed: the privacy plan is for {self.rounds}"
            )

    @property
    def drawn_by(self) -> NoiseLocation:
        """Whose noise it is."""
        return self.noise_location

    @property
    def groups(self) -> int:
        """b, of clients that take turns; 1: they do not."""
        kind = self.participation
        return kind.groups if isinstance(kind, RotatingParticipation) else 1

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
        """r, the fixed denominator: q m, the size of a fixed cohort, m/b or m: no head count."""
        if isinstance(self.participation, FixedParticipation):
            return float(self.participation.size)
        return self.sample_rate * self.num_clients / self.groups

    @property
    def update_multiplier(self) -> float:
        """Of the noise on the updates: z, or more than z where the count of an adaptive threshold
        is paid from it. Raises ValueError where that alone would cost more."""
        if self.adaptive is None:
            return self.noise_multiplier
        return update_multiplier(self.noise_multiplier, self.cohort_size)

    def noise_in_round(self, server_round: int) -> float:
        """Deviation of the noise on a round's sum, in units of that of its own new noise, z C."""
        shares = 1 / self.noise_shares if self.noise_location == "client" and self.top_up else 0.0
        hangs = float(round_deviations(self.bands, self.rounds)[server_round - 1])
        return hangs * math.sqrt(1 + shares)

    def draw(
        self, clients: Sequence[int], randomness: Randomness, server_round: int = 1
    ) -> CohortPlan:
        """The cohort of a round from the clients' stable ids, ascending; on `server_round` it hangs
        where clients take turns, and on nothing that is drawn.

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
        if isinstance(self.participation, RotatingParticipation):
            return self.participation.of_round(known, server_round, self.num_clients)
        return CohortPlan.of(known)

    def release(self, colluding: int = 0) -> Release:
        """What a round is charged, whoever answers.

        `colluding`: what it is against k other clients of the run that pool what they know. Where
        the clients draw the noise, z √(1 − k/s) is left of it, and of a cohort of n of m clients,
        none of them theirs, they know that it was n of m − k. Raises ValueError unless k is an
        integer from 0 to m − 1.
        """
        check_colluding(colluding, self.num_clients)
        z, shares = self.noise_multiplier, None
        if self.noise_location == "client":
            shares = self.noise_shares
            z *= math.sqrt(max(0.0, 1 - colluding / shares))
        if self.relation != "replace-one":
            return Release(z, self.sample_rate, shares=shares, groups=self.groups)
        drawn = None
        if isinstance(self.participation, FixedParticipation):
            size, others = self.participation.size, self.num_clients - colluding
            drawn = (size, others) if size <= others else None
        return Release(z / 2, drawn=drawn, shares=shares, groups=self.groups)

    def check_figure(self, central: bool = True) -> None:
        """Raises ValueError where a claim, that of the released models or else of clients' single
        messages, would be of nothing: the noise is too little for any finite ε."""
        release = self.release() if central else self.local_release()
        if self.claim and is_unbounded([(release, self.rounds)], self.delta):
            raise ValueError(
                f"noise_multiplier = {self.noise_multiplier:g} breaks the claim: with so little "
                f"noise no finite epsilon holds at delta = {self.delta:g}; use more, or set claim "
                "= False"
            )

    def figure(self, rounds: int | None = None, colluding: int = 0) -> Figure:
        """ε of `rounds` (by default all T) planned rounds; `colluding` as for `release`. The plan's
        arithmetic, for calibration, whether or not it claims it: a run's is its strategy's."""
        count = self.rounds if rounds is None else rounds
        return spent([(self.release(colluding), count)], self.delta, self.accountant)

    def covers_clients(self, charges: Sequence[Charge] = ()) -> bool:
        """Whether the other clients of the run, all of them together, may be the adversary of its
        figure, or of that of all `charges` of its ledger."""
        counted = [(self.release(), 1), *charges]
        return self.claim and all(release.covers_clients for release, _ in counted)

    def _known_to_clients(self) -> list[str]:
        """What the run's clients know that the figure counts on nobody's knowing."""
        n, m, known = self.cohort_size, self.num_clients, []
        if self.relation == "replace-one" and n < m and self.groups == 1:
            # Poisson draws are independent, but of a fixed cohort whoever knows all but one of the
            # clients knows of that one, too.
            known.append(
                f"when they were asked (k that pool it: a cohort of {exact(n)} of {m} - k)"
            )
        if self.noise_location == "client":
            left = f"{downward(self.noise_multiplier, 4)} sqrt(1 - k/{self.noise_shares})"
            known.append(f"their shares of the noise (k that pool theirs: the multiplier {left})")
        return known

    def sentence(self, charges: Sequence[Charge] = (), *, given_weights: bool = False) -> str:
        """Who is protected from whom by the figure of the plan, or of all `charges` of its ledger,
        in words; without any, with what is assumed of the link between server and clients.
        `given_weights`: the first model is not drawn from a seed.

        For a sum: of a robust rule `PrivateAveraging.sentence` knows."""
        if not self.claim:
            return NO_CLAIM
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
        if "plain" in links:
            known = clients = _READ
        # A plan alone, or a run that has charged nothing, knows no link.
        assumed = "" if charges else f" ({_APART})"
        others = "" if known else f", all other clients together included{assumed}"
        counted = charges or [(self.release(), self.rounds)]
        claimed = NO_FIGURE if is_unbounded(counted, self.delta) else ""
        start = GIVEN_WEIGHTS if given_weights else ""
        return claimed + (
            "client-level differential privacy of the released models, against everybody but the "
            f"server{clients}{others}; {_SENTENCES[self.relation]}{start}"
        )

    def bound(self, local_lr: float, clip_norm: ClipNorm | None = None) -> float:
        """C in gradient units at the rate η_l = `local_lr`; `clip_norm`: where it has gone since.

        Raises ValueError where the rate, or C in either unit, is not a float32 number of full
        precision: what is longer than C, or infinite, would pass for bounded.
        """
        check_float32("local rate", local_lr)
        bound = (clip_norm or self.clip_norm).in_gradient_units(local_lr)
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
        rounds = self.rounds if self.claim else 0
        roundings = roundings_needed(len(model), rounds, self.noise_shares)
        check_resolution(model, local_lr, bound, deviation, roundings)

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

    def owed(self, replies: int) -> float:
        """The share of the variance (z C)² that the server adds: what the clients' messages did
        not bring, and one share more, whoever answered.

        Clients' models are rounded, so that their sum lies on a lattice, and where they alone bring
        the noise the last bits of the new model tell that everybody has answered. A share, four
        roundings wide at least (`check_resolution`), leaves no lattice.
        """
        if self.noise_location == "server":
            return 1.0
        # Only where nothing is claimed is there no top-up.
        missing = missing_share(self.noise_shares, replies)
        return missing + 1 / self.noise_shares if self.top_up else 0.0

    def local_figure(self, rounds: int = 0) -> Figure:
        """ε at δ against the server itself, where the clients add the noise, of T rounds, or of
        `rounds` where a run was resumed and asked for more.

        As `message_release`, without amplification, and for a client that is drawn in every round;
        infinite with noise at the server, to which clients send all they have, or by a seed.
        """
        return spent([(self.local_release(), max(self.rounds, rounds))], self.delta, "rdp")

    def local_release(self) -> Release:
        """What one message, with one of s shares of the noise, tells the server of its client."""
        if self.noise_location == "server" or self.insecure_seed is not None:
            return Release(0.0)
        return message_release(self.noise_multiplier, self.noise_shares)


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
