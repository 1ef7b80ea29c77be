"""What the engine and its peers are timed on: the same clients, models and local steps."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from blackthorn.tasks.datasets import Examples, load_dataset
from blackthorn.tasks.models import build_model

DATASET = "fashion-mnist"


@dataclass(frozen=True)
class Workload:
    """`per_round` of `clients` with `examples` of Fashion-MNIST each take `steps` local steps of
    SGD on batches of `batch` examples (0: on all)."""

    name: str
    model: str
    clients: int
    examples: int
    per_round: int
    steps: int
    batch: int
    learning_rate: float


WORKLOADS = {
    "logistic": Workload("logistic", "logistic", 3000, 20, 600, 20, 0, 0.032),
    "growth": Workload("growth", "logistic", 300, 20, 300, 20, 0, 0.032),
    "cnn": Workload("cnn", "cnn", 100, 600, 20, 20, 32, 0.05),
}


def module(workload: Workload) -> nn.Module:
    """The initial model."""
    return build_model(workload.model, (1, 28, 28), 10, 0)


def client_examples(workload: Workload) -> list[Examples]:
    """Every client's examples, drawn without overlap."""
    train = load_dataset(DATASET).train
    order = np.random.default_rng(0).permutation(len(train))
    parts = order[: workload.clients * workload.examples].reshape(workload.clients, -1)
    return [train.select(part) for part in parts]


def local_batch(
    own: Examples, workload: Workload, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """The batch of one local step."""
    if workload.batch == 0:
        return own.x, own.y
    rows = torch.randperm(len(own), generator=generator)[: workload.batch]
    return own.x[rows], own.y[rows]
