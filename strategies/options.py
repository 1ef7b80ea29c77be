"""What every strategy may be told."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, TypedDict

from .aggregators import Aggregator
from .global_model import ServerStep
from .layout import Statistics
from .learning_rate import LocalRate
from .output_iterate import OutputIterate
from .participation import Participation
from .privacy_plan import PrivacyPlan
from .reports import RoundReport

Observer = Callable[[RoundReport], None]


class StrategyOptions(TypedDict, total=False):
    """Options that every strategy takes, with their defaults.

    aggregator: the rule (weighted_mean); a robust one such as RageFilter ignores the weights.
    participation: who joins a round (FullParticipation()).
    local_rate: η_l, or a LocalRate that changes over rounds (1.0: gradient and parameter units
        are the same, which is right for any rule without a threshold).
    server_step: η_g, momentum and projection (ServerStep()).
    weighting: "uniform", or "num-examples" capped by what a client enrolled with (with identity
        "node" nobody was asked, so there the clients' claims count).
    identity: "node" (any Flower ClientApp), "query" (stable ids, asked of each node once), or
        "key" (as "query"; an id stays with the node that had it first, which is what a client's
        registered key means where nodes authenticate).
    num_clients: clients to wait for before the first round (2), at most start_timeout seconds
        (120); the run goes on with fewer if there are at least min_replies. A run with nobody
        connected pauses, and ends after as many seconds; under a central claim it goes on with
        noise alone, and num_clients is the plan's. With identity
        "query" or "key" the ids are 0 to num_clients - 1, and others are refused.
    min_replies: accepted replies below which a round leaves the model as it was (1).
    fail_after: rounds in a row below that quorum after which `start` gives up (None: never).
    enough_replies: accepted replies that end a round before its deadline; who has not answered by
        then is surplus (None: everybody is waited for).
    evaluate_every: rounds between evaluations (1).
    output: which iterate `start` hands out (OutputIterate(), the last).
    shared: patterns of the names of the model's entries that travel, whose parameters are w
        (("*",), all). What does not travel keeps its first value at the server.
    statistics: the running statistics of BatchNorm and its like are an "average" over the clients
        that were kept, by their weights (the default; refused under a privacy claim), stay as they
        were first at the "server", or are each client's own ("local"; the clients attest it).
    seed: of the sampling of cohorts and of whatever the rule draws (0).
    observers: called with every round's RoundReport; they read and never change the round.
    """

    aggregator: Aggregator
    participation: Participation
    local_rate: float | LocalRate
    server_step: ServerStep
    weighting: Literal["uniform", "num-examples"]
    identity: Literal["query", "key", "node"]
    num_clients: int
    start_timeout: float
    min_replies: int
    fail_after: int | None
    enough_replies: int | None
    evaluate_every: int
    output: OutputIterate
    shared: Sequence[str]
    statistics: Statistics
    seed: int
    observers: Sequence[Observer]


Denominator = Literal["fixed", "replies"]


class PrivateOptions(StrategyOptions, total=False):
    """Those of every strategy, with the plan and the ledger."""

    privacy: PrivacyPlan
    ledger: Path | None
    noises: Path | None
    denominator: Denominator
