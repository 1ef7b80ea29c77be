"""Projections onto convex sets: beside a QP solver, and by the inequality that defines them."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from digits_runs import configuration, model, run
from scipy.optimize import LinearConstraint, NonlinearConstraint, minimize

from blackthorn.settings.config import ConfigError
from blackthorn.strategies import ServerStep
from blackthorn.strategies.projection import SETS, project

SIZE = 1.3


def drawn(seed: int, dimension: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """A point and a center, float64."""
    generator = np.random.default_rng(seed)
    point, center = generator.normal(0, 2, size=(2, dimension))
    return torch.from_numpy(point), torch.from_numpy(center)


def by_qp(point: np.ndarray, onto: str, center: np.ndarray) -> np.ndarray:
    """argmin ½‖x − point‖² over the set, by sequential quadratic programming."""
    offsets = {
        "ball": [NonlinearConstraint(lambda x: ((x - center) ** 2).sum(), -np.inf, SIZE**2)],
        "box": [LinearConstraint(np.eye(len(point)), center - SIZE, center + SIZE)],
        "simplex": [
            LinearConstraint(np.eye(len(point)), 0, np.inf),
            LinearConstraint(np.ones((1, len(point))), SIZE, SIZE),
        ],
    }
    start = np.full(len(point), SIZE / len(point)) if onto == "simplex" else center
    found = minimize(
        lambda x: 0.5 * ((x - point) ** 2).sum(),
        start,
        jac=lambda x: x - point,
        method="SLSQP",
        constraints=offsets[onto],
        options={"ftol": 1e-15, "maxiter": 500},
    )
    return np.asarray(found.x)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("onto", SETS)
def test_a_projection_is_the_quadratic_program_s_answer(onto: Any, seed: int) -> None:
    point, center = drawn(seed)
    found = project(point, onto, SIZE, center).numpy()
    np.testing.assert_allclose(found, by_qp(point.numpy(), onto, center.numpy()), atol=2e-6)


@pytest.mark.parametrize("onto", SETS)
def test_no_point_of_the_set_is_on_the_far_side(onto: Any) -> None:
    """⟨w − P(w), y − P(w)⟩ ≤ 0 for all y of the set, which holds of the nearest point alone."""
    generator = np.random.default_rng(7)
    for seed in range(50):
        point, center = drawn(seed, 8)
        found = project(point, onto, SIZE, center)
        inside = {
            "ball": SIZE * generator.uniform() ** 0.125,
            "box": 1.0,
            "simplex": 1.0,
        }[onto]
        for _ in range(50):
            direction = torch.from_numpy(generator.normal(size=8))
            if onto == "ball":
                y = center + inside * direction / direction.norm()
            elif onto == "box":
                y = center + SIZE * torch.from_numpy(generator.uniform(-1, 1, size=8))
            else:
                y = SIZE * torch.from_numpy(generator.dirichlet(np.full(8, 0.5)))
            assert float((point - found) @ (y - found)) <= 1e-12
        again = project(found, onto, SIZE, center)
        torch.testing.assert_close(again, found, rtol=0, atol=1e-12)


def test_a_simplex_of_few_coordinates_by_trying_every_support() -> None:
    """For a support S the answer is w_j − (Σ_S w − size)/|S|; the nearest one with no negative."""
    for seed in range(30):
        point, center = drawn(seed, 4)
        w = point.numpy()
        candidates = []
        for support in itertools.product([False, True], repeat=4):
            chosen = np.array(support)
            if chosen.any():
                x = np.where(chosen, w - (w[chosen].sum() - SIZE) / chosen.sum(), 0.0)
                if (x >= 0).all():
                    candidates.append(x)
        best = min(candidates, key=lambda x: float(((x - w) ** 2).sum()))
        np.testing.assert_allclose(
            project(point, "simplex", SIZE, center).numpy(), best, atol=1e-12
        )


@pytest.mark.parametrize("onto", SETS)
def test_a_point_of_the_set_stays_to_the_last_bit_and_one_that_is_not_finite_stays(
    onto: Any,
) -> None:
    center = torch.zeros(3)
    point = torch.tensor([0.3, 0.7, 0.3])
    assert torch.equal(project(point, onto, 1.3, center), point)
    broken = torch.tensor([float("nan"), 1.0, float("inf")])
    found = project(broken, onto, 1.3, center)
    assert torch.isnan(found[0]) and torch.isinf(found[2])


@pytest.mark.parametrize("onto", SETS)
def test_large_float32_points_are_projected_in_float64(onto: Any) -> None:
    point = torch.tensor([3e25, -4e25, 1e24])
    found = project(point, onto, 2.0, torch.zeros(3))
    expected = {
        "ball": np.array([3e25, -4e25, 1e24]) * 2 / np.linalg.norm([3e25, -4e25, 1e24]),
        "box": [2.0, -2.0, 2.0],
        "simplex": [2.0, 0.0, 0.0],
    }[onto]
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6)


def test_a_set_lies_around_the_initial_model_or_the_origin() -> None:
    initial, velocity = torch.tensor([10.0, 10.0]), torch.tensor([-3.0, 0.5])
    for center, expected in (("initial", [11.0, 9.5]), ("origin", [1.0, 1.0])):
        step = ServerStep(
            projection_radius=1.0,
            projection="box",
            projection_center=center,  # type: ignore[arg-type]
        )
        assert step.apply(initial, velocity, 1.0, initial).tolist() == expected


def test_a_run_s_models_are_on_the_simplex(tmp_path: Any) -> None:
    run(tmp_path, projection="simplex", projection_radius=2.0)
    found = model(tmp_path).astype(np.float64)
    assert (found >= 0).all()
    assert found.sum() == pytest.approx(2.0, rel=1e-5)


def test_a_set_that_is_not_known_is_refused(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match="projection"):
        configuration(tmp_path, projection="cone", projection_radius=1.0)
    with pytest.raises(ValueError, match="'cone' around 'initial' is not allowed: ball, box"):
        ServerStep(projection_radius=1.0, projection="cone")  # type: ignore[arg-type]
