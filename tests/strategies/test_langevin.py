"""FA-LD on quadratic energies, where its law is known exactly (identities of the algorithm)."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import langevin_checks as checks
import numpy as np
import pytest
import torch
from langevin_checks import ETA, TAU, uneven_data
from linear_law import (
    UNUSED,
    Data,
    averaged,
    draw_data,
    expected_map,
    full,
    implemented_map,
    next_moments,
    shards_of,
    stationary,
    w2,
    with_replacement,
    without_replacement,
)

from blackthorn.client_app.private_update import noise_generator
from blackthorn.client_app.training import train_clients
from blackthorn.reporting.posterior_diagnostics import gaussian_distance
from blackthorn.strategies import (
    CohortPlan,
    Langevin,
    LangevinRate,
)
from blackthorn.strategies.fed_langevin import LocalLangevin, require_balance, shares
from blackthorn.strategies.learning_rate import step_size
from blackthorn.tasks.flat_model import FlatModel
from blackthorn.tasks.least_squares import LinearForm, half_squared_error


@pytest.mark.parametrize("rho", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("steps", [1, 4])
def test_local_steps_are_those_of_the_algorithm_box(rho: float, steps: int) -> None:
    checks.check_client_map(rho, steps)


@pytest.mark.parametrize("rho", [0.0, 0.3, 0.8, 1.0])
def test_identity_1_the_averaged_noise_has_covariance_2_eta_tau(rho: float) -> None:
    data = uneven_data()
    maps = [implemented_map(data, client, ETA, 1, TAU, rho) for client in range(3)]
    _, _, noise = averaged(maps, data.share)
    np.testing.assert_allclose(noise, 2 * ETA * TAU * np.eye(2), rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("rho", [0.0, 0.6, 1.0])
def test_identity_2_one_local_step_is_sgld(rho: float) -> None:
    checks.check_stationary_law(rho)


def twin_data(clients: int) -> Data:
    """The same examples on every client."""
    one = draw_data([12], 2, spread=0.4)
    return Data(one.x * clients, one.y * clients, prior_precision=1.5)


def test_identity_3_identical_clients_depend_on_neither_k_nor_rho() -> None:
    """After 12 local steps the law is the same, in 12, 6, 4, 3, 2 rounds or one."""
    data = twin_data(4)
    laws = []
    for steps, rho in itertools.product([1, 2, 3, 4, 6, 12], [0.0, 0.5, 1.0]):
        maps = [implemented_map(data, client, ETA, steps, TAU, rho) for client in range(4)]
        mean, covariance = np.array([3.0, -1.0]), np.diag([0.2, 0.1])
        for _ in range(12 // steps):
            mean, covariance = next_moments(maps, full(data.share), mean, covariance)
        laws.append((mean, covariance))
    for mean, covariance in laws[1:]:
        np.testing.assert_allclose(mean, laws[0][0], rtol=1e-9)
        np.testing.assert_allclose(covariance, laws[0][1], rtol=1e-9, atol=1e-13)


def test_where_clients_differ_the_law_does_depend_on_k() -> None:
    """Otherwise the identity above would say nothing."""
    data = uneven_data()
    means = [
        stationary(
            [implemented_map(data, c, ETA, steps, TAU, 0.0) for c in range(3)], full(data.share)
        )[0]
        for steps in (1, 6)
    ]
    assert np.abs(means[1] - means[0]).max() > 1e-3


def test_identity_4_scheme_ii_of_everybody_is_full_participation_and_scheme_i_is_not() -> None:
    data = draw_data([10, 10, 10], 2, spread=0.6)
    maps = [implemented_map(data, client, ETA, 2, TAU, 0.5) for client in range(3)]
    everybody = stationary(maps, full(data.share))
    scheme_2 = stationary(maps, without_replacement(3, 3))
    scheme_1 = stationary(maps, with_replacement(data.share, 3))
    for found, expected in zip(scheme_2, everybody, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-10)
    # The mean is the same, the variance is not.
    assert np.trace(scheme_1[1]) > 1.2 * np.trace(everybody[1])


def tau_ratio(scheme: int, rho: float, clients: int, draws: int) -> float:
    if scheme == 2:
        return rho**2 + (1 - rho**2) * clients / draws
    return rho**2 + (1 - rho**2) * (1 + (clients - 1) / draws)


@pytest.mark.parametrize("rho", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("scheme", [1, 2])
def test_identity_6_partial_participation_raises_the_temperature(scheme: int, rho: float) -> None:
    """η → 0: W2 → (√(τ_eff/τ) − 1) √tr(τA⁻¹), and 0 at ρ = 1."""
    data = draw_data([12] * 4, 2, spread=0.3, precision=1.0)
    a, b = data.energy()
    target = np.linalg.solve(a, b), TAU * np.linalg.inv(a)
    cohorts = with_replacement(data.share, 2) if scheme == 1 else without_replacement(4, 2)
    size = math.sqrt(np.trace(target[1]))
    limit = (math.sqrt(tau_ratio(scheme, rho, 4, 2)) - 1) * size
    distances = []
    for eta in (1e-5, 1e-7):
        maps = [implemented_map(data, client, eta, 2, TAU, rho) for client in range(4)]
        distances.append(w2(*stationary(maps, cohorts), *target))
    assert distances[1] == pytest.approx(limit, abs=2e-3 * size)
    # The drift of the clients adds what vanishes with η.
    assert abs(distances[1] - limit) < abs(distances[0] - limit)


def test_w2_grows_with_k_and_heterogeneity_and_falls_with_the_step_size() -> None:
    def distance(spread: float, steps: int, eta: float) -> float:
        data = draw_data([8, 12, 20], 2, spread=spread, precision=1.0)
        a, b = data.energy()
        maps = [implemented_map(data, c, eta, steps, TAU, 0.0) for c in range(3)]
        law = stationary(maps, full(data.share))
        return w2(*law, np.linalg.solve(a, b), TAU * np.linalg.inv(a))

    by_steps = [distance(0.6, steps, 2e-3) for steps in (1, 2, 4, 8)]
    by_spread = [distance(spread, 8, 2e-3) for spread in (0.1, 0.3, 0.6)]
    by_eta = [distance(0.6, 4, eta) for eta in (4e-4, 1e-4)]
    assert by_steps == sorted(by_steps)
    assert by_spread == sorted(by_spread)
    assert by_eta[1] <= by_eta[0] / 2 * 1.001  # at least as fast as √η


def noise_generators(count: int) -> list[np.random.Generator]:
    return [np.random.Generator(np.random.Philox(key=i)) for i in range(count)]


@pytest.mark.parametrize(
    ("scheme", "rho"), [("full", 0.0), ("full", 0.6), ("with-replacement", 0.0)]
)
def test_identity_5_thousands_of_chains_have_the_law_of_the_recursion(
    scheme: str, rho: float
) -> None:
    """Means and variances of 3000 chains after 1 and 4 rounds, within sampling error."""
    data = uneven_data()
    chains, steps, rounds = 3000, 2, 4
    maps = [expected_map(data, client, ETA, steps, TAU, rho) for client in range(3)]
    cohorts = full(data.share) if scheme == "full" else with_replacement(data.share, 2)
    model = FlatModel(LinearForm(2, 0.0), half_squared_error)
    rows = [client for client in range(3) for _ in range(chains)]
    held = shards_of(data)
    shards = [held[client] for client in rows]
    generators = noise_generators(len(rows))
    draws = np.random.default_rng(8)
    theta = torch.tensor([2.0, -1.0], dtype=torch.float64).repeat(chains, 1)
    mean, covariance = theta[0].numpy(), np.zeros((2, 2))
    for server_round in range(1, rounds + 1):
        spec = LocalLangevin(
            Langevin(TAU, rho, data.prior_precision),
            steps=steps,
            batch_size=0,
            first_step_size=ETA,
            strong_convexity=0.0,
            server_round=server_round,
            total_examples=data.total,
            share=torch.from_numpy(data.share[rows]),
            shared_seeds=list(range(chains)) * 3,
            own_noise=generators,
        )
        starts = theta.repeat(3, 1)
        trained, _ = train_clients(model, starts, shards, spec, [UNUSED] * len(rows))
        theta = combine(trained.view(3, chains, 2), data.share, scheme, draws)
        mean, covariance = next_moments(maps, cohorts, mean, covariance)
        if server_round in (1, rounds):
            assert_law(theta.numpy(), mean, covariance)


def combine(
    local: torch.Tensor, share: np.ndarray, scheme: str, draws: np.random.Generator
) -> torch.Tensor:
    """The server's average of local [3, chains, d], with the strategy's weights."""
    chains = local.shape[1]
    if scheme == "full":
        weights = CohortPlan(dict(enumerate(share))).weights(range(3))
        return torch.einsum("c,cnd->nd", weights, local)
    averaged_models = []
    for chain in range(chains):
        counts = np.bincount(draws.choice(3, 2, p=share), minlength=3)
        drawn = {c: int(n) for c, n in enumerate(counts) if n}
        weights = CohortPlan(drawn).weights(drawn)
        averaged_models.append(torch.einsum("c,cd->d", weights, local[list(drawn), chain]))
    return torch.stack(averaged_models)


def assert_law(samples: np.ndarray, mean: np.ndarray, covariance: np.ndarray) -> None:
    """Within 5 standard errors (a mixture's fourth moment is within twice the Gaussian's)."""
    n = len(samples)
    error = np.sqrt(np.diag(covariance) / n)
    assert np.all(np.abs(samples.mean(axis=0) - mean) < 5 * error)
    variance = samples.var(axis=0, ddof=1)
    allowed = 5 * np.diag(covariance) * math.sqrt(2 / n) * 1.5
    assert np.all(np.abs(variance - np.diag(covariance)) < allowed)
    # The tolerance tells a variance off by a factor 2 (noise off by √2) from the right one.
    assert np.all(allowed < np.diag(covariance) / 4)


# Broken on purpose: the checks above must notice.


def short_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    own, shared = Langevin.own_scale, Langevin.shared_scale
    monkeypatch.setattr(Langevin, "own_scale", lambda *given: own(*given) / math.sqrt(2))
    monkeypatch.setattr(Langevin, "shared_scale", lambda *given: shared(*given) / math.sqrt(2))


def scaled_by_own_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """(n_c/B) Σ ∇l in place of (n/B) Σ ∇l."""
    move = LocalLangevin.move

    def wrong(
        self: LocalLangevin,
        params: torch.Tensor,
        gradients: torch.Tensor,
        step: int,
        clients: list[int],
        start: torch.Tensor,
    ) -> None:
        share = self.share[list(clients)][:, None].to(gradients.dtype)
        move(self, params, gradients * share, step, clients, start)

    monkeypatch.setattr(LocalLangevin, "move", wrong)


def share_applied_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Langevin.own_scale
    monkeypatch.setattr(
        Langevin, "own_scale", lambda self, eta, share: own(self, eta, share) / torch.sqrt(share)
    )


def shared_drawn_independently(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: LocalLangevin, params: torch.Tensor, step: int, clients: list[int]) -> Any:
        del self, step, clients
        return torch.randn(params.shape, dtype=params.dtype)

    monkeypatch.setattr(LocalLangevin, "_shared", wrong)


def multiplicity_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(plan: CohortPlan, clients: Any, examples: Any) -> torch.Tensor:
        del plan, examples
        return torch.full((len(clients),), 1 / len(clients), dtype=torch.float64)

    monkeypatch.setattr(CohortPlan, "weights", wrong)


@pytest.mark.parametrize(
    ("mutation", "check"),
    [
        (short_noise, checks.check_client_map),
        (short_noise, checks.check_stationary_law),
        (scaled_by_own_count, checks.check_client_map),
        (scaled_by_own_count, checks.check_stationary_law),
        (share_applied_twice, checks.check_client_map),
        (share_applied_twice, checks.check_stationary_law),
        (shared_drawn_independently, checks.check_shared_noise_is_shared),
        (multiplicity_ignored, checks.check_multiplicity),
    ],
)
def test_a_mutation_is_caught(
    mutation: Callable[[pytest.MonkeyPatch], None],
    check: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check()
    mutation(monkeypatch)
    with pytest.raises(AssertionError):
        check()


# The parts.


def test_decaying_step_sizes_are_those_of_theorem_5_8() -> None:
    """η_k = 1/(2L + m k/12), k = 1, 2, … over all local steps, whatever the rounds."""
    smoothness, m, steps = 40.0, 3.0, 5
    rate = LangevinRate(1 / (2 * smoothness), strong_convexity=m, local_steps=steps)
    eta, found = rate.first, []
    for _ in range(20):
        found += [step_size(eta, m, step) for step in range(steps)]
        eta = rate.after_round(eta, None)
    np.testing.assert_allclose(found, 1 / (2 * smoothness + m * np.arange(1, 101) / 12), rtol=1e-12)
    assert LangevinRate(0.1).first == 0.1
    assert LangevinRate(0.1).after_round(0.1, 0.3) == 0.1


def test_the_clients_follow_the_decay_within_a_round() -> None:
    """Without gradient and noise of variance Σ 2ητ/p: the local steps' sizes differ."""
    p, steps = 0.25, 3
    spec = LocalLangevin(
        Langevin(1.0, 0.0, 0.0),
        steps=steps,
        batch_size=0,
        first_step_size=0.1,
        strong_convexity=60.0,
        server_round=1,
        total_examples=4,
        share=torch.tensor([p], dtype=torch.float64),
        shared_seeds=[0],
        own_noise=noise_generators(1),
    )
    params = torch.zeros(1, 200_000, dtype=torch.float64)
    for step, eta in enumerate((0.1, 1 / 15, 1 / 20)):
        before = params.clone()
        spec.move(params, torch.zeros_like(params), step, [0], params)
        variance = float((params - before).var())
        assert variance == pytest.approx(2 * eta / p, rel=0.02)


def test_shares_are_of_all_examples_and_balanced_within_a_hundredth() -> None:
    assert shares({4: 1, 2: 3}) == {4: 0.25, 2: 0.75}
    require_balance(shares({0: 1000, 1: 1010}))
    with pytest.raises(ValueError, match=r"client 1 has 1\.02 times the examples of client 0"):
        require_balance(shares({0: 1000, 1: 1020}))


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": -1.0}, {"shared_fraction": 1.1}, {"prior_precision": math.inf}],
)
def test_wrong_values_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="is not allowed"):
        Langevin(**wrong)


def test_w2_of_gaussians() -> None:
    generator = np.random.default_rng(2)
    roots = generator.standard_normal((2, 3, 3))
    covariances = [root @ root.T for root in roots]
    means = generator.standard_normal((2, 3))
    found = gaussian_distance(
        *map(torch.from_numpy, (means[0], covariances[0], means[1], covariances[1]))
    )
    assert found == pytest.approx(w2(means[0], covariances[0], means[1], covariances[1]), rel=1e-9)
    # Commuting: ‖m − m'‖² + Σ (√λ − √λ')².
    one, other = torch.diag(torch.tensor([4.0, 9.0])), torch.diag(torch.tensor([1.0, 16.0]))
    shift = torch.tensor([3.0, 0.0])
    assert gaussian_distance(shift, one, 0 * shift, other) == pytest.approx(math.sqrt(9 + 1 + 1))


def test_own_noise_is_the_operating_system_s_unless_seeded() -> None:
    def draws(seed: int, server_round: int, client: int) -> tuple[float, ...]:
        generator = noise_generator(seed, server_round, client)
        return tuple(generator.standard_normal(3))

    assert draws(5, 1, 2) == draws(5, 1, 2)
    assert len({draws(5, 1, 2), draws(5, 1, 3), draws(5, 2, 2), draws(6, 1, 2)}) == 4
    assert draws(-1, 1, 2) != draws(-1, 1, 2)
