"""Whether a client answers a round does not hang on how many examples it has, or on which.

A server that deviates may ask for what has a gradient for nobody: a client that then fails where a
batch holds an example, and answers where it holds none, tells without noise how many there are.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Message
from policy_client import DP_SGD, Client, run_config, train_message

from blackthorn.client_app.disclosure import PublicRefusal
from blackthorn.client_app.dp_sgd import DPSGD, train_dp_sgd
from blackthorn.randomness import Stream
from blackthorn.settings.config import RunConfig
from blackthorn.strategies.array_codec import encode
from blackthorn.strategies.noise import SeededRandomness
from blackthorn.tasks.datasets import Examples
from blackthorn.tasks.flat_model import FlatModel
from blackthorn.tasks.shards import ExampleShard

POLICY = """
max-sample-epsilon = 100.0
delta = 1e-5
input-shape = "1,4,4"
num-classes = 8
"""
OWN = {**DP_SGD, "task": "own-data", "input-shape": "1,4,4", "num-classes": 8}
# Every batch is empty, and none is.
RATES = {"empty": 1e-6, "full": 1.0}


def client(folder: Path) -> Client:
    rng = np.random.default_rng(0)
    np.savez(folder / "data.npz", x=rng.random((3, 1, 4, 4), dtype=np.float32), y=np.arange(3))
    found = Client(folder, POLICY)
    found.node["data-path"] = str(folder / "data.npz")
    return found


def asked(config: RunConfig, change: Callable[[str, np.ndarray], np.ndarray]) -> Message:
    message = train_message(config, 1)
    sent = message.content.array_records["arrays"]
    arrays = {name: encode(change(name, array.numpy())) for name, array in sent.items()}
    message.content["arrays"] = ArrayRecord(arrays)
    return message


def answer(folder: Path, rate: float, change: Callable[[str, np.ndarray], np.ndarray]) -> str:
    """What the server is told; empty: it has a model."""
    folder.mkdir()
    config = run_config(OWN, dp_sgd_sample_rate=rate, delta=1e-12)
    try:
        client(folder).send(config, asked(config, change))
    except ValueError as refusal:
        return str(refusal)
    return ""


@pytest.mark.parametrize(
    "dtype",
    [*("int8", "int32", "int64", "uint16", "bool", "complex64", "float16", "float64"), ">f4"],
)
def test_a_model_of_other_numbers_is_refused_whatever_is_in_the_batches(
    tmp_path: Path, dtype: str
) -> None:
    def change(name: str, array: np.ndarray) -> np.ndarray:
        del name
        return array.astype(dtype)

    told = {answer(tmp_path / name, rate, change) for name, rate in RATES.items()}
    assert len(told) == 1
    if dtype != ">f4":
        assert "the server's model is not the run's" in told.pop()


def test_a_model_of_another_shape_is_refused_whatever_is_in_the_batches(tmp_path: Path) -> None:
    def change(name: str, array: np.ndarray) -> np.ndarray:
        del name
        return array[..., :1]

    told = {answer(tmp_path / name, rate, change) for name, rate in RATES.items()}
    assert len(told) == 1
    assert "the server's model is not the run's" in told.pop()


def one_step(loss: Callable[..., Any], rate: float, bad: bool = True) -> torch.Tensor:
    """A model of five weights after a step; the last of four examples is a bad one."""
    model = FlatModel(torch.nn.Linear(5, 1, bias=False), loss)
    y = torch.tensor([0, 0, 0, int(bad)])
    x = torch.eye(5)[:4] if bad else torch.eye(5)[:3]
    shard = ExampleShard(Examples(x, y[: len(x)]))
    spec = DPSGD(1, rate, 4, 0.5, 0.0, 1.0, 0.1)
    return train_dp_sgd(
        model, torch.zeros(5), shard, spec, SeededRandomness(Stream.DP_SGD, 0xD9, 1)
    )[0]


def refuses_the_bad(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if bool((y == 1).any()):
        raise RuntimeError("no such label")
    return outputs[:, 0]


def refuses_all(*_: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no such operation")


def test_an_example_without_a_gradient_counts_as_zero(caplog: pytest.LogCaptureFixture) -> None:
    def silent_for_the_bad(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return outputs[:, 0] * (y != 1)

    expected = one_step(silent_for_the_bad, 1.0)
    assert torch.equal(one_step(refuses_the_bad, 1.0), expected)
    assert "an example has no gradient and counts as 0: no such label" in caplog.text


@pytest.mark.parametrize("rate", RATES.values(), ids=RATES.keys())
def test_a_model_without_a_gradient_is_refused_whatever_is_in_the_batches(rate: float) -> None:
    with pytest.raises(PublicRefusal, match="the model has no gradient: no such operation"):
        one_step(refuses_all, rate)
