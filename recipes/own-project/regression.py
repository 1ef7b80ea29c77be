"""Energy use of houses by their rooms' readings: a regression with a loss, a network with BatchNorm
and dropout, a training loop and metrics of its own."""

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from blackthorn.client_app import TrainerRound

FEATURES = 12


def build() -> nn.Module:
    """Outputs [n, 1]."""
    return nn.Sequential(
        nn.Linear(FEATURES, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1)
    )


def houses(count: int, seed: int) -> TensorDataset:
    """y = 3 x_1 + 2 |x_2| − x_3 x_4 + noise, now and then far off."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, FEATURES, generator=generator)
    y = 3 * x[:, 0] + 2 * x[:, 1].abs() - x[:, 2] * x[:, 3]
    y += 0.1 * torch.randn(count, generator=generator)
    broken = torch.rand(count, generator=generator) < 0.02
    return TensorDataset(x, torch.where(broken, y + 20, y)[:, None])


def load(client_id: int) -> TensorDataset:
    """Another 200 houses a client."""
    return houses(200, client_id)


def test() -> TensorDataset:
    """The server's own."""
    return houses(1000, 2**31)


def huber(outputs: Tensor, y: Tensor) -> Tensor:
    """A loss that readings far off do not rule."""
    return nn.functional.huber_loss(outputs, y)


def train(model: nn.Module, data: TensorDataset, round: TrainerRound) -> dict[str, float]:
    """Adam, gradients of length 5 at most; the round's optimizer does what the algorithm asks."""
    model.train()
    optimizer = round.wrap(torch.optim.Adam(model.parameters(), lr=0.01))
    for x, y in round.batches(data):
        optimizer.zero_grad()
        loss = round.loss(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
    return {"train-loss": float(loss.detach())}


def evaluate(model: nn.Module, data: TensorDataset) -> dict[str, Tensor]:
    """The median error, and r2 without the readings that are far off."""
    x, y = data.tensors
    errors = (model(x) - y).abs()
    kept = errors < 10
    spread = (y[kept] - y[kept].mean()).square().sum()
    r2 = 1 - errors[kept].square().sum() / spread
    return {"loss": huber(model(x), y), "median-error": errors.median(), "r2": r2}
