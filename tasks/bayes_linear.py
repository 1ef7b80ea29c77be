"""Bayesian linear regression over clients whose data differ: a posterior in closed form."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from blackthorn.randomness import bayes_linear_generator
from blackthorn.settings.keys.problem import ProblemKeys
from blackthorn.tasks.datasets import Examples
from blackthorn.tasks.flat_model import FlatModel
from blackthorn.tasks.least_squares import LinearForm, half_squared_error
from blackthorn.tasks.shards import ExampleShard
from blackthorn.tasks.task import EvaluationData, leave_alone, torch_dtype

USUAL_EXAMPLES = 20


@dataclass(frozen=True)
class Gaussian:
    """N(mean [d], covariance [d, d]), float64."""

    mean: Tensor
    covariance: Tensor


@dataclass(frozen=True, eq=False)
class BayesLinear:
    """y = ⟨x, θ⟩ + σε with known σ; see blackthorn.tasks.task.Task.

    Client c holds the rows ``x[c]`` [n_c, d] and ``y[c]`` [n_c], both already divided by σ, so
    that the negative log-likelihood of an example is ½(⟨x, θ⟩ − y)² but for a constant.
    """

    x: Sequence[Tensor]
    y: Sequence[Tensor]
    initial_point: float

    name = "bayes-linear"
    num_classes = 0
    on_nodes = False
    server_evaluates = True
    evaluation_data: EvaluationData = "clients"

    def example_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """½(⟨x, θ⟩ − y)² [n]."""
        return half_squared_error(outputs, y)

    def module(self, model: str, seed: int) -> nn.Module:
        """θ_1 = initial_point · (1, ..., 1)."""
        del model, seed
        return LinearForm(self.x[0].shape[1], self.initial_point)

    def shards(self, config: ProblemKeys) -> list[ExampleShard]:
        """Every client's rows."""
        del config
        return [ExampleShard(Examples(x, y)) for x, y in zip(self.x, self.y, strict=True)]

    def evaluate(self, model: FlatModel, params: Tensor) -> dict[str, float]:
        """``loss``: the mean over all examples of the negative log-likelihood."""
        outputs = model.outputs(params, torch.cat(list(self.x)))
        losses = self.example_loss(outputs, torch.cat(list(self.y)))
        return {"loss": float(losses.mean(dtype=torch.float64))}

    def posterior(self, prior_precision: float, temperature: float) -> Gaussian:
        """π(θ) ∝ exp(−f(θ)/τ), f(θ) = Σ ½(⟨x, θ⟩ − y)² + ½λ‖θ‖²:

            A = Σ x xᵀ + λI,  mean A⁻¹ Σ x y,  covariance τA⁻¹

        Raises ValueError where A is singular, so that there is no posterior.
        """
        x, y = torch.cat(list(self.x)).double(), torch.cat(list(self.y)).double()
        precision = x.T @ x + prior_precision * torch.eye(x.shape[1], dtype=torch.float64)
        factor, failed = torch.linalg.cholesky_ex(precision)
        # Rounding can leave a tiny pivot where there should be none.
        full_rank = not int(failed) and (
            prior_precision > 0 or int(torch.linalg.matrix_rank(x)) == x.shape[1]
        )
        if not full_rank:
            raise ValueError(
                f"{len(x)} examples leave directions of the {x.shape[1]} open: set prior-precision "
                "above 0"
            )
        mean = torch.cholesky_solve((x.T @ y)[:, None], factor)[:, 0]
        return Gaussian(mean, temperature * torch.cholesky_inverse(factor))


def heterogeneous_clients(
    num_clients: int,
    examples_per_client: int,
    dimension: int,
    *,
    noise_scale: float,
    heterogeneity: float,
    imbalance: float,
    seed: int,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Rows and targets of every client, divided by σ = ``noise_scale``; float64.

    Client c draws n_c rows x with independent coordinates N(0, s_cj²), s_cj = exp(h z_cj/2), and
    y = ⟨x, θ* + h z'_c⟩ + σε, where z and z' are standard normal and h is ``heterogeneity``. n_c
    rises evenly from (1 − ``imbalance``) to (1 + ``imbalance``) times ``examples_per_client``.
    Both curvature and optimum differ, or local steps would commute with averaging.
    """
    generator = bayes_linear_generator(seed)
    truth = generator.standard_normal(dimension)
    spread = np.linspace(1 - imbalance, 1 + imbalance, num_clients) if num_clients > 1 else [1.0]
    rows, targets = [], []
    for factor in spread:
        count = max(1, round(factor * examples_per_client))
        scale = np.exp(heterogeneity * generator.standard_normal(dimension) / 2)
        own_truth = truth + heterogeneity * generator.standard_normal(dimension)
        x = scale * generator.standard_normal((count, dimension))
        y = x @ own_truth + noise_scale * generator.standard_normal(count)
        rows.append(x / noise_scale)
        targets.append(y / noise_scale)
    return rows, targets


def load(config: ProblemKeys) -> BayesLinear:
    """The task that the run configuration describes. Raises ValueError with one line."""
    leave_alone(config, model="auto", partition="iid", input_shape="", num_classes=0)
    if config.noise_scale <= 0:
        raise ValueError(
            f"noise-scale is {config.noise_scale}: task 'bayes-linear' needs it above 0"
        )
    rows, targets = heterogeneous_clients(
        config.num_clients,
        config.examples_per_client or USUAL_EXAMPLES,
        config.problem_dimension,
        noise_scale=config.noise_scale,
        heterogeneity=config.heterogeneity,
        imbalance=config.imbalance,
        seed=config.seed,
    )
    dtype = torch_dtype(config)
    return BayesLinear(
        [torch.from_numpy(x).to(dtype) for x in rows],
        [torch.from_numpy(y).to(dtype) for y in targets],
        config.initial_point,
    )
