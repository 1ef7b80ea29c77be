"""Bayesian linear regression: its posterior, and that its clients differ as they are meant to."""

from typing import Any

import numpy as np
import pytest
import torch
from scipy import integrate

from blackthorn.settings.config import RunConfig, make_config
from blackthorn.tasks.bayes_linear import BayesLinear, heterogeneous_clients
from blackthorn.tasks.problem import load_problem


def configuration(**values: Any) -> RunConfig:
    given = {key.replace("_", "-"): value for key, value in values.items()}
    return make_config({"task": "bayes-linear", "dtype": "float64", "num-clients": 4, **given})


def task_of(config: RunConfig) -> BayesLinear:
    task = load_problem(config).task
    assert isinstance(task, BayesLinear)
    return task


def test_the_posterior_s_moments_are_those_of_the_integral() -> None:
    """One dimension, by quadrature of exp(−f(θ)/τ) with f written out."""
    task = task_of(configuration(problem_dimension=1, examples_per_client=3, noise_scale=2.0))
    x, y = (torch.cat(list(part)).numpy() for part in (task.x, task.y))
    prior_precision, tau = 0.8, 0.6

    def density(theta: float) -> float:
        f = 0.5 * np.sum((x[:, 0] * theta - y) ** 2) + 0.5 * prior_precision * theta**2
        return float(np.exp(-(f - shift) / tau))

    shift = 0.0
    centre = float(y @ x[:, 0] / (x[:, 0] @ x[:, 0] + prior_precision))
    shift = 0.5 * np.sum((x[:, 0] * centre - y) ** 2) + 0.5 * prior_precision * centre**2
    moments = [
        integrate.quad(lambda t, k=k: t**k * density(t), centre - 9, centre + 9, points=[centre])[0]
        for k in range(3)
    ]
    mean = moments[1] / moments[0]
    posterior = task.posterior(prior_precision, tau)
    assert float(posterior.mean[0]) == pytest.approx(mean, rel=1e-8)
    assert float(posterior.covariance[0, 0]) == pytest.approx(
        moments[2] / moments[0] - mean**2, rel=1e-6
    )


def test_the_posterior_is_where_the_energy_is_least_and_as_curved_as_its_inverse() -> None:
    task = task_of(configuration(problem_dimension=3, heterogeneity=0.7, imbalance=0.4))
    posterior = task.posterior(1.5, 2.0)
    x, y = torch.cat(list(task.x)), torch.cat(list(task.y))

    def energy(theta: torch.Tensor) -> torch.Tensor:
        return 0.5 * (x @ theta - y).square().sum() + 0.75 * theta.square().sum()

    gradient = torch.func.grad(energy)(posterior.mean)
    assert float(gradient.abs().max()) < 1e-9
    hessian = torch.func.hessian(energy)(posterior.mean)
    expected = 2.0 * torch.linalg.inv(hessian)
    torch.testing.assert_close(posterior.covariance, expected, rtol=1e-9, atol=1e-12)


def test_a_flat_prior_needs_enough_examples() -> None:
    task = task_of(configuration(problem_dimension=9, examples_per_client=2))
    with pytest.raises(ValueError, match="set prior-precision"):
        task.posterior(0.0, 1.0)
    assert task.posterior(0.1, 1.0).mean.shape == (9,)


def test_rounding_does_not_make_up_for_missing_examples() -> None:
    # Whatever the last pivot is after rounding, 0, below it or above it, there is no posterior.
    for seed in range(30):
        task = task_of(
            configuration(
                problem_dimension=3, num_clients=2, examples_per_client=1, imbalance=0.0, seed=seed
            )
        )
        with pytest.raises(ValueError, match="2 examples leave directions of the 3 open"):
            task.posterior(0.0, 1.0)


def test_imbalance_and_heterogeneity_are_as_great_as_asked() -> None:
    rows, _ = heterogeneous_clients(
        5, 2000, 2, noise_scale=1.0, heterogeneity=0.0, imbalance=0.5, seed=1
    )
    assert [len(x) for x in rows] == [1000, 1500, 2000, 2500, 3000]
    for x in rows:
        np.testing.assert_allclose(x.T @ x / len(x), np.eye(2), atol=0.2)
    rows, targets = heterogeneous_clients(
        5, 2000, 2, noise_scale=1.0, heterogeneity=1.0, imbalance=0.0, seed=1
    )
    curvatures = np.array([np.diag(x.T @ x / len(x)) for x in rows])
    optima = np.array(
        [np.linalg.lstsq(x, y, rcond=None)[0] for x, y in zip(rows, targets, strict=True)]
    )
    assert curvatures.std(axis=0).min() > 0.3
    assert optima.std(axis=0).min() > 0.3


def test_the_noise_has_its_known_deviation() -> None:
    """Divided by σ, the residuals of the truth have variance 1 whatever σ."""
    for sigma in (0.5, 3.0):
        rows, targets = heterogeneous_clients(
            1, 4000, 2, noise_scale=sigma, heterogeneity=0.0, imbalance=0.0, seed=2
        )
        fit, residual, *_ = np.linalg.lstsq(rows[0], targets[0], rcond=None)
        assert residual[0] / 4000 == pytest.approx(1.0, abs=0.1)
        # The rows are divided by σ, the coefficients are those of y = ⟨x, θ⟩ themselves.
        assert np.abs(fit).max() < 10


def test_data_depend_on_the_seed_alone() -> None:
    one, same, other = (task_of(configuration(seed=s)) for s in (3, 3, 4))
    assert torch.equal(one.x[0], same.x[0])
    assert not torch.equal(one.x[0], other.x[0])


@pytest.mark.parametrize(
    ("values", "expected"),
    [({"noise_scale": 0.0}, "needs it above 0"), ({"model": "cnn"}, "has no choice")],
)
def test_values_that_the_task_cannot_have_are_refused(
    values: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ValueError, match=expected):
        load_problem(configuration(**values))
