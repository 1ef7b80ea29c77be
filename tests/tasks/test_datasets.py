"""Data sets: the true files of each format are read right, wrong ones give one useful line."""

import hashlib
import pickle
import shlex
import socket
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from torchvision.datasets import CIFAR10

from blackthorn.tasks.datasets import DataUnavailable, Examples, load_dataset

MNIST_TRAIN_COUNTS = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a data set opened a socket")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)


def idx_bytes(array: np.ndarray) -> bytes:
    """The IDX format: two zero bytes, 8 for unsigned bytes, the rank, big-endian sizes, data."""
    return (
        bytes([0, 0, 8, array.ndim])
        + struct.pack(f">{array.ndim}I", *array.shape)
        + array.tobytes()
    )


def write_mnist(root: Path, folder: str = "MNIST") -> dict[str, np.ndarray]:
    generator = np.random.default_rng(3)
    arrays = {
        "train-images-idx3-ubyte": generator.integers(0, 256, (7, 28, 28), dtype=np.uint8),
        "train-labels-idx1-ubyte": np.array([0, 9, 3, 3, 1, 7, 2], dtype=np.uint8),
        "t10k-images-idx3-ubyte": generator.integers(0, 256, (3, 28, 28), dtype=np.uint8),
        "t10k-labels-idx1-ubyte": np.array([5, 0, 9], dtype=np.uint8),
    }
    raw = root / folder / "raw"
    raw.mkdir(parents=True)
    for name, array in arrays.items():
        (raw / name).write_bytes(idx_bytes(array))
    return arrays


def test_digits_are_sklearns_in_a_stratified_split() -> None:
    from sklearn.datasets import load_digits

    dataset, bunch = load_dataset("digits"), load_digits()
    assert (dataset.input_shape, dataset.num_classes) == ((1, 8, 8), 10)
    assert dataset.train.x.dtype == dataset.test.x.dtype == torch.float32
    assert dataset.train.y.dtype == dataset.test.y.dtype == torch.int64
    assert float(dataset.train.x.min()) == 0.0
    assert float(dataset.train.x.max()) == 1.0
    ours = torch.cat(
        [
            torch.cat([part.x.flatten(1) * 16, part.y[:, None]], dim=1)
            for part in (dataset.train, dataset.test)
        ]
    ).numpy()
    theirs = np.column_stack([bunch.data, bunch.target]).astype(np.float32)
    assert ours.shape == theirs.shape == (1797, 65)
    np.testing.assert_array_equal(
        ours[np.lexsort(ours.T)], theirs[np.lexsort(theirs.T)], "an example is lost or changed"
    )
    in_test = np.bincount(dataset.test.y, minlength=10)
    assert np.abs(in_test - np.bincount(bunch.target) / 5).max() <= 1


def test_a_second_call_returns_the_same_object(tmp_path: Path) -> None:
    write_mnist(tmp_path / "a")
    assert load_dataset("digits") is load_dataset("digits", "/nowhere")
    first = load_dataset("mnist", str(tmp_path / "a"))
    assert load_dataset("mnist", str(tmp_path / "a")) is first
    with pytest.raises(DataUnavailable):
        load_dataset("mnist", str(tmp_path / "b"))


@pytest.mark.parametrize(
    ("name", "folder"), [("mnist", "MNIST"), ("fashion-mnist", "FashionMNIST")]
)
def test_idx_files_are_read_and_scaled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, folder: str
) -> None:
    arrays = write_mnist(tmp_path, folder)
    monkeypatch.setenv("BLACKTHORN_DATA_DIR", str(tmp_path))
    dataset = load_dataset(name, "")
    assert (dataset.name, dataset.input_shape, dataset.num_classes) == (name, (1, 28, 28), 10)
    for part, prefix in ((dataset.train, "train"), (dataset.test, "t10k")):
        images, labels = (
            arrays[f"{prefix}-images-idx3-ubyte"],
            arrays[f"{prefix}-labels-idx1-ubyte"],
        )
        assert part.x.dtype == torch.float32
        assert part.y.tolist() == labels.tolist()
        np.testing.assert_allclose(part.x[:, 0].numpy(), images / 255.0, rtol=1e-6)


def test_data_dir_goes_before_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_mnist(tmp_path)
    monkeypatch.setenv("BLACKTHORN_DATA_DIR", str(tmp_path / "absent"))
    assert len(load_dataset("mnist", str(tmp_path)).train) == 7


def one_line(error: pytest.ExceptionInfo[ValueError]) -> str:
    message = str(error.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10"])
def test_absent_data_say_how_to_get_them(tmp_path: Path, name: str) -> None:
    root = tmp_path / 'it\'s a "folder"'
    with pytest.raises(DataUnavailable) as error:
        load_dataset(name, str(root))
    message = one_line(error)
    assert "data-dir" in message
    assert "BLACKTHORN_DATA_DIR" in message
    words = shlex.split(message[message.index("python -c ") :].split("  and name")[0])
    assert words[:2] == ["python", "-c"]
    calls: list[tuple[str, dict[str, bool]]] = []

    class Recorder:
        def __getattr__(self, _: str) -> "Recorder":
            return self

        def __call__(self, folder: str, **options: bool) -> None:
            calls.append((folder, options))

    statement = words[2].removeprefix("import torchvision; ")
    eval(statement, {"torchvision": Recorder()})
    assert calls == [(str(root), {"download": True})]


def test_without_a_folder_the_data_are_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BLACKTHORN_DATA_DIR", raising=False)
    with pytest.raises(DataUnavailable, match="no data folder is named"):
        load_dataset("mnist", "")


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'minst' is unknown: allowed are digits, mnist,") as error:
        load_dataset("minst", "")
    one_line(error)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("train-images-idx3-ubyte", b""),
        ("train-images-idx3-ubyte", b"\x1f\x8b not unpacked"),
        ("train-images-idx3-ubyte", idx_bytes(np.zeros((7, 28, 28), np.uint8))[:-1]),
        ("train-images-idx3-ubyte", idx_bytes(np.zeros((7, 28, 27), np.uint8))),
        ("train-images-idx3-ubyte", idx_bytes(np.zeros((0, 28, 28), np.uint8))),
        ("t10k-labels-idx1-ubyte", idx_bytes(np.zeros(4, np.uint8))),
        ("t10k-labels-idx1-ubyte", idx_bytes(np.array([0, 1, 10], np.uint8))),
        ("t10k-labels-idx1-ubyte", idx_bytes(np.zeros((3, 1), np.uint8))),
    ],
)
def test_damaged_idx_files_are_unavailable(tmp_path: Path, file: str, content: bytes) -> None:
    write_mnist(tmp_path)
    (tmp_path / "MNIST" / "raw" / file).write_bytes(content)
    with pytest.raises(DataUnavailable) as error:
        load_dataset("mnist", str(tmp_path))
    assert str(tmp_path) in one_line(error)


def write_cifar(root: Path, monkeypatch: pytest.MonkeyPatch, *, true_checksums: bool) -> np.ndarray:
    """The python version's files, two images a batch, rows of 3072 bytes, red plane first."""
    rows = np.random.default_rng(5).integers(0, 256, (12, 3072), dtype=np.uint8)
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    names = [f"data_batch_{number}" for number in range(1, 6)] + ["test_batch"]
    for position, name in enumerate(names):
        own = slice(2 * position, 2 * position + 2)
        batch = {"data": rows[own], "labels": [position, 9 - position], "batch_label": name}
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))
    if true_checksums:

        def entry(name: str) -> list[str]:
            return [name, hashlib.md5((folder / name).read_bytes()).hexdigest()]

        monkeypatch.setattr(CIFAR10, "train_list", [entry(name) for name in names[:5]])
        monkeypatch.setattr(CIFAR10, "test_list", [entry("test_batch")])
        monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": entry("batches.meta")[1]})
    return rows


def test_cifar10_is_read_channels_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = write_cifar(tmp_path, monkeypatch, true_checksums=True)
    dataset = load_dataset("cifar10", str(tmp_path))
    assert (dataset.input_shape, dataset.num_classes) == ((3, 32, 32), 10)
    assert dataset.train.y.tolist() == [0, 9, 1, 8, 2, 7, 3, 6, 4, 5]
    assert dataset.test.y.tolist() == [5, 4]
    both = torch.cat([dataset.train.x, dataset.test.x])
    assert both.dtype == torch.float32
    np.testing.assert_allclose(both.reshape(12, 3072).numpy(), rows / 255.0, rtol=1e-6)


def test_cifar10_with_wrong_checksums_is_never_unpickled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_cifar(tmp_path, monkeypatch, true_checksums=False)
    monkeypatch.setattr(pickle, "load", lambda *_, **__: pytest.fail("unpickled"))
    with pytest.raises(DataUnavailable, match="cifar10") as error:
        load_dataset("cifar10", str(tmp_path))
    one_line(error)


def test_mnist_has_its_counts_mean_and_deviation(data_dir: str) -> None:
    dataset = load_dataset("mnist", data_dir)
    assert np.bincount(dataset.train.y).tolist() == MNIST_TRAIN_COUNTS
    assert len(dataset.test) == 10_000
    assert float(dataset.train.x.mean()) == pytest.approx(0.1307, abs=5e-5)
    assert float(dataset.train.x.std()) == pytest.approx(0.3081, abs=5e-5)


def test_fashion_mnist_has_its_counts_and_mean(data_dir: str) -> None:
    dataset = load_dataset("fashion-mnist", data_dir)
    assert np.bincount(dataset.train.y).tolist() == [6000] * 10
    assert float(dataset.train.x.mean()) == pytest.approx(0.2860, abs=5e-5)


def test_examples_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="x has 3 examples and y has 2"):
        Examples(torch.zeros(3, 2), torch.zeros(2, dtype=torch.int64))


def test_select_copies_in_the_order_asked() -> None:
    examples = Examples(torch.arange(8.0).reshape(4, 2), torch.arange(4))
    chosen = examples.select(np.array([3, 0, 3]))
    assert chosen.x.tolist() == [[6, 7], [0, 1], [6, 7]]
    assert chosen.y.tolist() == [3, 0, 3]
    chosen.x.zero_()
    assert examples.x[3].tolist() == [6, 7]
