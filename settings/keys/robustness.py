"""The aggregation rule, whom it assumes to be corrupt, and the adversary it is tried against."""

from typing import Annotated, Literal

from pydantic import Field

from blackthorn.settings.catalogue import GUARANTEES, TRUSTED
from blackthorn.settings.declaration import PLACE, SERVER, KeyGroup, by, unless


class Rule(KeyGroup):
    """How the updates are aggregated."""

    aggregator: str = Field(
        "auto",
        description=f"Aggregation rule: auto (the algorithm's own), mean, {', '.join(GUARANTEES)}, "
        f"{', '.join(TRUSTED)} (on trusted data), or your own as FILE.py:FUNCTION (see "
        "docs/extend.md). Any but auto replaces that of algorithm rage.",
    )
    pre_aggregator: Literal[
        "none", "nearest-neighbour-mixing", "bucketing", "adaptive-clipping", "equal-lengths"
    ] = Field("none", description="Mixes, clips or scales the updates before the rule sees them.")
    trusted_data: Annotated[str, PLACE, SERVER, by("aggregator", *TRUSTED)] = Field(
        "",
        description="Examples that the server trusts, an .npz file or a folder of images as of "
        "task own-data.",
    )
    bucket_size: Annotated[int, by("pre-aggregator", "bucketing")] = Field(
        2, ge=1, description="Updates averaged in a bucket."
    )
    krum_selected: Annotated[int, by("aggregator", "multi-krum")] = Field(
        0, ge=0, description="Updates averaged; 0: clients - corrupt ones - 2."
    )
    centered_clipping_radius: Annotated[float, by("aggregator", "centered-clipping")] = Field(
        0.0,
        ge=0,
        description="Radius, gradient units; 0: the median distance to the "
        "coordinate-wise median, where it starts.",
    )
    centered_clipping_iterations: Annotated[int, by("aggregator", "centered-clipping")] = Field(
        3, ge=1, description="How often the centre is moved."
    )


class CorruptClients(KeyGroup):
    """How many corrupt clients the rule assumes, and how RAGE looks for them."""

    corrupt_fraction: Annotated[float, by("num-corrupt", -1)] = Field(
        0.0,
        ge=0,
        description="The rule assumes floor(fraction x replies) corrupt clients; below 1/3 (rage), "
        "1/4 (bulyan) or 1/2.",
    )
    num_corrupt: Annotated[int, unless("aggregator", "mean"), unless("pre-aggregator", "none")] = (
        Field(-1, ge=-1, description="Assumed corrupt clients in a round; -1: by corrupt-fraction.")
    )
    corrupt_clients: Annotated[int, unless("participation", "full")] = Field(
        -1,
        ge=-1,
        description="Clients of the population that are taken to be corrupt, for cohort-risk; -1: "
        "num-byzantine.",
    )
    cohort_risk: Annotated[float, unless("participation", "full")] = Field(
        0.01,
        gt=0,
        le=1,
        description="Largest probability that in a round of the run a cohort holds more corrupt "
        "clients than the rule assumes.",
    )
    quarantine_after: Annotated[
        int, SERVER, unless("aggregator", "mean"), unless("pre-aggregator", "none")
    ] = Field(
        0,
        ge=0,
        description="Rounds after which clients that are suspects then are left out of cohorts for "
        "the rest of the run; 0: nobody ever is.",
    )
    rage_stop: Annotated[Literal["count", "appendix-f", "spectral"], by("aggregator", "rage")] = (
        Field(
            "count",
            description="When the RAGE filter stops: as many clients are out as are assumed "
            "corrupt, one more is, or the largest eigenvalue of the updates' covariance is at most "
            "rage-constant x rage-variance.",
        )
    )
    rage_variance: Annotated[float, by("rage-stop", "spectral")] = Field(
        0.0,
        ge=0,
        description="sigma_0^2, how far honest updates spread in any direction: gradient units, "
        "squared.",
    )
    rage_constant: Annotated[float, by("rage-stop", "spectral")] = Field(
        11.0, ge=11, description="C of RAGE's own stop rule."
    )
    rage_coordinates: Annotated[int, by("aggregator", "rage")] = Field(
        0, ge=0, description="Random coordinates the RAGE filter looks at; 0: all (exact)."
    )
    rage_average: Annotated[Literal["uniform", "weighted"], by("aggregator", "rage")] = Field(
        "uniform", description="Mean over RAGE's survivors."
    )


class Adversary(KeyGroup):
    """Byzantine clients, simulated, or run by the Byzantine nodes of a cluster."""

    attack: Annotated[str, unless("num-byzantine", 0)] = Field(
        "none", description="What the Byzantine clients do (see docs/attacks.md)."
    )
    num_byzantine: int = Field(0, ge=0, description="Byzantine clients in the population.")
    byzantine_set: Annotated[Literal["fixed", "redrawn"], unless("num-byzantine", 0)] = Field(
        "fixed", description="fixed: the last ids; redrawn: a fresh set every round (simulation)."
    )
    collusion: Annotated[bool, unless("num-byzantine", 0)] = Field(
        True, description="Corrupt clients of a round share their updates."
    )
    omniscient: Annotated[bool, unless("num-byzantine", 0)] = Field(
        False, description="Simulation: the attacker also sees the honest updates."
    )
