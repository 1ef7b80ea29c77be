"""SGHMC's steps, coefficient by coefficient, and the law that they lead to, against recursions of
position and momentum that are written here."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from linear_law import ClientMap, Data, data_of, draw_data, full, implemented_map, stationary, w2
from mutants import mutated
from rich.console import Console
from scipy.linalg import solve_discrete_lyapunov

from blackthorn.launch.commands.recipes import recipe_config
from blackthorn.launch.commands.simulate import simulate
from blackthorn.settings.config import ConfigError, make_config
from blackthorn.strategies import FedSghmc, RoundContext, fed_sghmc
from blackthorn.strategies.fed_sghmc import LocalSghmc, SghmcSteps
from blackthorn.strategies.local_rule import rule_of

ETA, TAU = 0.004, 0.7
ROOT = Path(__file__).parents[2]


def uneven_data() -> Data:
    return draw_data([3, 9, 18], 2, spread=0.6, precision=2.0)


def alike_data() -> Data:
    """Clients that all hold the same examples: every one has the gradient of all."""
    one = draw_data([12], 2, spread=0.6, precision=2.0)
    return Data(one.x * 3, one.y * 3, one.prior_precision)


def read_off(data: Data, client: int, steps: int, rho: float, friction: float) -> ClientMap:
    kind = partial(LocalSghmc, friction=friction)
    return implemented_map(data, client, ETA, steps, TAU, rho, kind)


def from_the_box(
    data: Data,
    client: int,
    steps: int,
    rho: float,
    friction: float,
    eta: float = ETA,
    tau: float = TAU,
) -> ClientMap:
    """The recursion of (θ, v) [2d] in blocks, one noise vector at a time."""
    a, b = data.client_energy(client)
    d = data.dimension
    eye, zero = np.eye(d), np.zeros((d, d))
    matrix, offset = np.vstack([eye, zero]), np.zeros(2 * d)
    responses: list[np.ndarray] = []
    for step in range(steps):
        alpha = 1.0 if step == 0 else friction
        push = eta * (1 - alpha / 2)
        both = np.block([[eye - push * a, (1 - alpha) * eye], [-push * a, (1 - alpha) * eye]])
        matrix, offset = both @ matrix, both @ offset + push * np.concatenate([b, b])
        deviation = np.sqrt(eta * tau * alpha * (2 - alpha))
        responses = [both @ one for one in responses]
        responses.append(deviation * np.vstack([eye, eye]))
    noise = np.stack([one[:d] for one in responses])
    own = np.sqrt((1 - rho**2) / data.share[client])
    return ClientMap(matrix[:d], offset[:d], own * noise, rho * noise)


def check_steps(steps: int = 4, rho: float = 0.6, friction: float = 0.3) -> None:
    data = uneven_data()
    for client in range(3):
        found = read_off(data, client, steps, rho, friction)
        expected = from_the_box(data, client, steps, rho, friction)
        for part in ("matrix", "offset", "own", "shared"):
            np.testing.assert_allclose(
                getattr(found, part), getattr(expected, part), rtol=1e-9, atol=1e-12
            )


def check_law(steps: int = 6, rho: float = 0.6, friction: float = 0.3) -> None:
    """Clients alike: mean exact, covariance τ(A − ηA²/4)⁻¹, whatever K, ρ and the friction."""
    data = alike_data()
    maps = [read_off(data, client, steps, rho, friction) for client in range(3)]
    mean, covariance = stationary(maps, full(data.share))
    a, b = data.energy()
    np.testing.assert_allclose(mean, np.linalg.solve(a, b), rtol=1e-9)
    expected = TAU * np.linalg.inv(a - ETA * a @ a / 4)
    np.testing.assert_allclose(covariance, expected, rtol=1e-9)


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("rho", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("friction", [0.1, 1.0])
def test_local_steps_are_the_recursion_of_position_and_momentum(
    steps: int, rho: float, friction: float
) -> None:
    check_steps(steps, rho, friction)


@pytest.mark.parametrize("steps", [1, 2, 11])
@pytest.mark.parametrize("friction", [0.01, 0.5, 1.0])
def test_where_clients_are_alike_the_covariance_is_leapfrog_s_for_any_friction(
    steps: int, friction: float
) -> None:
    check_law(steps, 0.3, friction)


def test_the_covariance_solves_the_discrete_lyapunov_equation() -> None:
    """Clients that differ: C = M C Mᵀ + Q, solved by SciPy, M and Q from the box alone."""
    data = uneven_data()
    box = [from_the_box(data, client, 5, 0.4, 0.2) for client in range(3)]
    m = sum(p * one.matrix for p, one in zip(data.share, box, strict=True))
    common = sum(p * one.shared for p, one in zip(data.share, box, strict=True))
    q = np.einsum("kij,klj->il", common, common)
    for p, one in zip(data.share, box, strict=True):
        q = q + p**2 * np.einsum("kij,klj->il", one.own, one.own)
    maps = [read_off(data, client, 5, 0.4, 0.2) for client in range(3)]
    mean, covariance = stationary(maps, full(data.share))
    np.testing.assert_allclose(covariance, solve_discrete_lyapunov(m, q), rtol=1e-9)
    offset = sum(p * one.offset for p, one in zip(data.share, box, strict=True))
    np.testing.assert_allclose(mean, np.linalg.solve(np.eye(2) - m, offset), rtol=1e-9)


def test_one_step_is_sgld_with_half_the_step() -> None:
    data = uneven_data()
    maps = [read_off(data, client, 1, 0.4, 0.2) for client in range(3)]
    mean, covariance = stationary(maps, full(data.share))
    a, b = data.energy()
    half = ETA / 2
    np.testing.assert_allclose(mean, np.linalg.solve(a, b), rtol=1e-9)
    np.testing.assert_allclose(covariance, TAU * np.linalg.inv(a - half * a @ a / 2), rtol=1e-9)


def test_the_noise_of_a_partial_round_is_that_of_a_full_one() -> None:
    """Σ w_c²/(what the client was told) = 1, whoever is drawn how often."""
    strategy = FedSghmc(ETA, scheme="with-replacement", draws=4, num_clients=5)
    strategy._shares, strategy._total = dict(enumerate([0.1, 0.1, 0.2, 0.2, 0.4])), 100
    for server_round in range(1, 30):
        plan = strategy.draw_cohort([], RoundContext(server_round, ETA, torch.zeros(2)))
        told = {client: plan.told[client]["share"] for client in plan.clients}
        weights = {client: count / 4 for client, count in plan.counts.items()}
        assert sum(weights[c] ** 2 / told[c] for c in told) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("old", "new", "check"),
    [
        ("1.0 if step == 0 else self.friction", "self.friction", check_law),
        ("-eta * (1 - alpha / 2)", "-eta", check_law),
        ("-eta * (1 - alpha / 2)", "-eta", check_steps),
        ("alpha * (2 - alpha) / 2)", "alpha)", check_law),
        ("alpha * (2 - alpha) / 2)", "alpha * (2 - alpha))", check_steps),
        ("alpha=scale * of.shared_scale(eta)", "alpha=of.shared_scale(eta)", check_law),
        (", value=scale)", ")", check_law),
        ("alpha=1 - alpha)", "alpha=alpha)", check_law),
        ("self.velocity[client] = kick[row]", "self.velocity[clients[0]] = kick[0]", check_steps),
        ("            if step:\n", "            if step > 1:\n", check_law),
    ],
)
def test_a_mutation_is_caught(old: str, new: str, check: Callable[[], None]) -> None:
    with mutated(fed_sghmc, (old, new)), pytest.raises((AssertionError, KeyError)):
        check()


def test_the_rule_that_travels_is_read_back() -> None:
    rule = FedSghmc(ETA, friction=0.25).local_rule(RoundContext(1, ETA, torch.zeros(2)))
    assert isinstance(rule, SghmcSteps)
    assert rule.sent.numbers["friction"] == 0.25
    assert rule_of(rule.sent) == rule


@pytest.mark.parametrize("friction", ["0.0", "1.5"])
def test_a_friction_out_of_range_is_refused(friction: str) -> None:
    config = make_config({"algorithm": "sghmc", "algorithm-options": f"friction = {friction}"})
    with pytest.raises(ConfigError, match="algorithm-options: friction = "):
        FedSghmc.option_values(config)


def test_a_run_s_w2_is_that_of_its_law(tmp_path: Path) -> None:
    values: dict[str, Any] = {"num-server-rounds": 250, "langevin-seed": 5, "report": False}
    values |= {"output-dir": str(tmp_path / "run")}
    config = recipe_config(ROOT / "recipes" / "sghmc-bayes-linear.toml", (), values)
    found = simulate(config, Console(quiet=True))["posterior"]
    data = data_of(config)
    work = config.local_steps, config.shared_noise, 0.3, config.local_lr, 1.0
    maps = [from_the_box(data, client, *work) for client in range(config.num_clients)]
    mean, covariance = stationary(maps, full(data.share))
    a, b = data.energy()
    expected = w2(mean, covariance, np.linalg.solve(a, b), np.linalg.inv(a))
    # A fit to so many dependent samples is off by this much: W2 obeys the triangle inequality.
    error = 3 * np.sqrt(np.trace(covariance) / found["ess_min"])
    assert abs(found["w2"] - expected) < error
