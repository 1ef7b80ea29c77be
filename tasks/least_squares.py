"""Clients that hold one equation each, f_i(x) = ½(⟨a_i, x⟩ − b_i)²: problems whose stationary
points under clipping are known exactly (Zhang et al., section 2.1 and Appendix A.3)."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from blackthorn.settings.keys.problem import ProblemKeys
from blackthorn.tasks.datasets import Examples
from blackthorn.tasks.flat_model import FlatModel
from blackthorn.tasks.shards import ExampleShard
from blackthorn.tasks.task import EvaluationData, leave_alone, torch_dtype

PROBLEMS = ("table-4", "claim-2.1")


class LinearForm(nn.Module):
    """Holds x [d], and maps rows a [n, d] to ⟨a, x⟩ [n]."""

    def __init__(self, dimension: int, initial_point: float) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.full((dimension,), initial_point, dtype=torch.float64))

    def forward(self, rows: Tensor) -> Tensor:
        """⟨a, x⟩ [n] of rows a [n, d]."""
        return rows @ self.x

    def analytic_loss_and_gradient(
        self, params: Tensor, x: Tensor, y: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Losses [B] of half_squared_error, and their gradients [B, d]; see FlatModel."""
        residuals = torch.bmm(x, params[:, :, None])[:, :, 0] - y
        weighted = weights * residuals
        losses = 0.5 * torch.linalg.vecdot(weighted, residuals)
        return losses, torch.bmm(weighted[:, None], x)[:, 0]


def half_squared_error(outputs: Tensor, y: Tensor) -> Tensor:
    """½(⟨a, x⟩ − b)² [n] of outputs ⟨a, x⟩ [n] against b = ``y`` [n]."""
    return 0.5 * (outputs - y).square()


@dataclass(frozen=True, eq=False)
class LeastSquares:
    """The task; see blackthorn.tasks.task.Task. Client i holds the rows ``a[i]`` [n, d] and
    ``b[i]`` [n]."""

    a: tuple[Tensor, ...]
    b: tuple[Tensor, ...]
    initial_point: float

    name = "least-squares"
    num_classes = 0
    on_nodes = False
    server_evaluates = True
    evaluation_data: EvaluationData = "clients"

    def example_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """½(⟨a, x⟩ − b)² [n]."""
        return half_squared_error(outputs, y)

    def module(self, model: str, seed: int) -> nn.Module:
        """x_1 = initial_point · (1, ..., 1)."""
        del model, seed
        return LinearForm(self.a[0].shape[1], self.initial_point)

    def shards(self, config: ProblemKeys) -> list[ExampleShard]:
        """Client i's rows. Raises ValueError unless num-clients is what the problem has."""
        if config.num_clients != len(self.a):
            raise ValueError(
                f"num-clients is {config.num_clients}: problem {config.problem!r} has {len(self.a)}"
            )
        return [ExampleShard(Examples(a, b)) for a, b in zip(self.a, self.b, strict=True)]

    def evaluate(self, model: FlatModel, params: Tensor) -> dict[str, float]:
        """``loss``: the mean over clients of f_i(x). ``x-0``, ``x-1``, ...: the point itself, up
        to its first three coordinates."""
        losses = [
            float(self.example_loss(model.outputs(params, a), b).mean(dtype=torch.float64))
            for a, b in zip(self.a, self.b, strict=True)
        ]
        point = {f"x-{i}": float(value) for i, value in enumerate(params[:3])}
        return {"loss": sum(losses) / len(losses), **point}


def table_4(initial_point: float, dtype: torch.dtype = torch.float64) -> LeastSquares:
    """f_1 = ½(x − 4)², f_2 = ½(2x − 1)², f_3 = ½(6x + 1)²: equation 24, minimum of the sum at 0.

    Stationary points (Table 4), with Q local steps and threshold c:

                   Q = 1    Q = ∞
        no clip      0      13/9
        c = 1       1/2     2/3

    Two units hide in the last row. With Q = ∞ every client sends Δ_i = x_i* − x, and c bounds this
    difference of points: parameter units. With Q = 1 it sends Δ_i = −η_l ∇f_i(x), and 1/2 is where
    the *gradients* clipped to 1 cancel: gradient units, or parameter units with η_l = 1. With
    Δ_i clipped to 1 at a small η_l nothing is clipped near the minimum, and the answer is 0.
    """
    return _scalar_problem((1.0, 2.0, 6.0), (4.0, 1.0, -1.0), initial_point, dtype)


def claim_2_1(
    c: float, k: float, initial_point: float, dtype: torch.dtype = torch.float64
) -> LeastSquares:
    """f_i = ½(x − b_i)² with b = (−c/2, −c/2, kc), minimum of the sum at (k − 1)c/3.

    For k > 4, FedAvg with the local *models* clipped to c ends at λc/(3 − 2λ) <= c, where
    λ = (1 − η_l)^Q: never at the minimum, whatever Q and η_l (Claim 2.1).
    """
    return _scalar_problem((1.0, 1.0, 1.0), (-c / 2, -c / 2, k * c), initial_point, dtype)


def _scalar_problem(
    a: tuple[float, ...], b: tuple[float, ...], initial_point: float, dtype: torch.dtype
) -> LeastSquares:
    return LeastSquares(
        tuple(torch.tensor([[value]], dtype=dtype) for value in a),
        tuple(torch.tensor([value], dtype=dtype) for value in b),
        initial_point,
    )


def load(config: ProblemKeys) -> LeastSquares:
    """The problem that the run configuration names. Raises ValueError with one line."""
    leave_alone(config, model="auto", partition="iid", input_shape="", num_classes=0)
    dtype = torch_dtype(config)
    if config.problem == "table-4":
        return table_4(config.initial_point, dtype)
    if config.problem == "claim-2.1":
        return claim_2_1(config.problem_c, config.problem_k, config.initial_point, dtype)
    raise ValueError(f"problem is {config.problem!r}: allowed are {', '.join(PROBLEMS)}")
