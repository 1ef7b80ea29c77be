"""What must hold for FA-LD, as functions that raise AssertionError: the tests call them on our
code, and again on deliberately broken code, where they have to fail."""

from typing import Any

import numpy as np
import pytest
import torch
from linear_law import (
    Data,
    draw_data,
    expected_map,
    full,
    implemented_map,
    stationary,
)
from memory_grid import MemoryGrid, initial_model, quadratic_app, runs, trained, vector_of

from blackthorn.strategies import FedLangevin, fed_langevin
from blackthorn.strategies.fed_langevin import Langevin, LocalLangevin

ETA, TAU = 0.004, 0.7


def uneven_data() -> Data:
    return draw_data([3, 9, 18], 2, spread=0.6, precision=2.0)


def check_client_map(rho: float = 0.6, steps: int = 3) -> None:
    """Our local steps are those of the algorithm box, coefficient by coefficient."""
    data = uneven_data()
    for client in range(3):
        found = implemented_map(data, client, ETA, steps, TAU, rho)
        expected = expected_map(data, client, ETA, steps, TAU, rho)
        for part in ("matrix", "offset", "own", "shared"):
            np.testing.assert_allclose(
                getattr(found, part), getattr(expected, part), rtol=1e-10, atol=1e-12
            )


def check_stationary_law(rho: float = 0.6) -> None:
    """Identity 2: with K = 1 the chain is SGLD on f, mean A⁻¹b, covariance τ(A − ηA²/2)⁻¹."""
    data = uneven_data()
    maps = [implemented_map(data, client, ETA, 1, TAU, rho) for client in range(3)]
    a, b = data.energy()
    mean, covariance = stationary(maps, full(data.share))
    np.testing.assert_allclose(mean, np.linalg.solve(a, b), rtol=1e-9)
    expected = TAU * np.linalg.inv(a - ETA * a @ a / 2)
    np.testing.assert_allclose(covariance, expected, rtol=1e-9, atol=1e-12)


def check_shared_noise_is_shared() -> None:
    """At ρ = 1 without a gradient, clients end a round alike, wherever they are trained."""
    generators = [np.random.default_rng(i) for i in range(3)]
    ended: list[torch.Tensor] = []
    for clients in ([0, 1, 2], [1], [2, 0]):
        spec = LocalLangevin(
            Langevin(TAU, 1.0, 0.0),
            steps=2,
            batch_size=0,
            first_step_size=ETA,
            strong_convexity=0.0,
            server_round=4,
            total_examples=30,
            share=torch.tensor([0.1, 0.3, 0.6], dtype=torch.float64),
            shared_seeds=[77] * 3,
            own_noise=generators,
        )
        params = torch.zeros(len(clients), 5, dtype=torch.float64)
        for step in range(2):
            spec.move(params, torch.zeros_like(params), step, clients, torch.zeros(5))
        ended.extend(params)
    assert float(ended[0].abs().min()) > 0
    for other in ended[1:]:
        assert torch.equal(other, ended[0])


class ScriptedDraws:
    """In place of the participation's generator: hands out the next draw, keeps what was asked."""

    def __init__(self, draws: list[list[int]]) -> None:
        self._draws = iter(draws)
        self.asked: list[dict[str, Any]] = []

    def choice(self, population: int, size: int, **how: Any) -> np.ndarray:
        self.asked.append({"population": population, "size": size, **how})
        return np.array(next(self._draws))


def enrolled_grid(counts: list[int]) -> MemoryGrid:
    """Client i declares counts[i] examples, and claims a thousand million in every reply."""
    return MemoryGrid(
        {
            100 + i: runs(
                quadratic_app(
                    i,
                    num_examples=10**9,
                    enrols={"client-id": i, "num-examples": count},
                    attests=True,
                )
            )
            for i, count in enumerate(counts)
        }
    )


def check_multiplicity() -> None:
    """Scheme I: θ = (1/S) Σ over S draws by p_c; a client drawn twice counts twice."""
    draws = [[2, 0, 2, 2], [1, 1, 1, 1], [0, 2, 1, 2]]
    scripted = ScriptedDraws(draws)
    models: list[np.ndarray] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fed_langevin, "generator_of", lambda *_: scripted)
        strategy = FedLangevin(
            1.0,
            scheme="with-replacement",
            draws=4,
            num_clients=3,
            observers=[lambda report: models.append(report.model.double().numpy())],
        )
        strategy.start(enrolled_grid([10, 20, 70]), initial_model(), num_rounds=3, timeout=60.0)
    w = vector_of(initial_model())
    for model, drawn in zip(models, draws, strict=True):
        w = np.mean([trained(w, client) for client in drawn], axis=0)
        np.testing.assert_allclose(model, w, rtol=2e-5, atol=2e-5)
    for asked in scripted.asked:
        assert (asked["population"], asked["size"], asked["replace"]) == (3, 4, True)
        np.testing.assert_allclose(asked["p"], [0.1, 0.2, 0.7])
