"""f(x, ξ) = ½‖x‖² + ⟨ξ, x⟩ with noise ξ of any tail: FAT-Clipping's synthetic problem."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from blackthorn.settings.keys.problem import ProblemKeys
from blackthorn.tasks.flat_model import FlatModel
from blackthorn.tasks.noise_laws import NoiseLaw
from blackthorn.tasks.shards import ENDLESS
from blackthorn.tasks.task import EvaluationData, leave_alone, torch_dtype


class NoisyQuadratic(nn.Module):
    """Holds x [d], and maps noise ξ [n, d] to the losses f(x, ξ) [n] themselves."""

    def __init__(self, dimension: int, initial_point: float) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.full((dimension,), initial_point, dtype=torch.float64))

    def forward(self, noise: Tensor) -> Tensor:
        """½‖x‖² + ⟨ξ, x⟩ [n] of noise ξ [n, d]."""
        return 0.5 * self.x.square().sum() + noise @ self.x

    def analytic_loss_and_gradient(
        self, params: Tensor, x: Tensor, y: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Losses [B] and gradients x_b + Σ_j weights[b, j] ξ_bj [B, d]; see FlatModel.

        ``weights`` sum to 1 for each client.
        """
        del y
        gradients = params + torch.bmm(weights.unsqueeze(1), x).squeeze(1)
        losses = (params * torch.sub(gradients, params, alpha=0.5)).sum(dim=1)
        return losses, gradients


@dataclass(frozen=True)
class NoiseShard:
    """An endless supply of noise: every batch is drawn anew from the client's generator.

    Draws beyond the range of ``dtype`` become its largest number: a sample of a very fat tail
    stays a number.
    """

    law: NoiseLaw
    dimension: int
    dtype: torch.dtype

    num_examples = ENDLESS

    @property
    def example(self) -> tuple[Tensor, Tensor]:
        """Zeros [d] and 0; see Shard."""
        return torch.zeros(self.dimension, dtype=self.dtype), torch.zeros((), dtype=torch.int64)

    def batch(self, generator: np.random.Generator, size: int) -> tuple[Tensor, Tensor]:
        """Noise ξ [size, d], and labels that mean nothing int64 [size]; see Shard."""
        return next(iter(self.batches(generator, size, 1)))

    def batches(
        self, generator: np.random.Generator, size: int, steps: int
    ) -> Iterable[tuple[Tensor, Tensor]]:
        """``steps`` batches, drawn all at once; see Shard."""
        return ((x[0], y[0]) for x, y in self.joint_batches([generator], size, steps))

    def joint_batches(
        self, generators: Sequence[np.random.Generator], size: int, steps: int
    ) -> Iterable[tuple[Tensor, Tensor]]:
        """The batches of many clients; see blackthorn.tasks.shards.JointShard. Client by client and
        step by step, the draws would take most of a round's time."""
        shape = (steps, size, self.dimension)
        noise = np.stack([self.law.draw(generator, shape) for generator in generators], axis=1)
        largest = torch.finfo(self.dtype).max
        np.minimum(noise, largest, out=noise)
        np.maximum(noise, -largest, out=noise)
        labels = torch.zeros(len(generators), size, dtype=torch.int64)
        return ((x, labels) for x in torch.from_numpy(noise).to(self.dtype).unbind())


@dataclass(frozen=True)
class QuadraticNoise:
    """The task; see blackthorn.tasks.task.Task. All clients draw from the same law, and f's minimum
    is 0."""

    law: NoiseLaw
    dimension: int
    initial_point: float
    dtype: torch.dtype

    name = "quadratic-noise"
    num_classes = 0
    on_nodes = False
    server_evaluates = True
    evaluation_data: EvaluationData = "public"

    def example_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The module's outputs are the losses [n]."""
        del y
        return outputs

    def module(self, model: str, seed: int) -> nn.Module:
        """x_1 = initial_point · (1, ..., 1)."""
        del model, seed
        return NoisyQuadratic(self.dimension, self.initial_point)

    def shards(self, config: ProblemKeys) -> list[NoiseShard]:
        """The same law for every client."""
        shard = NoiseShard(self.law, self.dimension, self.dtype)
        return [shard] * config.num_clients

    def evaluate(self, model: FlatModel, params: Tensor) -> dict[str, float]:
        """The expected loss ½‖x‖², and ``squared-norm`` ‖x‖², at x = ``params`` [d]."""
        del model
        squared_norm = float(params.double().square().sum())
        return {"loss": squared_norm / 2, "squared-norm": squared_norm}


def load(config: ProblemKeys) -> QuadraticNoise:
    """The task that the run configuration describes. Raises ValueError with one line."""
    leave_alone(config, model="auto", partition="iid", input_shape="", num_classes=0)
    if config.batch_size == 0:
        raise ValueError(
            "batch-size is 0: task 'quadratic-noise' draws new examples without end, "
            "it must be at least 1"
        )
    return QuadraticNoise(
        NoiseLaw(config.noise_law, config.noise_alpha, config.noise_dof, config.noise_scale),
        config.problem_dimension,
        config.initial_point,
        torch_dtype(config),
    )
