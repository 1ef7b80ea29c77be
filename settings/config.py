"""Run configuration: every key declared once, with its type, default, range and one line of help.

The Flower defaults in pyproject.toml, the table in the docs and the error messages all come from
this file (tests compare them).
"""

import difflib
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from blackthorn.settings.credentials import check_no_credentials
from blackthorn.settings.privacy_checks import PRIVATE_ALGORITHMS, check_privacy, is_noised
from blackthorn.settings.robustness_checks import check_robustness, is_robust

Scalar = bool | int | float | str
# Just below the largest float32.
_LARGEST_RATE = 3e38
# Just above the smallest float32 of full precision: the server divides by the rate.
_SMALLEST_RATE = 1.2e-38

AlgorithmName = Literal[
    "gfedavg",
    "fat-clipping-pr",
    "fat-clipping-pi",
    "ce-fedavg",
    "model-clipping",
    "dp-fedavg",
    "dp-normfedavg",
    "rage",
    "fa-ld",
]
# Beyond, epsilon's arithmetic overflows.
_MOST_NOISE = 1e12

CLIPPING_ALGORITHMS = (
    *("fat-clipping-pr", "fat-clipping-pi", "ce-fedavg", "model-clipping"),
    *PRIVATE_ALGORITHMS,
)


@dataclass(frozen=True)
class Owner:
    """Whose business a key is. One without an owner is read by the server and by the clients."""

    name: Literal["server"]


_SERVER = Owner("server")


class ConfigError(ValueError):
    """A wrong key or value in a run configuration; the message is one line for the user."""


def kebab(name: str) -> str:
    """The key of a field."""
    return name.replace("_", "-")


class RunConfig(BaseModel):
    """Everything that decides what a run computes. Keys are written in kebab-case."""

    model_config = ConfigDict(
        alias_generator=kebab,
        populate_by_name=True,
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
    )

    # What is learned.
    algorithm: AlgorithmName = Field(
        "gfedavg", description="Published system that runs on the server."
    )
    task: Literal[
        "digits",
        "mnist",
        "fashion-mnist",
        "cifar10",
        "shakespeare",
        "own-data",
        "quadratic-noise",
        "least-squares",
        "bayes-linear",
    ] = Field(
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
    data_dir: str = Field(
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

    # Posterior sampling (fa-ld).
    temperature: float = Field(1.0, ge=0, description="fa-ld: tau, 1 for the posterior itself.")
    shared_noise: float = Field(
        0.0, ge=0, le=1, description="fa-ld: rho, the part of the noise that all clients share."
    )
    prior_precision: float = Field(
        0.0, ge=0, description="fa-ld: precision of the Gaussian prior of mean 0; 0: flat."
    )
    step_size: Literal["fixed", "decaying"] = Field(
        "fixed",
        description="fa-ld: the step size is local-lr, or 1/(1/local-lr + strong-convexity k/12) "
        "at local step k (local-lr = 1/(2L), L the smoothness of the energy).",
    )
    burn_in: int = Field(0, ge=0, description="fa-ld: rounds before the first posterior sample.")
    thinning: int = Field(
        1, ge=1, description="fa-ld: rounds from one posterior sample to the next."
    )
    max_samples: Annotated[int, _SERVER] = Field(
        1000, ge=1, description="fa-ld: most posterior samples kept on disk."
    )
    keep_samples: Annotated[Literal["last", "reservoir"], _SERVER] = Field(
        "last",
        description="fa-ld: which are kept when there are more: the last, or a uniform choice.",
    )
    langevin_seed: int = Field(
        -1,
        ge=-1,
        le=2**32 - 1,
        description="fa-ld: seed of the noise, for tests; -1: the operating system's entropy.",
    )

    # The server.
    server_lr: float = Field(1.0, gt=0, description="Server learning rate.")
    server_momentum: float = Field(0.0, ge=0, lt=1, description="Server momentum.")
    projection_radius: float = Field(
        0.0, ge=0, description="Radius of the L2 ball around the initial model; 0: no projection."
    )
    weighting: Literal["uniform", "num-examples"] = Field(
        "uniform",
        description="Weights of the mean; num-examples are capped by what a client enrolled with.",
    )
    aggregator: str = Field(
        "auto",
        description="Aggregation rule: auto (the algorithm's own), mean, rage, median, "
        "trimmed-mean, krum, multi-krum, bulyan, geometric-median, centered-clipping, or your own "
        "as FILE.py:FUNCTION (see docs/extend.md). Any but auto replaces that of algorithm rage.",
    )
    pre_aggregator: Literal["none", "nearest-neighbour-mixing", "bucketing"] = Field(
        "none", description="Mixes the updates before the rule sees them."
    )
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
    clip_norm: float = Field(
        0.0,
        ge=0,
        le=1e12,
        description="Threshold of the algorithms that clip (lambda, C, c); 0: none.",
    )
    clip_units: Literal["auto", "gradient", "parameter"] = Field(
        "auto",
        description="Unit of clip-norm: of u = (w - w_i)/local-lr, or of w_i - w; auto: the "
        "algorithm's own (fat-clipping: gradient; ce-fedavg: parameter).",
    )
    output_iterate: Literal["last", "random-weighted", "uniform", "best"] = Field(
        "last", description="Which iterate the run ends with; a random one is drawn beforehand."
    )
    strong_convexity: float = Field(
        0.0,
        ge=0,
        description="mu in the weights of output-iterate = random-weighted; m of step-size = "
        "decaying.",
    )
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

    # Client-level privacy (dp-fedavg, dp-normfedavg, and ce-fedavg with noise).
    epsilon: float = Field(
        0.0, ge=0, description="Budget of the whole run; the noise is calibrated to it. 0: none."
    )
    delta: float = Field(
        1e-5,
        ge=1e-100,
        lt=1,
        description="delta of every (epsilon, delta); under a claim at most 1/num-clients.",
    )
    noise_multiplier: float = Field(
        0.0,
        ge=0,
        le=_MOST_NOISE,
        description="z: the noise of a round's sum is N(0, (z clip-norm)^2); or epsilon.",
    )
    accountant: Literal["rdp", "prv", "pld"] = Field(
        "rdp", description="Who computes epsilon; prv and pld are tighter and slower."
    )
    neighbours: Literal["auto", "add-remove", "zero-out", "replace-one"] = Field(
        "auto",
        description="Whose influence is bounded; auto: add-remove for poisson, zero-out for fixed "
        "and full.",
    )
    noise_location: Literal["server", "client"] = Field(
        "server", description="Who draws the noise; client: every invited client its share."
    )
    noise_top_up: bool = Field(
        True,
        description="noise at the clients: the server adds the share of those that failed; false "
        "claims nothing.",
    )
    max_epsilon: float = Field(
        0.0, ge=0, description="The run ends before the round that would pass it; 0: no limit."
    )
    claim_privacy: bool = Field(
        True, description="false: run what the claim would forbid, and report no figure."
    )
    clip_norm_from_data: bool = Field(
        False, description="clip-norm was read off the clients' data: the claim then says so."
    )
    insecure_seeded_noise: bool = Field(
        False, description="Cohorts and noise from the seed, for tests; drops the claim."
    )
    ledger: Annotated[str, _SERVER] = Field(
        "", description="File of the privacy ledger to continue; empty: ledger.json of the run."
    )

    # Sample-level privacy on every client.
    local_dp_sgd: bool = Field(
        False,
        description="Clients train by DP-SGD; epsilon for one of their examples is reported per "
        "client.",
    )
    dp_sgd_sample_rate: float = Field(
        0.0,
        ge=0,
        le=1,
        description="local-dp-sgd: probability with which an example is in a step's batch; the "
        "noised sum is divided by batch-size. Both fixed beforehand, never by what a client has.",
    )
    dp_sgd_noise_multiplier: float = Field(
        1.0,
        gt=0,
        le=_MOST_NOISE,
        description="local-dp-sgd: noise of a step, in multiples of dp-sgd-clip-norm.",
    )
    dp_sgd_clip_norm: float = Field(
        1.0, ge=1e-12, le=1e12, description="local-dp-sgd: longest gradient of one example."
    )

    # The adversary (simulated, or run by the Byzantine nodes of a cluster).
    attack: str = Field("none", description="What the Byzantine clients do (see docs/attacks.md).")
    num_byzantine: int = Field(0, ge=0, description="Byzantine clients in the population.")
    byzantine_set: Literal["fixed", "redrawn"] = Field(
        "fixed", description="fixed: the last ids; redrawn: a fresh set every round (simulation)."
    )
    collusion: bool = Field(True, description="Corrupt clients of a round share their updates.")
    omniscient: bool = Field(
        False, description="Simulation: the attacker also sees the honest updates."
    )

    # Running.
    seed: int = Field(0, ge=0, le=2**32 - 1, description="Seed of data split, model and sampling.")
    evaluate_every: Annotated[int, _SERVER] = Field(
        1, ge=1, description="Rounds between evaluations."
    )
    instruments: bool = Field(
        False,
        description="Measure every client's update each round (norm, angle, tail index); not "
        "private: they read each client's update.",
    )
    checkpoint_every: Annotated[int, _SERVER] = Field(
        0, ge=0, description="Rounds between checkpoints; 0: only the final model."
    )
    report: Annotated[bool, _SERVER] = Field(
        True, description="Draw the plots and write report.html when the run ends."
    )
    tensorboard: Annotated[bool, _SERVER] = Field(
        True, description="Write TensorBoard event files into the run folder."
    )
    mlflow_uri: Annotated[str, _SERVER] = Field(
        "",
        description="MLflow tracking server to log the run to (http://host:5000, or a database "
        "such as sqlite:////absolute/mlflow.db); needs MLflow. Empty: none.",
    )
    state_every: Annotated[int, _SERVER] = Field(
        -1,
        ge=-1,
        description="Rounds between states to resume from; -1: after every round, but four times "
        "a second at most; 0: none, no resume.",
    )
    resume: Annotated[str, _SERVER] = Field(
        "",
        description="Run folder of a run whose server died: it goes on there, with the same keys, "
        "after its last state.",
    )
    output_dir: Annotated[str, _SERVER] = Field(
        "", description="The run's own folder; empty: a new one under runs/ where the server runs."
    )
    round_timeout: Annotated[float, _SERVER] = Field(
        120.0, gt=0, description="Seconds until a round's replies are due."
    )
    start_timeout: Annotated[float, _SERVER] = Field(
        120.0,
        gt=0,
        description="Seconds to wait for num-clients clients before the first round, and for "
        "anybody when nobody is connected any more.",
    )
    node_authentication: Annotated[bool, _SERVER] = Field(
        False,
        description="The SuperNodes' keys are registered: a client id then stays with the key that "
        "had it first, also while that node is away.",
    )
    min_replies: Annotated[int, _SERVER] = Field(
        1, ge=0, description="Accepted replies below which a round leaves the model as it was."
    )
    below_quorum: Annotated[Literal["skip", "fail"], _SERVER] = Field(
        "skip",
        description="Rounds with fewer than min-replies: skip them, or fail after fail-after of "
        "them in a row.",
    )
    fail_after: Annotated[int, _SERVER] = Field(
        3, ge=1, description="below-quorum = fail: rounds in a row after which the run fails."
    )
    oversample: Annotated[float, _SERVER] = Field(
        1.0,
        ge=1,
        le=10,
        description="participation fixed: ceil(oversample x clients-per-round) clients are "
        "invited, and the first clients-per-round good replies end the round.",
    )

    @model_validator(mode="before")
    @classmethod
    def _check_secrets(cls, values: Any) -> Any:
        # Before any other message could show the value.
        if isinstance(values, Mapping):
            check_no_credentials(values)
        return values

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        _check_adversary(self)
        _check_participation(self)
        _check_quorum(self)
        _check_oversampling(self)
        _check_rates(self)
        _check_clipping(self)
        _check_langevin(self)
        check_privacy(self)
        if self.task == "own-data" and (not self.input_shape or self.num_classes < 2):
            raise ValueError(
                f'input-shape = "{self.input_shape}" with num-classes = {self.num_classes} is not '
                "allowed: task own-data needs a shape such as 1,28,28 and at least 2 classes"
            )
        return self


def _check_adversary(config: RunConfig) -> None:
    check_robustness(config, expected_cohort(config))
    if config.num_byzantine > config.num_clients:
        raise ValueError(
            f"num-byzantine = {config.num_byzantine} is not allowed: at most num-clients "
            f"= {config.num_clients}"
        )
    if config.num_byzantine and config.attack == "none":
        raise ValueError(
            f"num-byzantine = {config.num_byzantine} with attack = none is not allowed: "
            "say what they do (attack), or set num-byzantine = 0"
        )


def _check_langevin(config: RunConfig) -> None:
    if config.algorithm != "fa-ld":
        if config.participation == "with-replacement":
            raise ValueError(
                f"participation = with-replacement is not allowed with algorithm "
                f"{config.algorithm}: fa-ld counts a client as often as it was drawn"
            )
        return
    # Anything else would make the chain's stationary law another one than the posterior.
    for key, value, usual in (
        ("server-lr", config.server_lr, 1.0),
        ("server-momentum", config.server_momentum, 0.0),
        ("projection-radius", config.projection_radius, 0.0),
        ("weight-decay", config.weight_decay, 0.0),
        ("local-lr-decay", config.local_lr_decay, 1.0),
        ("weighting", config.weighting, "uniform"),
    ):
        if value != usual:
            raise ValueError(
                f"{key} = {value} is not allowed with algorithm fa-ld: leave it {usual}"
            )
    if config.participation == "poisson":
        raise ValueError(
            "participation = poisson is not allowed with algorithm fa-ld: full, with-replacement "
            "(scheme I) or fixed (scheme II)"
        )
    if is_robust(config):
        raise ValueError(
            f"aggregator = {config.aggregator} with pre-aggregator = {config.pre_aggregator} is "
            "not allowed with algorithm fa-ld: auto or mean, and none (a robust rule would take "
            "the noise of some clients away)"
        )
    if config.step_size == "decaying" and config.strong_convexity == 0:
        raise ValueError(
            "strong-convexity = 0.0 is not allowed with step-size = decaying: greater than 0"
        )
    if config.num_server_rounds <= config.burn_in:
        raise ValueError(
            f"burn-in = {config.burn_in} is not allowed with num-server-rounds = "
            f"{config.num_server_rounds}: less, or there is no sample"
        )
    rounds = config.num_server_rounds - config.burn_in
    if config.thinning > rounds:
        raise ValueError(
            f"thinning = {config.thinning} is not allowed with num-server-rounds = "
            f"{config.num_server_rounds} and burn-in = {config.burn_in}: at most {rounds}, or "
            "there is no sample"
        )
    for key, number in (
        ("prior-precision", config.prior_precision),
        ("temperature", config.temperature),
    ):
        if number > _LARGEST_RATE:
            raise ValueError(
                f"{key} = {number} is not allowed: at most {_LARGEST_RATE:g}, since training is "
                "in float32"
            )


def _check_rates(config: RunConfig) -> None:
    """Rates, and thresholds in either unit, are float32 numbers of full precision in any round."""
    first = last = config.local_lr
    _check_float32(f"local-lr = {first}", "the rate", first)
    set_so = f"local-lr = {first}"
    if config.local_lr_decay_when == "every-round":
        last *= config.local_lr_decay ** (config.num_server_rounds - 1)
        set_so += f" and local-lr-decay = {config.local_lr_decay}"
        _check_float32(set_so, "the last round's rate", last)
    if config.clip_norm == 0:
        return
    set_so = f"clip-norm = {config.clip_norm} with {set_so}"
    _check_float32(set_so, "the threshold", config.clip_norm)
    in_gradient = clip_units(config) == "gradient"
    for rate in (first, last):
        converted = config.clip_norm * rate if in_gradient else config.clip_norm / rate
        other = "parameter" if in_gradient else "gradient"
        _check_float32(set_so, f"at the rate {rate:g} the threshold in {other} units", converted)


def _check_float32(set_so: str, name: str, value: float) -> None:
    if not _SMALLEST_RATE <= value <= _LARGEST_RATE:
        raise ValueError(
            f"{set_so} is not allowed: {_SMALLEST_RATE:g} to {_LARGEST_RATE:g}, since training is "
            f"in float32, and {name} is {value:g}"
        )


def _check_clipping(config: RunConfig) -> None:
    if config.algorithm in CLIPPING_ALGORITHMS and config.clip_norm == 0:
        raise ValueError(
            f"clip-norm = 0.0 is not allowed with algorithm {config.algorithm}: greater than 0 "
            "(blackthorn pilot measures a usual one)"
        )
    if config.algorithm not in CLIPPING_ALGORITHMS and config.clip_norm > 0:
        raise ValueError(
            f"clip-norm = {config.clip_norm} is not allowed with algorithm {config.algorithm}, "
            f"which does not clip: {', '.join(CLIPPING_ALGORITHMS)} do"
        )
    contraction = contraction_of(config)
    if config.output_iterate == "random-weighted" and not 0 < contraction < 1:
        raise ValueError(
            f"output-iterate = random-weighted is not allowed with strong-convexity x server-lr x "
            f"local-lr x local-steps / 2 = {contraction:g}: greater than 0 and less than 1"
        )


def clip_units(config: RunConfig) -> Literal["gradient", "parameter"]:
    """The unit of clip-norm, with `auto` resolved to the algorithm's own."""
    if config.clip_units != "auto":
        return config.clip_units
    return "parameter" if config.algorithm in ("ce-fedavg", "model-clipping") else "gradient"


def contraction_of(config: RunConfig) -> float:
    """mu eta_g eta_l K / 2, which weighs the iterates of output-iterate = random-weighted."""
    steps = config.server_lr * config.local_lr * config.local_steps
    return config.strong_convexity * steps / 2


def _check_quorum(config: RunConfig) -> None:
    most = config.clients_per_round if config.participation == "fixed" else config.num_clients
    if config.min_replies > most:
        raise ValueError(
            f"min-replies = {config.min_replies} is not allowed: at most {most}, the clients that "
            "a round can have"
        )


def _check_participation(config: RunConfig) -> None:
    size = config.clients_per_round
    if config.participation == "fixed" and not 1 <= size <= config.num_clients:
        raise ValueError(
            f"clients-per-round = {size} is not allowed: participation fixed needs 1 to "
            f"num-clients = {config.num_clients}"
        )
    if config.participation == "full" and size not in (0, config.num_clients):
        raise ValueError(
            f"clients-per-round = {size} is not allowed with participation full: "
            "set participation = fixed"
        )
    if config.participation == "with-replacement" and size < 1:
        raise ValueError(
            f"clients-per-round = {size} is not allowed: participation with-replacement needs at "
            "least 1 draw"
        )
    if config.participation != "poisson" and config.sample_rate != 1.0:
        raise ValueError(
            f"sample-rate = {config.sample_rate} is not allowed with participation "
            f"{config.participation}: set participation = poisson or sample-rate = 1"
        )


def _check_oversampling(config: RunConfig) -> None:
    if config.oversample == 1:
        return
    said = f"oversample = {config.oversample} is not allowed"
    if config.participation != "fixed":
        raise ValueError(
            f"{said} with participation {config.participation}: set participation = fixed"
        )
    if invited(config) > config.num_clients:
        raise ValueError(
            f"{said}: {invited(config)} clients would be invited, at most num-clients "
            f"= {config.num_clients}"
        )
    if is_noised(config):
        raise ValueError(
            f"{said} with noise for privacy, whose cohort is drawn and not the fastest: set 1.0"
        )
    if config.algorithm == "fa-ld":
        raise ValueError(f"{said} with algorithm fa-ld, whose clients must be drawn: set 1.0")
    if config.corrupt_fraction > 0:
        raise ValueError(
            f"{said} with corrupt-fraction: clients that lie may all be among the first. "
            "Set num-corrupt to their number among the invited"
        )


def invited(config: RunConfig) -> int:
    """Clients that a round of participation fixed invites."""
    # Decimal fractions are not exact in binary: 1.1 x 10 must be 11.
    return math.ceil(round(config.oversample * config.clients_per_round, 9))


def noise_shares(config: RunConfig) -> int:
    """s, as the PrivacyPlan's: in how many shares clients draw the noise, whoever is asked."""
    return config.clients_per_round if config.participation == "fixed" else config.num_clients


def expected_cohort(config: RunConfig) -> int:
    """Clients in a round: exact for full and fixed participation, the mean for Poisson, the most
    with replacement."""
    if config.participation == "fixed":
        return config.clients_per_round
    if config.participation == "with-replacement":
        return min(config.clients_per_round, config.num_clients)
    if config.participation == "poisson":
        return round(config.sample_rate * config.num_clients)
    return config.num_clients


def config_keys() -> list[str]:
    """All keys, in kebab-case, in the order of declaration."""
    return [kebab(name) for name in RunConfig.model_fields]


def server_keys() -> list[str]:
    """Keys that are the server's business alone: no client reads them, and none is sent them."""
    return [
        kebab(name) for name, field in RunConfig.model_fields.items() if _SERVER in field.metadata
    ]


def make_config(values: Mapping[str, Any]) -> RunConfig:
    """Check kebab-case `values` and fill in the defaults.

    Raises ConfigError with one line that names the key, the value and what is allowed.
    """
    check_known(values, config_keys(), "see blackthorn keys")
    try:
        return RunConfig.model_validate(dict(values))
    except ValidationError as error:
        raise ConfigError(one_line(error)) from None


def check_known(values: Mapping[str, Any], keys: Sequence[str], where: str) -> None:
    """Raises ConfigError for the first key of `values` that is none of `keys`."""
    for key in values:
        if key not in keys:
            near = difflib.get_close_matches(key, keys, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"unknown key {key}{hint} ({where})")


def one_line(error: ValidationError) -> str:
    """The first of a validation's mistakes: key, value and what is allowed."""
    first = error.errors()[0]
    if not first["loc"]:
        return str(first["msg"]).removeprefix("Value error, ")
    message = first["msg"].removeprefix("Input ")
    return f"{first['loc'][0]} = {first['input']!r} is not allowed: {message}"


def to_mapping(config: RunConfig) -> dict[str, Scalar]:
    """The configuration as kebab-case keys and plain scalars (what Flower's run config holds)."""
    return config.model_dump(by_alias=True)


def read_recipe(path: Path) -> dict[str, Any]:
    """Values of a recipe (TOML, flat, kebab-case keys). Raises ConfigError with one line."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"recipe {path} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"recipe {path} cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"recipe {path} is not valid TOML: {error}") from None


def parse_setting(text: str) -> tuple[str, Any]:
    """Turn `key=value` from the command line into a key and a TOML value (else a string).

    The value of a key that holds text is text whatever it looks like: input-shape=64.
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {text} is not allowed: write --set key=value")
    try:
        parsed = tomllib.loads(f"value = {value.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()
    field = RunConfig.model_fields.get(key.strip().replace("-", "_"))
    if field is not None and field.annotation is str and not isinstance(parsed, str):
        parsed = value.strip()
    return key.strip(), parsed
