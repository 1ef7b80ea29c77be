"""A client's examples as PyTorch has them: a Dataset, or a DataLoader with its own batches."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

# A Dataset or a DataLoader of pairs (input, target).
Data = Any
Batch = tuple[Tensor, Tensor]
_EVALUATED = 256


def check_data(data: Data, whose: str) -> Data:
    """The data themselves. Raises ValueError for what is no Dataset or DataLoader, or empty."""
    listed = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    if isinstance(data, Tensor | np.ndarray) or not (
        isinstance(data, DataLoader | Dataset) or listed
    ):
        raise ValueError(
            f"{whose} {type(data).__name__}: a torch Dataset or DataLoader is needed, such as "
            "TensorDataset(x, y)"
        )
    if num_examples(data, whose) == 0:
        raise ValueError(f"{whose} 0 examples: at least 1 is needed")
    return data


def num_examples(data: Data, whose: str = "the data are") -> int:
    """How many there are. Raises ValueError where they have no length."""
    examples: Any = data.dataset if isinstance(data, DataLoader) else data
    try:
        return len(examples)
    except TypeError:
        raise ValueError(f"{whose} {type(data).__name__} without a length") from None


def batches(
    data: Data, generator: np.random.Generator, size: int, steps: int, device: torch.device
) -> Iterator[Batch]:
    """`steps` batches (inputs [b, ...], targets [b, ...]) on `device`: a DataLoader's own, from the
    beginning again where it ends; of a Dataset `size` distinct examples, drawn anew for each, or
    all, in order, without a draw where there are no more or `size` is 0."""
    endless = _repeated(data) if isinstance(data, DataLoader) else _drawn(data, generator, size)
    for _ in range(steps):
        yield _on(next(endless), device)


def in_order(data: Data, device: torch.device) -> Iterable[Batch]:
    """All of them, in batches that no chance is in; a DataLoader's are its own."""
    loader = data if isinstance(data, DataLoader) else DataLoader(data, batch_size=_EVALUATED)
    return (_on(batch, device) for batch in loader)


def seed_loader(data: Data, seed: int) -> None:
    """Let a DataLoader with a generator of its own begin anew with it: else its batches would hang
    on how often somebody has gone through it in this process."""
    if isinstance(data, DataLoader) and data.generator is not None:
        data.generator.manual_seed(seed)


def _repeated(loader: DataLoader[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def _drawn(data: Data, generator: np.random.Generator, size: int) -> Iterator[Any]:
    total = len(data)
    while True:
        if 0 < size < total:
            yield _at(data, generator.choice(total, size, replace=False))
        else:
            yield _at(data, np.arange(total))


def _at(data: Data, rows: np.ndarray) -> Any:
    if type(data) is TensorDataset:
        index = torch.from_numpy(rows)
        return [tensor.index_select(0, index) for tensor in data.tensors]
    return default_collate([data[row] for row in rows.tolist()])


def _on(batch: Any, device: torch.device) -> Batch:
    if not isinstance(batch, list | tuple) or len(batch) != 2:
        raise ValueError(
            f"a batch of what data gives is {_kind(batch)}, not a pair of inputs and targets"
        )
    x, y = batch
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        raise ValueError(
            f"a batch of what data gives has inputs of kind {_kind(x)} and targets of kind "
            f"{_kind(y)}: both must be tensors, or numbers of which torch makes some"
        )
    return x.to(device), y.to(device)


def _kind(value: Any) -> str:
    return (
        f"{type(value).__name__} of {len(value)}"
        if isinstance(value, list | tuple)
        else type(value).__name__
    )
