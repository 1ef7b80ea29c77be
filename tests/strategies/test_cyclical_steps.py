"""Step sizes that fall by a cosine and begin anew: a whole run in closed form, and the law of the
samples, which are of the cycles' ends."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from linear_law import Data, draw_data, full, implemented_map, next_moments, stationary, w2
from mutants import mutated
from rich.console import Console
from safetensors.numpy import load_file
from scipy.linalg import solve_discrete_lyapunov

from blackthorn.launch.commands.recipes import recipe_config
from blackthorn.launch.commands.simulate import simulate
from blackthorn.recording.posterior_store import sample_rounds
from blackthorn.settings.config import ConfigError, make_config
from blackthorn.strategies import CyclicalRate, learning_rate
from blackthorn.tasks.bayes_linear import heterogeneous_clients

RECIPE = Path(__file__).parents[2] / "recipes" / "fa-ld-bayes-linear.toml"
CYCLE, TAU, FIRST = 6, 0.7, 0.004


def run(folder: Path, **options: Any) -> Path:
    values = {"step-size": "cyclical", "cycle-rounds": 3, "thinning": 3, "local-steps": 1}
    values |= {"report": False, "langevin-seed": 5, "output-dir": str(folder)}
    values |= {key.replace("_", "-"): value for key, value in options.items()}
    simulate(recipe_config(RECIPE, (), values), Console(quiet=True))
    return folder


def check_descent(folder: Path) -> None:
    """τ = 0, K = 1, five rounds of cycles of three: θ ← θ − η_t (Aθ − b) from (1, 1, 1)."""
    run(folder, temperature=0.0, num_server_rounds=5, burn_in=0, local_lr=0.002)
    x, y = heterogeneous_clients(
        5, 20, 3, noise_scale=1.0, heterogeneity=1.0, imbalance=0.6, seed=0
    )
    a = sum(one.T @ one for one in x) + np.eye(3)
    b = sum(one.T @ other for one, other in zip(x, y, strict=True))
    theta = np.ones(3)
    for phase in (0, 1 / 3, 2 / 3, 0, 1 / 3):
        theta = theta - 0.002 * (1 + math.cos(math.pi * phase)) / 2 * (a @ theta - b)
    found = load_file(folder / "checkpoints" / "final.safetensors")["x"]
    np.testing.assert_allclose(found, theta, rtol=1e-9)


def test_a_run_s_steps_are_those_of_the_cosine(tmp_path: Path) -> None:
    check_descent(tmp_path / "run")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(1 + math.cos(math.pi * phase)) / 2", "(3 - math.cos(math.pi * phase)) / 2"),
        ("(1 + math.cos(math.pi * phase)) / 2", "(1 + math.cos(math.pi * phase))"),
        ("server_round % self.cycle_rounds) /", "(server_round - 1) % self.cycle_rounds) /"),
        ("(server_round % self.cycle_rounds)", "(server_round % (self.cycle_rounds - 1))"),
    ],
)
def test_a_mutation_is_caught(old: str, new: str, tmp_path: Path) -> None:
    with mutated(learning_rate, (old, new)), pytest.raises(AssertionError):
        check_descent(tmp_path / "run")


def data() -> Data:
    return draw_data([3, 9, 18], 2, spread=0.6, precision=2.0)


def sizes() -> list[float]:
    rate = CyclicalRate(FIRST, cycle_rounds=CYCLE)
    return [rate.first, *(rate.after_round(0.0, None, t) for t in range(1, CYCLE))]


def rounds_of(steps: int) -> list[Any]:
    return [
        [implemented_map(data(), client, eta, steps, TAU, 0.5) for client in range(3)]
        for eta in sizes()
    ]


def test_at_the_cycles_ends_the_law_solves_the_discrete_lyapunov_equation() -> None:
    """K = 1: C = P C Pᵀ + Σ_t P_t 2η_tτ P_tᵀ over a cycle, P_t the product of what follows, where
    each factor is I − η_t A; solved by SciPy, and found by many rounds of our steps."""
    a, b = data().energy()
    factors = [np.eye(2) - eta * a for eta in sizes()]
    noise = np.zeros((2, 2))
    for eta, factor in zip(sizes(), factors, strict=True):
        noise = factor @ noise @ factor.T + 2 * eta * TAU * np.eye(2)
    cycle = np.linalg.multi_dot(factors[::-1])
    expected = solve_discrete_lyapunov(cycle, noise)
    mean, covariance = np.zeros(2), np.zeros((2, 2))
    steps = rounds_of(1)
    for _ in range(400):
        for maps in steps:
            mean, covariance = next_moments(maps, full(data().share), mean, covariance)
    np.testing.assert_allclose(mean, np.linalg.solve(a, b), rtol=1e-8)
    np.testing.assert_allclose(covariance, expected, rtol=1e-8)


def test_a_cycle_s_end_is_nearer_to_the_posterior_than_a_chain_of_its_first_step() -> None:
    a, b = data().energy()
    target = np.linalg.solve(a, b), TAU * np.linalg.inv(a)
    cycle = rounds_of(4)
    mean, covariance = np.zeros(2), np.zeros((2, 2))
    for _ in range(60):
        for maps in cycle:
            mean, covariance = next_moments(maps, full(data().share), mean, covariance)
    fixed = stationary(cycle[0], full(data().share))
    assert w2(mean, covariance, *target) < 0.7 * w2(*fixed, *target)


def test_samples_are_of_the_cycles_ends(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", num_server_rounds=14, burn_in=3)
    assert sample_rounds(folder) == [6, 9, 12]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"cycle-rounds": 0}, "cycle-rounds = 0 is not allowed with step-size = cyclical"),
        ({"thinning": 2}, "thinning = 2 is not allowed with cycle-rounds = 3: a multiple"),
        ({"burn-in": 4}, "burn-in = 4 is not allowed with cycle-rounds = 3: a multiple"),
    ],
)
def test_wrong_cycles_give_one_line(values: dict[str, int], expected: str) -> None:
    plain = {"algorithm": "fa-ld", "step-size": "cyclical", "cycle-rounds": 3, "thinning": 3}
    with pytest.raises(ConfigError) as caught:
        make_config({**plain, **values})
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
