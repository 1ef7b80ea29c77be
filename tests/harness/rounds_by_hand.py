"""Whole rounds over a grid in memory, and the same recursions written out in NumPy."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Error, Message
from memory_grid import (
    DIMENSION,
    Answer,
    MemoryGrid,
    initial_model,
    quadratic_app,
    runs,
    trained,
    vector_of,
)

from blackthorn import attacks
from blackthorn.strategies import (
    FederatedStrategy,
    RoundReport,
)

LONG = 60.0
# Enough for those who answer at once, on a busy machine too.
DEADLINE = 3.0
# Node ids on both sides of 2^63, as Flower draws them.
NODES = [2**63 + 11, 7, 2**64 - 5, 90, 2**40, 5000]


def honest_grid(num_clients: int = 5, **options: Any) -> MemoryGrid:
    """Client i on node NODES[i]; plain Flower apps."""
    nodes = {NODES[i]: runs(quadratic_app(i)) for i in range(num_clients)}
    return MemoryGrid(nodes, **options)


def by_hand(
    cohorts: Sequence[Sequence[int]],
    *,
    local_lrs: Sequence[float] | None = None,
    server_lr: float = 1.0,
    momentum: float = 0.0,
    radius: float = math.inf,
    weights: Mapping[int, float] | None = None,
) -> list[np.ndarray]:
    """w after every round, float64: u_i, the mean, the momentum, the step, the ball."""
    w = first = np.arange(DIMENSION) / 4
    v = np.zeros(DIMENSION)
    models = []
    for cohort, lr in zip(cohorts, local_lrs or [1.0] * len(cohorts), strict=True):
        weight = dict.fromkeys(cohort, 1.0) if weights is None else weights
        total = sum(weight[i] for i in cohort)
        mean = np.zeros(DIMENSION)
        for i in cohort:
            mean += weight[i] / total * (w - trained(w, i)) / lr
        v = momentum * v + mean
        w = w - server_lr * lr * v
        distance = np.linalg.norm(w - first)
        if distance > radius:
            w = first + radius / distance * (w - first)
        models.append(w)
    return models


class Diary:
    """An observer that keeps every report."""

    def __init__(self) -> None:
        self.reports: list[RoundReport] = []

    def __call__(self, report: RoundReport) -> None:
        self.reports.append(report)


def close(found: ArrayRecord | torch.Tensor, expected: np.ndarray) -> None:
    vector = vector_of(found) if isinstance(found, ArrayRecord) else found.double().numpy()
    np.testing.assert_allclose(vector, expected, rtol=2e-5, atol=2e-5)


def run(
    strategy: FederatedStrategy, grid: MemoryGrid, rounds: int = 3, timeout: float = LONG
) -> ArrayRecord:
    return strategy.start(grid, initial_model(), num_rounds=rounds, timeout=timeout).arrays


def outlier(client: int, factor: float = -50.0) -> Answer:
    """Client i, whose update is multiplied by `factor`."""
    honest = runs(quadratic_app(client))

    def answer(message: Message) -> Message | None:
        reply = honest(message)
        if reply is None or message.metadata.message_type != "train":
            return reply
        received = message.content.array_records["arrays"]
        local = reply.content.array_records["arrays"]
        for name in ("weight", "bias"):
            w, w_i = received[name].numpy(), local[name].numpy()
            local[name] = Array(w + np.float32(factor) * (w_i - w))
        return reply

    return answer


def attacker(name: str) -> Answer:
    """Client 5, which trains honestly and answers with an attack of `misbehaviour`."""
    honest = runs(quadratic_app(5))
    attack: Any = attacks.get(name)

    def answer(message: Message) -> Message | None:
        reply = honest(message)
        if message.metadata.message_type != "train":
            return reply
        if attack.absence == "silence":
            return None
        try:
            return attack(reply)
        except RuntimeError as error:
            return Message(Error(2, str(error)), reply_to=message)

    return answer
