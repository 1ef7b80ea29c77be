"""Small sets in the papers' file formats: EMNIST's and CIFAR-10's, and features of a network."""

import hashlib
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
from torchvision.datasets import CIFAR10

Labelled = tuple[np.ndarray, np.ndarray]


def idx_bytes(array: np.ndarray) -> bytes:
    """The IDX format: two zero bytes, 8 for unsigned bytes, the rank, big-endian sizes, data."""
    sizes = struct.pack(f">{array.ndim}I", *array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes()


def write_emnist(root: Path, train: int = 40, test: int = 10) -> dict[str, Labelled]:
    """`EMNIST/raw` with the split of the digits, all ten of them in turn."""
    generator = np.random.default_rng(8)
    raw = root / "EMNIST" / "raw"
    raw.mkdir(parents=True)
    written = {}
    for part, count in (("train", train), ("test", test)):
        images = generator.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = (np.arange(count) % 10).astype(np.uint8)
        (raw / f"emnist-digits-{part}-images-idx3-ubyte").write_bytes(idx_bytes(images))
        (raw / f"emnist-digits-{part}-labels-idx1-ubyte").write_bytes(idx_bytes(labels))
        written[part] = images, labels
    return written


def write_cifar10(root: Path, monkeypatch: pytest.MonkeyPatch, batch: int = 20) -> None:
    """`cifar-10-batches-py` with five batches of so many images and a test batch, whose checksums
    torchvision is told."""
    generator = np.random.default_rng(9)
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    names = [f"data_batch_{number}" for number in range(1, 6)] + ["test_batch"]
    files = {
        name: {
            "data": generator.integers(0, 256, (batch, 3072), dtype=np.uint8),
            "labels": [i % 10 for i in range(batch)],
        }
        for name in names
    }
    files["batches.meta"] = {"label_names": list("abcdefghij")}
    sums = {}
    for name, content in files.items():
        encoded = pickle.dumps(content, protocol=2)
        (folder / name).write_bytes(encoded)
        sums[name] = hashlib.md5(encoded).hexdigest()
    monkeypatch.setattr(CIFAR10, "train_list", [[name, sums[name]] for name in names[:5]])
    monkeypatch.setattr(CIFAR10, "test_list", [["test_batch", sums["test_batch"]]])
    monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": sums["batches.meta"]})


def write_features(
    root: Path, train: int = 60, test: int = 12, dimension: int = 512, classes: int = 3
) -> dict[str, Labelled]:
    """`features/train.npz` and `test.npz`: float64 features about a center for each class."""
    generator = np.random.default_rng(10)
    centers = generator.normal(size=(classes, dimension))
    (root / "features").mkdir(parents=True)
    written = {}
    for part, count in (("train", train), ("test", test)):
        y = np.arange(count) % classes
        x = centers[y] + generator.normal(size=(count, dimension))
        np.savez(root / "features" / f"{part}.npz", x=x, y=y)
        written[part] = x, y
    return written
