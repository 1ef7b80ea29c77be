"""Rounds of private averaging whose noise can be measured: clients with updates in closed form."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from memory_grid import ONE_APP_AT_A_TIME, Answer, MemoryGrid

from blackthorn.client_app.messages import read_round
from blackthorn.client_app.private_update import noised_models
from blackthorn.settings.config import make_config
from blackthorn.strategies import (
    ClipNorm,
    CohortPlan,
    PoissonParticipation,
    PrivacyPlan,
)
from blackthorn.strategies.private_averaging import PrivateAveraging

D = 30_000

Z, C, LR = 1.5, 2.0, 0.25

# The standard deviation of 30 000 normal numbers is known to 0.4 %: six times that.
WITHIN = 0.025

CLIENTS = 8


def state_of(w: np.ndarray, mark: int = 0) -> ArrayRecord:
    """Weights, BatchNorm's statistics and its integer counter."""
    return ArrayRecord(
        {
            "weight": Array(w.astype(np.float32)),
            "norm.running_mean": Array(np.full(3, 5 + 1000 * mark, dtype=np.float32)),
            "norm.num_batches_tracked": Array(np.array(40 + 10**9 * mark, dtype=np.int64)),
        }
    )


def weights(arrays: ArrayRecord) -> np.ndarray:
    return arrays["weight"].numpy().astype(np.float64)


START = np.linspace(-1, 1, D)


def replies(update: Callable[[np.ndarray], np.ndarray], noisy: bool, client: int) -> Answer:
    """A node whose gradient-unit update is `update(w)`, with its share of the noise if `noisy`.

    It attests the round's rule either way.
    """
    config = make_config(
        {
            "algorithm": "dp-fedavg",
            "clip-norm": C,
            "noise-multiplier": Z,
            "noise-location": "client",
            "num-clients": CLIENTS,
        }
    )

    def answer(message: Message) -> Message:
        request = read_round(message)
        with ONE_APP_AT_A_TIME:
            w = request.arrays["weight"].numpy().astype(np.float64)
        local = torch.from_numpy(w - request.local_lr * update(w))[None]
        if noisy:
            local = noised_models(config, torch.from_numpy(w), local, [request], [client])
        metrics = MetricRecord({"num-examples": 7, "train-loss": 123.0})
        arrays = state_of(local[0].numpy(), mark=client + 1)
        attested = request.attestation
        content = RecordDict({"arrays": arrays, "metrics": metrics, "attested": attested})
        return Message(content, reply_to=message)

    return answer


def nothing(w: np.ndarray) -> np.ndarray:
    return np.zeros_like(w)


def refuses(message: Message) -> Message:
    del message
    raise RuntimeError("this client is broken")


def grid(
    failing: int = 0,
    noisy: bool = False,
    update: Callable[[np.ndarray], np.ndarray] = nothing,
    failure: Answer = refuses,
) -> MemoryGrid:
    nodes: Mapping[int, Answer] = {
        10 + i: failure if i < failing else replies(update, noisy, i) for i in range(CLIENTS)
    }
    return MemoryGrid(nodes)


def choose(patch: pytest.MonkeyPatch, cohort: Sequence[int]) -> None:
    """From now on every plan draws `cohort`: under a claim no class of its own may."""
    patch.setattr(PrivacyPlan, "draw", lambda *_: CohortPlan.of(cohort))


def plan(**options: Any) -> PrivacyPlan:
    return PrivacyPlan(
        **{
            "clip_norm": ClipNorm(C),
            "noise_multiplier": Z,
            "num_clients": CLIENTS,
            "rounds": 5,
            "participation": PoissonParticipation(0.5),
            **options,
        }
    )


OPTIONS: dict[str, Any] = {"local_rate": LR, "statistics": "server", "start_timeout": 2.0}


def run(strategy: PrivateAveraging, rounds: int = 2) -> Any:
    """Its result after as many rounds with all clients, who leave the model as it is."""
    return strategy.start(grid(), state_of(START), num_rounds=rounds, timeout=20)


def moved(strategy: PrivateAveraging, over: MemoryGrid, rounds: int = 1) -> np.ndarray:
    """What one run added to the model, in units of the noised sum: r Δw / (η_g η_l)."""
    result = strategy.start(over, state_of(START), num_rounds=rounds, timeout=20)
    return (START - weights(result.arrays)) / LR * strategy.privacy.cohort_size


FAILING = pytest.mark.parametrize("failing", [0, 1, CLIENTS // 2])

COHORTS = pytest.mark.parametrize(
    "cohort", [range(10, 10 + CLIENTS), [10, 17], [17]], ids=["all", "two", "one"]
)


SMALL = 1e-7


def contribution(
    kind: type[PrivateAveraging], update: Callable[[np.ndarray], np.ndarray], **options: Any
) -> np.ndarray:
    """The sum of the eight clients' g_i, almost without noise."""
    strategy = kind(
        plan(
            participation=PoissonParticipation(1.0),
            noise_multiplier=SMALL,
            claim=False,
            **options,
        ),
        local_rate=LR,
        statistics="server",
    )
    return moved(strategy, grid(update=update))


def ones(w: np.ndarray) -> np.ndarray:
    return np.ones_like(w)


def faint(w: np.ndarray) -> np.ndarray:
    return np.full_like(w, 1e-3)
