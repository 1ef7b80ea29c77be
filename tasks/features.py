"""Features of a frozen network, read from files: what is left is logistic regression on them (Das
et al., Tables 1b and 1c)."""

import os
from functools import cache
from pathlib import Path

import numpy as np
import torch

from blackthorn.tasks.datasets import DATA_DIR_VARIABLE, Dataset, DataUnavailable, Examples
from blackthorn.tasks.npz_file import read_npz

FEATURES = "features"
_FILES = "train.npz and test.npz, each with x [n, d] (numbers) and y [n] (labels from 0 on)"


def load_features(data_dir: str = "") -> Dataset:
    """`DATA_DIR/features/train.npz` and `test.npz`: x [n, d], float32 from any numbers, and y [n].

    ``data_dir`` "" is the environment variable BLACKTHORN_DATA_DIR. A second call for the same
    folder returns the same object. Classes are those up to the largest label of the training set.
    Raises DataUnavailable, one line, where the files are absent or are no such thing.
    """
    folder = data_dir or os.environ.get(DATA_DIR_VARIABLE, "")
    if not folder:
        raise _unavailable(Path("DATA_DIR"), "no data folder is named")
    return _load(Path(folder).expanduser().absolute() / FEATURES)


@cache
def _load(folder: Path) -> Dataset:
    train, test = (_read(folder, part) for part in ("train", "test"))
    classes = int(train.y.max()) + 1
    if train.x.shape[1] != test.x.shape[1] or int(test.y.max()) >= classes:
        raise _unavailable(
            folder,
            f"train.npz has {train.x.shape[1]} features and {classes} classes, test.npz "
            f"{test.x.shape[1]} and {int(test.y.max()) + 1}",
        )
    return Dataset(FEATURES, train, test, (train.x.shape[1],), classes)


def _read(folder: Path, part: str) -> Examples:
    path = folder / f"{part}.npz"
    try:
        arrays = read_npz(path, ("x", "y"))
    except ValueError as error:
        raise _unavailable(folder, f"{path.name}: {error}") from error
    x, y = arrays["x"], arrays["y"]
    if x.ndim != 2 or y.shape != (len(x),) or 0 in x.shape:
        raise _unavailable(folder, f"{path.name} has x {x.shape} and y {y.shape}")
    if not np.issubdtype(x.dtype, np.number) or not np.issubdtype(y.dtype, np.integer):
        raise _unavailable(folder, f"{path.name} has x of {x.dtype} and y of {y.dtype}")
    values = torch.from_numpy(x.astype(np.float32))
    if not bool(torch.isfinite(values).all()) or int(y.min()) < 0:
        raise _unavailable(folder, f"{path.name} has features that are not finite, or labels < 0")
    return Examples(values, torch.from_numpy(y.astype(np.int64)))


def _unavailable(folder: Path, reason: str) -> DataUnavailable:
    return DataUnavailable(
        f"task 'features' is not to be had from {str(folder)!r} ({reason}): put {_FILES} there, "
        f"and name the folder above it by the key data-dir or the variable {DATA_DIR_VARIABLE}"
    )
