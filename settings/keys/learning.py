"""What is learned, who holds which examples, who takes part in a round, and local training."""

from typing import Annotated, Literal

from pydantic import Field

from blackthorn.settings.catalogue import ALGORITHMS, TASKS
from blackthorn.settings.declaration import PLACE, KeyGroup, OneOf


class Learning(KeyGroup):
    """What the clients learn, and how."""

    # What is learned.
    algorithm: Annotated[str, OneOf(tuple(ALGORITHMS), own=True)] = Field(
        "gfedavg", description="Published system that runs, or one of your own."
    )
    algorithm_options: str = Field(
        "",
        description='Options that the algorithm declares, as TOML values: "low = 0.1, high = 1".',
    )
    task: Annotated[str, OneOf(TASKS, own=True)] = Field(
        "digits", description="Data set and loss; own-data: every node brings its own examples."
    )
    model: str = Field(
        "auto",
        description="auto (the task's usual model), logistic, mlp-H[-H...] (hidden sizes), cnn, or "
        "char-lstm[-H] (shakespeare).",
    )
    init_variance: float = Field(
        2.0,
        ge=0,
        le=1e6,
        description="Initial weights of mlp-H and cnn are N(0, init-variance / inputs of a unit).",
    )
    dtype: Literal["float32", "float64"] = Field(
        "float32", description="Precision of the model, of training and of the messages."
    )
    input_shape: str = Field(
        "", description="own-data only: shape of one example, such as 1,28,28 or 64."
    )
    num_classes: int = Field(0, ge=0, description="own-data only: number of classes.")
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto",
        description=(
            "Where clients train, each on its own machine: auto is the GPU where PyTorch finds one "
            "(CUDA), else the processor. Batches and noise are drawn on the processor, alike."
        ),
    )
    data_dir: Annotated[str, PLACE] = Field(
        "", description="Folder of the data sets; empty: environment variable BLACKTHORN_DATA_DIR."
    )

    # Who holds which examples.
    partition: Literal[
        "iid",
        "label-shards",
        "classes-per-client",
        "dominant-label",
        "dirichlet",
        "two-majority",
        "full",
        "natural",
    ] = Field(
        "iid",
        description="How the training examples are dealt to the clients; natural: as the data set "
        "knows its clients (shakespeare).",
    )
    shards_per_client: int = Field(5, ge=1, description="label-shards: shards a client gets.")
    classes_per_client: int = Field(2, ge=1, description="classes-per-client: classes a client.")
    dirichlet_alpha: float = Field(0.5, gt=0, description="dirichlet: concentration.")
    examples_per_client: int = Field(
        0,
        ge=0,
        description="dominant-label, two-majority, bayes-linear: examples a client; 0: the "
        "scheme's own.",
    )
    num_clients: int = Field(10, ge=1, description="Clients in the population.")

    # Problems in closed form.
    initial_point: float = Field(
        1.0,
        description="quadratic-noise, least-squares, bayes-linear: every coordinate of the first "
        "model.",
    )
    problem: Literal["table-4", "claim-2.1"] = Field(
        "table-4", description="least-squares: which problem of Zhang et al. the 3 clients hold."
    )
    problem_c: float = Field(1.0, gt=0, description="claim-2.1: c, the unit of the b_i.")
    problem_k: float = Field(5.0, description="claim-2.1: k, where the third b_i = k c.")
    problem_dimension: int = Field(
        10, ge=1, description="quadratic-noise, bayes-linear: dimension d."
    )
    noise_law: Literal["gaussian", "cauchy", "stable", "student-t"] = Field(
        "gaussian", description="quadratic-noise: law of every coordinate of the noise."
    )
    noise_alpha: float = Field(
        2.0, gt=0, le=2, description="stable: tail index alpha; 2 is N(0, 2), 1 is Cauchy."
    )
    noise_dof: float = Field(1.0, gt=0, description="student-t: degrees of freedom.")
    noise_scale: float = Field(
        1.0,
        ge=0,
        description="quadratic-noise: factor on the noise; bayes-linear: its known deviation.",
    )
    heterogeneity: float = Field(
        0.0, ge=0, description="bayes-linear: how far the clients' laws are from each other."
    )
    imbalance: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="bayes-linear: examples a client rise evenly from 1 - imbalance to 1 + "
        "imbalance times examples-per-client.",
    )

    # Who takes part in a round.
    participation: Literal["full", "fixed", "poisson", "with-replacement"] = Field(
        "full",
        description="full: everybody; fixed: clients-per-round without replacement; "
        "poisson: each with probability sample-rate; with-replacement (fa-ld): clients-per-round "
        "draws by the clients' shares of the examples.",
    )
    clients_per_round: int = Field(
        0, ge=0, description="fixed: size of the cohort; with-replacement: draws."
    )
    sample_rate: float = Field(1.0, ge=1e-9, le=1, description="poisson: probability of joining.")

    # Local training.
    num_server_rounds: int = Field(10, ge=1, description="Communication rounds T.")
    local_steps: int = Field(5, ge=1, description="Local steps K in a round.")
    batch_size: int = Field(32, ge=0, description="Examples a local step; 0: the full shard.")
    local_lr: float = Field(0.1, gt=0, description="Local learning rate.")
    local_lr_decay: float = Field(1.0, gt=0, le=1, description="Factor on the local rate.")
    local_lr_decay_when: Literal["every-round", "plateau"] = Field(
        "every-round",
        description="When the decay applies: after every round, or after a round whose gain in "
        "test accuracy is below local-lr-plateau.",
    )
    local_lr_plateau: float = Field(0.001, ge=0, description="Gain that counts as a plateau.")
    weight_decay: float = Field(0.0, ge=0, description="L2 coefficient in the local gradient.")
