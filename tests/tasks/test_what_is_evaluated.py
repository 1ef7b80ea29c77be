"""What a run says of its model is measured on the task's own test set: read here from its files,
without Blackthorn's readers, and scored in NumPy, so that training examples cannot pass for it."""

import gzip
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn
import torch
from digits_runs import run
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from image_files import write_emnist, write_features
from safetensors.numpy import load_file
from shakespeare_files import LINE, samples, write
from test_datasets import write_cifar, write_mnist

from blackthorn.client_app.clientapp import app
from blackthorn.client_app.node_data import load_node_client
from blackthorn.settings.config import RunConfig, make_config, to_mapping
from blackthorn.tasks.char_lstm import build_char_lstm
from blackthorn.tasks.problem import TASK_NAMES, load_problem
from blackthorn.tasks.shakespeare import VOCABULARY
from blackthorn.tasks.shards import ExampleShard

Labelled = tuple[np.ndarray, np.ndarray]
Arrays = dict[str, np.ndarray]
METRICS = ("accuracy", "loss", "squared-norm")
FOLDERS = {"mnist": "MNIST", "fashion-mnist": "FashionMNIST"}


def scores(logits: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """Accuracy and mean cross-entropy."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    right = log_p.argmax(axis=1) == y
    return {"accuracy": float(right.mean()), "loss": float(-log_p[np.arange(len(y)), y].mean())}


def linear_scores(state: Arrays, x: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """Those of logistic regression."""
    (weight,) = (array for array in state.values() if array.ndim == 2)
    (bias,) = (array for array in state.values() if array.ndim == 1)
    return scores(x @ weight.T.astype(np.float64) + bias, y)


def told(folder: Path, **options: Any) -> tuple[dict[str, float], Arrays]:
    """The last metrics of a short run, and its last model."""
    usual: dict[str, Any] = {
        "num_clients": 1,
        "partition": "iid",
        "examples_per_client": 0,
        "num_server_rounds": 2,
        "local_lr": 0.1,
        "dtype": "float64",
        "instruments": False,
    }
    last = run(folder, **{**usual, **options})[-1]
    metrics = {name: last[name] for name in last if name in METRICS or name.startswith("x-")}
    return metrics, load_file(folder / "checkpoints" / "final.safetensors")


def idx_test(root: Path, name: str) -> Labelled:
    raw = root / FOLDERS[name] / "raw"
    images = np.frombuffer((raw / "t10k-images-idx3-ubyte").read_bytes(), np.uint8, offset=16)
    labels = np.frombuffer((raw / "t10k-labels-idx1-ubyte").read_bytes(), np.uint8, offset=8)
    return images.reshape(len(labels), 784) / 255, labels.astype(int)


def test_digits_are_evaluated_on_every_fifth_of_a_class(tmp_path: Path) -> None:
    path = Path(sklearn.__file__).parent / "datasets" / "data" / "digits.csv.gz"
    with gzip.open(path, "rt") as lines:
        rows = np.array([[float(value) for value in line.split(",")] for line in lines])
    seen, chosen = dict.fromkeys(range(10), 0), []
    for i, label in enumerate(rows[:, 64].astype(int)):
        if seen[label] % 5 == 2:
            chosen.append(i)
        seen[label] += 1
    assert 355 <= len(chosen) <= 365
    metrics, state = told(tmp_path)
    expected = linear_scores(state, rows[chosen, :64] / 16, rows[chosen, 64].astype(int))
    assert metrics == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", FOLDERS)
def test_idx_files_are_evaluated_on_t10k(name: str, tmp_path: Path) -> None:
    write_mnist(tmp_path, FOLDERS[name])
    metrics, state = told(tmp_path / "run", task=name, data_dir=str(tmp_path))
    assert metrics == pytest.approx(linear_scores(state, *idx_test(tmp_path, name)), rel=1e-6)


@pytest.mark.parametrize("name", FOLDERS)
def test_the_true_files_are_evaluated_on_their_10_000(
    name: str, data_dir: str, tmp_path: Path
) -> None:
    options = {"batch_size": 64, "num_server_rounds": 1, "dtype": "float32"}
    metrics, state = told(tmp_path, task=name, data_dir=data_dir, **options)
    x, y = idx_test(Path(data_dir), name)
    assert len(y) == 10_000
    expected = linear_scores(state, x, y)
    assert metrics["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert metrics["accuracy"] == pytest.approx(expected["accuracy"], abs=2e-4)


def test_cifar10_is_evaluated_on_its_test_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_cifar(tmp_path, monkeypatch, true_checksums=True)
    metrics, state = told(tmp_path / "run", task="cifar10", data_dir=str(tmp_path))
    batch = pickle.loads((tmp_path / "cifar-10-batches-py" / "test_batch").read_bytes())
    expected = linear_scores(state, batch["data"] / 255, np.array(batch["labels"]))
    assert metrics == pytest.approx(expected, rel=1e-6)


def test_emnist_is_evaluated_on_the_test_set_of_its_digits(tmp_path: Path) -> None:
    images, labels = write_emnist(tmp_path)["test"]
    metrics, state = told(tmp_path / "run", task="emnist", data_dir=str(tmp_path))
    expected = linear_scores(state, images.reshape(len(labels), 784) / 255, labels.astype(int))
    assert metrics == pytest.approx(expected, rel=1e-6)


def test_features_are_evaluated_on_their_test_file(tmp_path: Path) -> None:
    x, y = write_features(tmp_path, dimension=6)["test"]
    form = {"input_shape": "6", "num_classes": 3}
    metrics, state = told(tmp_path / "run", task="features", data_dir=str(tmp_path), **form)
    expected = linear_scores(state, x.astype(np.float32), y)
    assert metrics == pytest.approx(expected, rel=1e-6)


PROJECT = """
import numpy as np, torch
from torch.utils.data import TensorDataset

def part(name):
    arrays = np.load(PATH)
    return TensorDataset(*(torch.from_numpy(arrays[name + key]) for key in ("_x", "_y")))

def load(client_id):
    return part("train")

def test():
    return part("test")

def build():
    return torch.nn.Linear(6, 3)
"""


def test_a_project_of_one_s_own_is_evaluated_on_its_test_data(tmp_path: Path) -> None:
    generator = np.random.default_rng(1)
    arrays: dict[str, Any] = {
        f"{part}_{key}": value
        for part, count in (("train", 30), ("test", 9))
        for key, value in (
            ("x", generator.normal(size=(count, 6)).astype(np.float32)),
            ("y", np.arange(count) % 3),
        )
    }
    np.savez(tmp_path / "examples.npz", **arrays)
    file = tmp_path / "project.py"
    file.write_text(PROJECT.replace("PATH", repr(str(tmp_path / "examples.npz"))))
    own = {"data": f"{file}:load", "test_data": f"{file}:test", "model": f"{file}:build"}
    metrics, state = told(tmp_path / "run", task="own-project", dtype="float32", **own)
    expected = linear_scores(state, arrays["test_x"], arrays["test_y"])
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-5)


def test_shakespeare_is_evaluated_on_the_folder_test(tmp_path: Path) -> None:
    write(tmp_path / "shakespeare" / "train" / "a.json", {"PUCK": samples(LINE, 6)})
    write(tmp_path / "shakespeare" / "test" / "a.json", {"PUCK": samples(LINE[20:], 5)})
    options = {"task": "shakespeare", "data_dir": str(tmp_path), "model": "auto"}
    metrics, state = told(tmp_path / "run", num_server_rounds=1, **options)
    held = json.loads((tmp_path / "shakespeare" / "test" / "a.json").read_text())["user_data"]
    x = [[VOCABULARY.index(character) for character in text] for text in held["PUCK"]["x"]]
    y = np.array([VOCABULARY.index(character) for character in held["PUCK"]["y"]])
    module = build_char_lstm("char-lstm", (80,), len(VOCABULARY), 0).double()
    module.load_state_dict({name: torch.from_numpy(value) for name, value in state.items()})
    with torch.no_grad():
        logits = module(torch.tensor(x, dtype=torch.uint8)).numpy()
    assert metrics == pytest.approx(scores(logits, y), rel=1e-6)


CLOSED = {"model": "auto", "local_steps": 2, "batch_size": 1, "local_lr": 0.01}


def test_table_4_is_evaluated_by_its_three_functions(tmp_path: Path) -> None:
    metrics, state = told(tmp_path, task="least-squares", **{**CLOSED, "num_clients": 3})
    (x,) = state["x"]
    loss = ((x - 4) ** 2 + (2 * x - 1) ** 2 + (6 * x + 1) ** 2) / 6
    assert metrics == pytest.approx({"loss": loss, "x-0": x})


def test_quadratic_noise_is_evaluated_by_its_expected_loss(tmp_path: Path) -> None:
    metrics, state = told(tmp_path, task="quadratic-noise", **CLOSED)
    squared = float(np.sum(state["x"] ** 2))
    assert metrics == pytest.approx({"loss": squared / 2, "squared-norm": squared})


def test_bayes_linear_is_evaluated_by_the_likelihood_of_all_rows(tmp_path: Path) -> None:
    options = {**CLOSED, "task": "bayes-linear", "num_clients": 3, "local_lr": 1e-4}
    metrics, state = told(tmp_path, **options)
    problem = load_problem(
        make_config({"task": "bayes-linear", "num-clients": 3, "dtype": "float64"})
    )
    rows = [shard.batch(np.random.default_rng(0), 0) for shard in problem.shards()]
    residuals = np.concatenate([x.numpy() @ state["x"] - y.numpy() for x, y in rows])
    assert metrics == pytest.approx({"loss": float((residuals**2).mean() / 2)})


def own_data(folder: Path) -> tuple[RunConfig, dict[str, Any], Labelled]:
    """A run on the nodes' own data, a node's configuration, and its 20 examples."""
    x, y = np.random.default_rng(0).normal(size=(20, 6)), np.arange(20) % 3
    folder.mkdir(exist_ok=True)
    np.savez(folder / "own.npz", x=x, y=y)
    values = {"task": "own-data", "input-shape": "6", "num-classes": 3, "model": "logistic"}
    node = {"client-id": 1, "data-path": str(folder / "own.npz")}
    return make_config({**values, "dtype": "float64"}), node, (x.astype(np.float32), y)


def test_a_node_is_evaluated_on_a_fifth_that_it_never_trains_on(tmp_path: Path) -> None:
    config, node, (x, y) = own_data(tmp_path / "own")
    shard = load_node_client(config, node).shard
    assert isinstance(shard, ExampleShard)
    trained = shard.examples.x.numpy()
    held = np.array([not (trained == row).all(axis=1).any() for row in x])
    assert held.sum() == 4
    assert len(trained) == 16
    state = load_problem(config).state()
    content = RecordDict({"arrays": ArrayRecord(state), "config": ConfigRecord()})
    message = Message(content, 1, "evaluate", group_id="1")
    reply = app(message, Context(1, 1, node, RecordDict(), to_mapping(config)))
    found = dict(reply.content.metric_records["metrics"])
    expected = linear_scores({k: v.numpy() for k, v in state.items()}, x[held], y[held])
    assert found.pop("num-examples") == 4
    assert found == pytest.approx(expected, rel=1e-6)


def test_every_task_is_here() -> None:
    images = {"digits", "cifar10", "emnist", "features", *FOLDERS}
    others = {
        "own-project",
        "shakespeare",
        "own-data",
        "least-squares",
        "quadratic-noise",
        "bayes-linear",
    }
    assert images | others == {*TASK_NAMES}
