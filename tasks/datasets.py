"""The data sets that are learned: loaded once a process, never downloaded."""

import json
import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blackthorn.installation import needing

DATA_DIR_VARIABLE = "BLACKTHORN_DATA_DIR"
TORCHVISION_NAMES = {
    "mnist": "MNIST",
    "fashion-mnist": "FashionMNIST",
    "emnist": "EMNIST",
    "cifar10": "CIFAR10",
}
# What else a data set's class is told: of EMNIST its digits, 240 000 for training.
_ARGUMENTS = {"emnist": {"split": "digits"}}
DATASET_NAMES = ("digits", *TORCHVISION_NAMES)
# What an example is, and its label, is known before a data set is loaded.
INPUT_SHAPES = {
    "digits": (1, 8, 8),
    "mnist": (1, 28, 28),
    "fashion-mnist": (1, 28, 28),
    "emnist": (1, 28, 28),
    "cifar10": (3, 32, 32),
}
NUM_CLASSES = 10


class DataUnavailable(ValueError):
    """A data set is absent or damaged; the message says in one line how to get it."""


@dataclass(frozen=True, eq=False)
class Examples:
    """Inputs x [n, *input_shape] and labels y int64 [n]; pixels are float32 in [0, 1].

    The tensors of a data set are shared by all who load it: never write to them.
    """

    x: Tensor
    y: Tensor

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise ValueError(f"x has {len(self.x)} examples and y has {len(self.y)}")

    def __len__(self) -> int:
        return len(self.y)

    def select(self, indices: np.ndarray | Tensor) -> "Examples":
        """A copy of the examples at ``indices`` (int64), in that order."""
        index = torch.as_tensor(indices)
        return Examples(self.x.index_select(0, index), self.y.index_select(0, index))


@dataclass(frozen=True, eq=False)
class Dataset:
    """A labelled data set with its own split into training and test examples."""

    name: str
    train: Examples
    test: Examples
    input_shape: tuple[int, ...]
    num_classes: int


def load_dataset(name: str, data_dir: str = "") -> Dataset:
    """Load ``digits``, ``mnist``, ``fashion-mnist``, ``emnist`` (its digits, transposed as in its
    files) or ``cifar10`` without touching the network.

    ``data_dir`` is the folder that torchvision calls root; "" falls back to the environment
    variable BLACKTHORN_DATA_DIR. ``digits`` needs no folder. A second call for the same data
    returns the same object.

    Raises DataUnavailable where the files are absent or damaged, ValueError for another name.
    """
    if name not in DATASET_NAMES:
        raise ValueError(f"data set {name!r} is unknown: allowed are {', '.join(DATASET_NAMES)}")
    if name == "digits":
        return _load_digits()
    folder = data_dir or os.environ.get(DATA_DIR_VARIABLE, "")
    if not folder:
        raise _unavailable(name, "DATA_DIR", "no data folder is named")
    return _load_torchvision(name, str(Path(folder).expanduser().absolute()))


@cache
def _load_digits() -> Dataset:
    # Imported here: in a deployment a process starts for every message, and neither this nor
    # torchvision should cost it a second when its data come from elsewhere.
    with needing("app", "task = digits"):
        from sklearn.datasets import load_digits

    bunch = load_digits()
    x = torch.as_tensor(bunch.images, dtype=torch.float32).div(16).unsqueeze(1)
    y = torch.as_tensor(bunch.target, dtype=torch.int64)
    examples, is_test = Examples(x, y), _every_fifth_of_each_class(np.asarray(bunch.target))
    train, test = np.flatnonzero(~is_test), np.flatnonzero(is_test)
    parts = examples.select(train), examples.select(test)
    return Dataset("digits", *parts, INPUT_SHAPES["digits"], NUM_CLASSES)


def _every_fifth_of_each_class(labels: np.ndarray) -> np.ndarray:
    """A stratified test mask that depends on nothing but the labels: bool [n].

    Drawing it at random would tie the split of every node to one version of a generator.
    """
    is_test = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        is_test[np.flatnonzero(labels == label)[2::5]] = True
    return is_test


@cache
def _load_torchvision(name: str, folder: str) -> Dataset:
    with needing("app", f"task = {name}"):
        from torchvision import datasets

    dataset_class: Callable[..., Any] = getattr(datasets, TORCHVISION_NAMES[name])
    arguments = _ARGUMENTS.get(name, {})
    try:
        train, test = (
            _examples_of(dataset_class(folder, train=is_train, download=False, **arguments))
            for is_train in (True, False)
        )
    # The readers meet a damaged file with an assertion, a KeyError, a failed reshape, ...
    except Exception as error:
        first_line = (str(error) or type(error).__name__).splitlines()[0]
        raise _unavailable(name, folder, first_line) from error
    return Dataset(name, train, test, INPUT_SHAPES[name], NUM_CLASSES)


def _examples_of(raw: Any) -> Examples:
    """The examples of a torchvision data set, checked: torchvision verifies CIFAR's checksums,
    but of MNIST's files only that they exist."""
    pixels, labels = torch.as_tensor(raw.data), torch.as_tensor(raw.targets, dtype=torch.int64)
    colour = pixels.ndim == 4
    shape, allowed = tuple(pixels.shape[1:]), (32, 32, 3) if colour else (28, 28)
    if len(pixels) == 0 or len(pixels) != len(labels) or shape != allowed:
        raise ValueError(f"{len(pixels)} images of {shape} and {len(labels)} labels in its files")
    if int(labels.min()) < 0 or int(labels.max()) > 9:
        raise ValueError(f"labels from {int(labels.min())} to {int(labels.max())} in its files")
    channels_first = pixels.permute(0, 3, 1, 2) if colour else pixels.unsqueeze(1)
    return Examples(channels_first.to(torch.float32).contiguous().div_(255), labels)


def _unavailable(name: str, folder: str, reason: str) -> DataUnavailable:
    more = "".join(f", {key}='{value}'" for key, value in _ARGUMENTS.get(name, {}).items())
    code = (
        f"import torchvision; torchvision.datasets.{TORCHVISION_NAMES[name]}"
        f"({json.dumps(folder)}{more}, download=True)"
    )
    return DataUnavailable(
        f"data set {name!r} is not to be had from {folder!r} ({reason}): "
        f"download it with  python -c {shlex.quote(code)}  and name that folder "
        f"by the key data-dir or the environment variable {DATA_DIR_VARIABLE}"
    )
