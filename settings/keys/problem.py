"""What is learned, and who holds which examples: the keys that a task may read."""

from typing import Annotated, Literal

from pydantic import Field

from blackthorn.settings.catalogue import CLOSED_FORM, LOSSES, TASKS
from blackthorn.settings.declaration import (
    BY_ALGORITHM,
    FREE,
    OF_A_CHAIN,
    PLACE,
    KeyGroup,
    OneOf,
    by,
    unless,
)


class ProblemKeys(KeyGroup):
    """The learning problem: task, model, data, and how they are dealt. A task reads these alone."""

    task: Annotated[str, OneOf(TASKS, own=True)] = Field(
        "digits",
        description="Data set and loss; own-data: every node brings its own examples; own-project: "
        "data, model, loss and training are yours.",
    )
    model: Annotated[str, unless("task", *CLOSED_FORM)] = Field(
        "auto",
        description="auto (the task's usual model), logistic, mlp-H[-H...] (hidden sizes), cnn, "
        "alexnet or resnet-18 (with GroupNorm), or char-lstm[-H] (shakespeare).",
    )
    init_variance: Annotated[float, by("model", "auto", "mlp", "cnn", "alexnet", "resnet")] = Field(
        2.0,
        ge=0,
        le=1e6,
        description="Initial weights of mlp-H, cnn, alexnet and resnet-18 are N(0, init-variance / "
        "inputs of a unit).",
    )
    dtype: Literal["float32", "float64"] = Field(
        "float32", description="Precision of the model, of training and of the messages."
    )
    initial_model: Annotated[str, PLACE, unless("task", *CLOSED_FORM)] = Field(
        "",
        description="File with the first model's state_dict (.safetensors, .pt or .pth; of weights "
        "alone). Empty: drawn from the seed.",
    )
    input_shape: Annotated[str, by("task", "own-data", "features", "own-project")] = Field(
        "", description="Shape of one example, such as 1,28,28 or 64."
    )
    num_classes: Annotated[int, by("task", "own-data", "features", "own-project")] = Field(
        0, ge=0, description="Number of classes."
    )

    # A project of one's own.
    data: Annotated[str, OneOf(("",), own=True), by("task", "own-project")] = Field(
        "",
        description="A function that gives a client's examples by its client_id: a torch Dataset "
        "or DataLoader, or a pair of them, of which the second is held out.",
    )
    test_data: Annotated[str, OneOf(("",), own=True), by("task", "own-project")] = Field(
        "",
        description="A function that gives the server's test examples; empty: the clients "
        "evaluate, on what they hold out.",
    )
    loss: Annotated[str, OneOf(LOSSES, own=True), by("task", "own-project")] = Field(
        "cross-entropy",
        description="Loss of the model's outputs against the targets, in training and evaluation.",
    )
    evaluate: Annotated[str, OneOf(("",), own=True), by("task", "own-project")] = Field(
        "",
        description="A function of (model, data) that gives metrics by name; empty: the loss and, "
        "by the loss, accuracy or r2.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto",
        description=(
            "Where clients train, each on its own machine: auto is the GPU where PyTorch finds one "
            "(CUDA), else the processor. Batches and noise are drawn on the processor, alike."
        ),
    )
    data_dir: Annotated[
        str,
        PLACE,
        FREE,
        by("task", "mnist", "fashion-mnist", "emnist", "cifar10", "features", "shakespeare"),
    ] = Field(
        "", description="Folder of the data sets; empty: environment variable BLACKTHORN_DATA_DIR."
    )

    trusted_examples: int = Field(
        0,
        ge=0,
        description="Test examples that the server trusts and trains on, in place of "
        "trusted-data: it evaluates on the others.",
    )

    # Who holds which examples.
    partition: Annotated[
        Literal[
            "iid",
            "label-shards",
            "classes-per-client",
            "dominant-label",
            "dirichlet",
            "two-majority",
            "full",
            "natural",
        ],
        unless("task", "own-data", "own-project", *CLOSED_FORM),
    ] = Field(
        "iid",
        description="How the training examples are dealt to the clients; natural: as the data set "
        "knows its clients (shakespeare).",
    )
    shards_per_client: Annotated[int, by("partition", "label-shards")] = Field(
        5, ge=1, description="Shards a client gets."
    )
    classes_per_client: Annotated[int, by("partition", "classes-per-client")] = Field(
        2, ge=1, description="Classes a client."
    )
    dirichlet_alpha: Annotated[float, by("partition", "dirichlet")] = Field(
        0.5, gt=0, description="Concentration."
    )
    examples_per_client: Annotated[
        int, by("partition", "iid", "dominant-label", "two-majority"), by("task", "bayes-linear")
    ] = Field(
        0,
        ge=0,
        description="Examples a client; 0: the scheme's own.",
    )
    num_clients: int = Field(10, ge=1, description="Clients in the population.")

    # Problems in closed form.
    initial_point: Annotated[float, OF_A_CHAIN, by("task", *CLOSED_FORM)] = Field(
        1.0,
        description="Every coordinate of the first model.",
    )
    problem: Annotated[Literal["table-4", "claim-2.1"], by("task", "least-squares")] = Field(
        "table-4", description="Which problem of Zhang et al. the 3 clients hold."
    )
    problem_c: Annotated[float, by("problem", "claim-2.1")] = Field(
        1.0, gt=0, description="c, the unit of the b_i."
    )
    problem_k: Annotated[float, by("problem", "claim-2.1")] = Field(
        5.0, description="k, where the third b_i = k c."
    )
    problem_dimension: Annotated[int, by("task", "quadratic-noise", "bayes-linear")] = Field(
        10, ge=1, description="Dimension d."
    )
    noise_law: Annotated[
        Literal["gaussian", "cauchy", "stable", "student-t"], by("task", "quadratic-noise")
    ] = Field("gaussian", description="Law of every coordinate of the noise.")
    noise_alpha: Annotated[float, by("noise-law", "stable")] = Field(
        2.0, gt=0, le=2, description="Tail index alpha; 2 is N(0, 2), 1 is Cauchy."
    )
    noise_dof: Annotated[float, by("noise-law", "student-t")] = Field(
        1.0, gt=0, description="Degrees of freedom."
    )
    noise_scale: Annotated[float, by("task", "quadratic-noise", "bayes-linear")] = Field(
        1.0,
        ge=0,
        description="quadratic-noise: factor on the noise; bayes-linear: its known deviation.",
    )
    heterogeneity: Annotated[float, by("task", "bayes-linear")] = Field(
        0.0, ge=0, description="How far the clients' laws are from each other."
    )
    imbalance: Annotated[float, by("task", "bayes-linear")] = Field(
        0.0,
        ge=0,
        lt=1,
        description="Examples a client rise evenly from 1 - imbalance to 1 + "
        "imbalance times examples-per-client.",
    )

    # What is drawn.
    seed: int = Field(0, ge=0, le=2**32 - 1, description="Seed of data split, model and sampling.")
    chain: Annotated[int, BY_ALGORITHM, OF_A_CHAIN] = Field(
        0,
        ge=0,
        le=1024,
        description="Which chain of a posterior a run is: with the same data, cohorts, batches and "
        "first weights of its own; 0: those of the seed.",
    )
    batch_size: int = Field(32, ge=0, description="Examples a local step; 0: the full shard.")
