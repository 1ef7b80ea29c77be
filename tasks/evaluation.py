"""How well a model does on labelled examples."""

import torch
from torch import Tensor

from blackthorn.tasks.datasets import Examples
from blackthorn.tasks.flat_model import FlatModel


def evaluate(
    model: FlatModel, params: Tensor, examples: Examples, batch_size: int = 4096
) -> dict[str, float]:
    """Mean loss and share of right labels at w = ``params`` [d] over all the examples.

    The largest of outputs [n, C] is the answer. Memory is that of one batch; sums are float64.

    Raises ValueError where there are no examples.
    """
    if len(examples) == 0:
        raise ValueError("there are 0 examples to evaluate on: at least 1 is needed")
    correct, loss = 0, 0.0
    with torch.no_grad():
        for x, y in zip(examples.x.split(batch_size), examples.y.split(batch_size), strict=True):
            outputs = model.outputs(params, x)
            correct += int((outputs.argmax(dim=1) == y).sum())
            loss += float(model.example_loss(outputs, y).sum(dtype=torch.float64))
    return {"accuracy": correct / len(examples), "loss": loss / len(examples)}
