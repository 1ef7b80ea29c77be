"""Krum picks the true minimiser among tiny updates of large float32 models, through a strategy."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from memory_grid import Answer, MemoryGrid

from blackthorn.strategies import CorruptionBound, GFedAvg, RobustRule, RoundReport

CLIENTS, CORRUPT = 10, 2
DIMENSION = 1_000_000
NORM = 50.0
STEP = 1e-5  # of a coordinate in a round


def scores(local_models: np.ndarray) -> np.ndarray:
    """Krum's scores from differences of the models in float64: no large part to cancel."""
    wide = local_models.astype(np.float64)
    squares = np.zeros((CLIENTS, CLIENTS))
    for i in range(CLIENTS):
        for j in range(i):
            away = wide[i] - wide[j]
            squares[i, j] = squares[j, i] = away @ away
    nearest = np.sort(squares, axis=1)[:, 1 : CLIENTS - CORRUPT - 1]  # the first is itself
    return nearest.sum(axis=1)


def float32_scores(local_models: np.ndarray) -> np.ndarray:
    """The same from norms and products of the models, in float32, as it is often written."""
    products = local_models @ local_models.T
    norms = np.diag(products)
    squares = np.sort(norms[:, None] + norms[None, :] - 2 * products, axis=1)
    return squares[:, 1 : CLIENTS - CORRUPT - 1].sum(axis=1)


def answers_with(model: np.ndarray) -> Answer:
    arrays = ArrayRecord({"w": Array(model)})

    def answer(message: Message) -> Message:
        metrics = MetricRecord({"num-examples": 10})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    return answer


def chosen_by_a_round(model: np.ndarray, local_models: np.ndarray, local_lr: float) -> list[int]:
    """Whom a round of GFedAvg under Krum keeps, from the clients' replies on."""
    reports: list[RoundReport] = []
    strategy = GFedAvg(
        aggregator=RobustRule("krum", CorruptionBound(CORRUPT)),
        num_clients=CLIENTS,
        local_rate=local_lr,
        observers=[reports.append],
    )
    grid = MemoryGrid({100 + i: answers_with(row) for i, row in enumerate(local_models)})
    arrays = ArrayRecord({"w": Array(model)})
    messages = list(strategy.configure_train(1, arrays, ConfigRecord({}), grid))
    strategy.aggregate_train(1, grid.send_and_receive(messages))
    assert reports[0].skipped is None
    return [client - 100 for client in reports[0].accepted if client not in reports[0].filtered]


def right_choices(times: int) -> tuple[int, int]:
    """How often the strategy, and the usual float32 formula, pick the true minimiser."""
    rng = np.random.default_rng(41)
    right = usual = 0
    for _ in range(times):
        model = rng.standard_normal(DIMENSION, dtype=np.float32)
        model *= np.float32(NORM / np.linalg.norm(model))
        steps = rng.standard_normal((CLIENTS, DIMENSION), dtype=np.float32)
        local_models = model - np.float32(STEP) * steps
        best = int(scores(local_models).argmin())
        right += chosen_by_a_round(model, local_models, 0.1) == [best]
        usual += int(float32_scores(local_models).argmin()) == best
    return right, usual


def test_krum_chooses_right_where_the_usual_gram_matrix_goes_astray_4_times() -> None:
    right, usual = right_choices(4)
    assert right == 4
    assert usual < 4  # a case in which the usual way goes astray


@pytest.mark.slow
def test_krum_chooses_right_200_times_of_200() -> None:
    right, usual = right_choices(200)
    assert right == 200
    assert usual < 100
