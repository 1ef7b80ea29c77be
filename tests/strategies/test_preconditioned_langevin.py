"""Preconditioned Langevin steps: coefficient by coefficient, the law, and what G is made of."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from linear_law import ClientMap, Data, draw_data, full, implemented_map, stationary, w2
from mutants import mutated
from rich.console import Console
from scipy.linalg import solve_discrete_lyapunov

from blackthorn.launch.commands.recipes import recipe_config
from blackthorn.launch.commands.simulate import simulate
from blackthorn.server_app.run import prepare
from blackthorn.settings.config import ConfigError
from blackthorn.strategies import (
    Langevin,
    PreconditionedLangevin,
    RoundContext,
    preconditioned_langevin,
)
from blackthorn.strategies.fed_langevin import LangevinSteps, LocalLangevin
from blackthorn.strategies.preconditioned_langevin import LocalPreconditioned, PreconditionedSteps

ETA, TAU = 0.004, 0.7
G = np.array([1.0, 4.5])
RECIPE = Path(__file__).parents[2] / "recipes" / "fa-ld-bayes-linear.toml"


def uneven_data() -> Data:
    return draw_data([3, 9, 18], 2, spread=0.6, precision=2.0)


def preconditioned(*given: Any, **options: Any) -> LocalLangevin:
    rows = torch.from_numpy(np.tile(G, (len(options["share"]), 1)))
    return LocalPreconditioned(**{**options, "langevin": given[0], "preconditioners": rows})


def read_off(data: Data, client: int, steps: int, rho: float, eta: float = ETA) -> ClientMap:
    return implemented_map(data, client, eta, steps, TAU, rho, preconditioned)


def check_steps(steps: int = 3, rho: float = 0.6) -> None:
    """θ ← θ − ηG(A_cθ − b_c) + √G √(2ητ) (ρ ξ_k + √((1 − ρ²)/w_c) ξ^c_k), K times."""
    data = uneven_data()
    for client in range(3):
        a, b = data.client_energy(client)
        one = np.eye(2) - ETA * np.diag(G) @ a
        powers = [np.linalg.matrix_power(one, j) for j in range(steps + 1)]
        noise = np.stack([p @ np.diag(np.sqrt(2 * ETA * TAU * G)) for p in powers[-2::-1]])
        found = read_off(data, client, steps, rho)
        np.testing.assert_allclose(found.matrix, powers[steps], rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(found.offset, sum(powers[:steps]) @ (ETA * G * b), rtol=1e-9)
        own = np.sqrt((1 - rho**2) / data.share[client])
        np.testing.assert_allclose(found.own, own * noise, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(found.shared, rho * noise, rtol=1e-10, atol=1e-12)


def check_law(rho: float = 0.4) -> None:
    """K = 1: C = M C Mᵀ + 2ητ G with M = I − ηGA, by SciPy, and the mean exact."""
    data = uneven_data()
    maps = [read_off(data, client, 1, rho) for client in range(3)]
    mean, covariance = stationary(maps, full(data.share))
    a, b = data.energy()
    m = np.eye(2) - ETA * np.diag(G) @ a
    np.testing.assert_allclose(mean, np.linalg.solve(a, b), rtol=1e-9)
    expected = solve_discrete_lyapunov(m, 2 * ETA * TAU * np.diag(G))
    np.testing.assert_allclose(covariance, expected, rtol=1e-9)


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("rho", [0.0, 0.6, 1.0])
def test_local_steps_are_those_of_the_equation(steps: int, rho: float) -> None:
    check_steps(steps, rho)


@pytest.mark.parametrize("rho", [0.0, 0.7, 1.0])
def test_the_covariance_solves_the_discrete_lyapunov_equation(rho: float) -> None:
    check_law(rho)


def test_as_the_step_size_falls_the_law_is_the_posterior_whatever_g() -> None:
    data = uneven_data()
    a, b = data.energy()
    distances = []
    for eta in (1e-3, 1e-4, 1e-5):
        maps = [read_off(data, client, 1, 0.5, eta) for client in range(3)]
        law = stationary(maps, full(data.share))
        distances.append(w2(*law, np.linalg.solve(a, b), TAU * np.linalg.inv(a)))
    assert distances[1] < 0.11 * distances[0]
    assert distances[2] < 0.11 * distances[1]


def learnt(**options: Any) -> tuple[PreconditionedLangevin, list[torch.Tensor]]:
    """After two rounds of the warm-up, and what two clients have sent in them [2, 3]."""
    strategy = PreconditionedLangevin(ETA, warm_up=2, num_clients=2, **options)
    strategy._shares, strategy._total = {0: 0.25, 1: 0.75}, 8
    updates = list(torch.tensor([[[4.0, 1, 0], [4, -1, 0]], [[8.0, 2, 0], [0, 2, 0]]]))
    weights = torch.tensor([0.25, 0.75], dtype=torch.float64)
    for number, rows in enumerate(updates, 1):
        context = RoundContext(number, ETA, torch.zeros(3), accepted=(0, 1))
        step = strategy.combine(rows, weights, context)
        torch.testing.assert_close(step.vector.double(), weights @ rows.double())
    return strategy, updates


def check_preconditioner() -> None:
    """V of the clients' squares, not of their mean's: coordinate 1 has the means ½ and 2."""
    strategy, _ = learnt(decay=0.5, damping=0.1)
    v = 0.5 * np.array([16.0, 1.0, 0.0]) + 0.5 * np.array([16.0, 4.0, 0.0])
    context = RoundContext(3, ETA, torch.zeros(3))
    (one, other) = strategy.draw_cohort([], context).memories.values()
    assert torch.equal(one, other)
    np.testing.assert_allclose(one, 1.1 / (np.sqrt(v / v.max()) + 0.1), rtol=1e-6)
    assert float(one[0]) == pytest.approx(1.0)
    assert float(one[2]) == pytest.approx(11.0)


def check_warm_up() -> None:
    """No noise and no G before, both after, and V stays as it is."""
    strategy, updates = learnt(langevin=Langevin(TAU))
    first, last, after = (
        strategy.local_rule(RoundContext(t, ETA, torch.zeros(3))) for t in (1, 2, 3)
    )
    assert first == last == LangevinSteps(ETA, 0.0, 0.0, 0.0)
    assert after == PreconditionedSteps(ETA, TAU, 0.0, 0.0)
    known = strategy._squares.clone()
    context = RoundContext(3, ETA, torch.zeros(3), accepted=(0, 1))
    strategy.combine(updates[0], torch.tensor([0.5, 0.5], dtype=torch.float64), context)
    assert torch.equal(strategy._squares, known)
    assert not strategy.draw_cohort([], RoundContext(2, ETA, torch.zeros(3))).memories


def test_g_is_made_of_the_mean_square_of_the_clients_updates() -> None:
    check_preconditioner()


def test_in_the_warm_up_nobody_adds_noise_and_then_g_stays() -> None:
    check_warm_up()


@pytest.mark.parametrize(
    ("old", "new", "check"),
    [
        ("params.addcmul_(root, moved)", "params.add_(moved)", check_steps),
        ("params.addcmul_(root, moved)", "params.add_(moved)", check_law),
        ("            root * of.energy", "            of.energy", check_law),
        (".to(params).sqrt()", ".to(params)", check_law),
        ("step_size(self.first_step_size", "step_size(2 * self.first_step_size", check_law),
        ("updates.double().square()", "updates.double().abs()", check_preconditioner),
        ("beta * before + (1 - beta)", "(1 - beta) * before + beta", check_preconditioner),
        (".sqrt() + delta)", " + delta)", check_preconditioner),
        ("(1 + delta) / (", "1 / (", check_preconditioner),
        ("server_round <= self", "server_round < self", check_warm_up),
        ("temperature=0.0", "temperature=1.0", check_warm_up),
    ],
)
def test_a_mutation_is_caught(old: str, new: str, check: Callable[[], None]) -> None:
    with mutated(preconditioned_langevin, (old, new)), pytest.raises(AssertionError):
        check()


def test_rounds_without_noise_are_no_samples(tmp_path: Path) -> None:
    own = {"algorithm": "psgld", "algorithm-options": "warm-up = 51"}
    config = recipe_config(RECIPE, (), {**own, "output-dir": str(tmp_path / "run")})
    with pytest.raises(ConfigError, match="burn-in = 50 is not allowed with warm-up = 51"):
        prepare(config)


def test_a_run_ends_near_the_posterior(tmp_path: Path) -> None:
    """At ρ = ½ and small steps, where what K = 2 local steps add is small beside the error."""
    values = {"algorithm": "psgld", "local-steps": 2, "num-server-rounds": 300, "report": False}
    values |= {"langevin-seed": 5, "output-dir": str(tmp_path / "run")}
    found = simulate(recipe_config(RECIPE, (), values), Console(quiet=True))["posterior"]
    # The posterior's size is √tr A⁻¹, about √(3/100).
    assert found["w2"] < 4 * np.sqrt(0.03 / found["ess_min"])
