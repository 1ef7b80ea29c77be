"""Losses of a project of one's own, by name or its own function, and what each can be judged by."""

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional

from blackthorn.settings.own_code import guarded_function, is_own_code

# Of outputs [n, ...] and targets [n, ...]: of every entry, [n, ...], or their mean.
Loss = Callable[[Tensor, Tensor], Tensor]
# The same at all examples of a data set, on the processor.
Figures = Callable[[Tensor, Tensor], dict[str, float]]


def cross_entropy(outputs: Tensor, y: Tensor) -> Tensor:
    """Of logits [n, C, ...] against classes int64 [n, ...], each: [n, ...]."""
    return functional.cross_entropy(outputs, y, reduction="none")


def squared_error(outputs: Tensor, y: Tensor) -> Tensor:
    """(outputs − y)² [n, ...]; a last dimension of 1 may be missing in one of them.

    Raises ValueError for other shapes, which would be broadcast.
    """
    return (_shaped(outputs, y) - y).square()


def binary_cross_entropy(outputs: Tensor, y: Tensor) -> Tensor:
    """Of logits [n, ...] against labels 0 or 1 of the same shape, each: [n, ...].

    Raises ValueError as `squared_error`.
    """
    logits = _shaped(outputs, y)
    return functional.binary_cross_entropy_with_logits(logits, y.to(logits.dtype), reduction="none")


def loss_of(name: str) -> Loss:
    """The loss by its name, or FILE.py:NAME. Raises ValueError where there is no such function."""
    return guarded_function(name) if is_own_code(name) else _LOSSES[name]


def mean_of_examples(losses: Tensor, examples: int) -> Tensor:
    """What a loss gave for n `examples`, example by example: [n]."""
    return losses.expand(examples) if losses.ndim == 0 else losses.reshape(examples, -1).mean(1)


def figures_of(name: str) -> Figures:
    """What a model with that loss is judged by beside it: accuracy, the share of right answers, or
    r2, 1 − Σ(y − ŷ)² / Σ(y − ȳ)² over all targets, ȳ of each column; nothing for an own loss."""
    return _FIGURES.get(name, lambda outputs, y: {})  # noqa: ARG005


def _most_likely(outputs: Tensor, y: Tensor) -> dict[str, float]:
    return {"accuracy": float((outputs.argmax(dim=1) == y).double().mean())}


def _both_sides(outputs: Tensor, y: Tensor) -> dict[str, float]:
    return {"accuracy": float(((_shaped(outputs, y) > 0) == (y > 0.5)).double().mean())}


def _explained(outputs: Tensor, y: Tensor) -> dict[str, float]:
    targets = y.double()
    total = float((targets - targets.mean(dim=0)).square().sum())
    left = float((targets - _shaped(outputs, y).double()).square().sum())
    # Of targets that are all alike nothing can be explained.
    return {"r2": 1 - left / total} if total > 0 else {}


def _shaped(outputs: Tensor, y: Tensor) -> Tensor:
    shapes = tuple(outputs.shape), tuple(y.shape)
    short = [shape[:-1] if shape[-1:] == (1,) else shape for shape in shapes]
    if shapes[0] != shapes[1] and short[0] != short[1]:
        raise ValueError(f"the model gives {shapes[0]} for targets of shape {shapes[1]}")
    return outputs.reshape(y.shape)


_LOSSES: dict[str, Loss] = {
    "cross-entropy": cross_entropy,
    "squared-error": squared_error,
    "binary-cross-entropy": binary_cross_entropy,
}
_FIGURES: dict[str, Figures] = {
    "cross-entropy": _most_likely,
    "squared-error": _explained,
    "binary-cross-entropy": _both_sides,
}
