"""The aggregation rule, whom it assumes to be corrupt, and the adversary it is tried against."""

from typing import Literal

from pydantic import Field

from blackthorn.settings.catalogue import GUARANTEES
from blackthorn.settings.declaration import KeyGroup


class Rule(KeyGroup):
    """How the updates are aggregated."""

    aggregator: str = Field(
        "auto",
        description=f"Aggregation rule: auto (the algorithm's own), mean, {', '.join(GUARANTEES)}, "
        "or your own as FILE.py:FUNCTION (see docs/extend.md). Any but auto replaces that of "
        "algorithm rage.",
    )
    pre_aggregator: Literal[
        "none", "nearest-neighbour-mixing", "bucketing", "adaptive-clipping"
    ] = Field("none", description="Mixes or clips the updates before the rule sees them.")
    bucket_size: int = Field(2, ge=1, description="bucketing: updates averaged in a bucket.")
    krum_selected: int = Field(
        0, ge=0, description="multi-krum: updates averaged; 0: clients - corrupt ones - 2."
    )
    centered_clipping_radius: float = Field(
        0.0,
        ge=0,
        description="centered-clipping: radius, gradient units; 0: the median distance to the "
        "coordinate-wise median, where it starts.",
    )
    centered_clipping_iterations: int = Field(
        3, ge=1, description="centered-clipping: how often the centre is moved."
    )


class CorruptClients(KeyGroup):
    """How many corrupt clients the rule assumes, and how RAGE looks for them."""

    corrupt_fraction: float = Field(
        0.0,
        ge=0,
        description="The rule assumes floor(fraction x replies) corrupt clients; below 1/3 (rage), "
        "1/4 (bulyan) or 1/2.",
    )
    num_corrupt: int = Field(
        -1, ge=-1, description="Assumed corrupt clients in a round; -1: by corrupt-fraction."
    )
    rage_stop: Literal["count", "appendix-f"] = Field(
        "count", description="When the RAGE filter stops."
    )
    rage_coordinates: int = Field(
        0, ge=0, description="Random coordinates the RAGE filter looks at; 0: all (exact)."
    )
    rage_average: Literal["uniform", "weighted"] = Field(
        "uniform", description="Mean over RAGE's survivors."
    )


class Adversary(KeyGroup):
    """Byzantine clients, simulated, or run by the Byzantine nodes of a cluster."""

    attack: str = Field("none", description="What the Byzantine clients do (see docs/attacks.md).")
    num_byzantine: int = Field(0, ge=0, description="Byzantine clients in the population.")
    byzantine_set: Literal["fixed", "redrawn"] = Field(
        "fixed", description="fixed: the last ids; redrawn: a fresh set every round (simulation)."
    )
    collusion: bool = Field(True, description="Corrupt clients of a round share their updates.")
    omniscient: bool = Field(
        False, description="Simulation: the attacker also sees the honest updates."
    )
