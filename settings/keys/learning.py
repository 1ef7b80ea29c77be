"""Which algorithm runs, who takes part in a round, and local training."""

from typing import Annotated, Literal

from pydantic import Field

from blackthorn.settings.catalogue import ALGORITHMS
from blackthorn.settings.declaration import BY_ALGORITHM, FREE, KeyGroup, OneOf, by, unless


class Algorithm(KeyGroup):
    """The published system that runs."""

    algorithm: Annotated[str, OneOf(tuple(ALGORITHMS), own=True)] = Field(
        "gfedavg", description="Published system that runs, or one of your own."
    )
    algorithm_options: str = Field(
        "",
        description='Options that the algorithm declares, as TOML values: "low = 0.1, high = 1".',
    )


class Learning(KeyGroup):
    """Who takes part in a round, and what clients do in it."""

    # Who takes part in a round.
    participation: Literal["full", "fixed", "poisson", "rotating", "with-replacement"] = Field(
        "full",
        description="full: everybody; fixed: clients-per-round without replacement; "
        "poisson: each with probability sample-rate; rotating (with noise for privacy): one of "
        "bands groups in turn; with-replacement (samplers of a posterior): "
        "clients-per-round draws by the clients' shares of the examples.",
    )
    clients_per_round: Annotated[int, by("participation", "fixed", "with-replacement")] = Field(
        0, ge=0, description="fixed: size of the cohort; with-replacement: draws."
    )
    sample_rate: Annotated[float, by("participation", "poisson")] = Field(
        1.0, ge=1e-9, le=1, description="Probability of joining."
    )
    bands: Annotated[int, by("participation", "rotating")] = Field(
        0, ge=0, description="b: groups of clients that take turns, each in every b-th round."
    )

    # Local training.
    trainer: Annotated[str, OneOf(("",), own=True)] = Field(
        "",
        description="A function of (model, data, round) that trains a client's model; empty: "
        "local-steps of local-optimizer.",
    )
    local_optimizer: Annotated[Literal["sgd", "momentum", "adam", "adamw"], by("trainer", "")] = (
        Field(
            "sgd",
            description="Optimizer of a client's steps, anew in a round; momentum: SGD with 0.9.",
        )
    )
    num_server_rounds: Annotated[int, FREE] = Field(10, ge=1, description="Communication rounds T.")
    local_steps: int = Field(5, ge=1, description="Local steps K in a round.")
    local_lr: float = Field(0.1, gt=0, description="Local learning rate.")
    local_lr_decay: float = Field(1.0, gt=0, le=1, description="Factor on the local rate.")
    local_lr_decay_when: Annotated[
        Literal["every-round", "plateau"], unless("local-lr-decay", 1.0)
    ] = Field(
        "every-round",
        description="When the decay applies: after every round, or after a round whose gain in "
        "test accuracy is below local-lr-plateau.",
    )
    local_lr_plateau: Annotated[float, by("local-lr-decay-when", "plateau")] = Field(
        0.001, ge=0, description="Gain that counts as a plateau."
    )
    client_momentum: Annotated[float, BY_ALGORITHM] = Field(
        0.0,
        ge=0,
        lt=1,
        description="beta of the momentum that every client keeps from round to round and sends in "
        "place of its update; 0: none.",
    )
    weight_decay: float = Field(0.0, ge=0, description="L2 coefficient in the local gradient.")
