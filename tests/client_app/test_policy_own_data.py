"""A client with a policy: what its examples are is its operator's word, checked before any server
asks, so that what it answers is the same with one example more, whatever a run asks for."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Message, RecordDict
from image_files import write_cifar10, write_emnist
from PIL import Image
from policy_client import AT_CLIENTS, DP_SGD, Client, enrolment, run_config, train_message

from blackthorn.client_app.client_ledger import Sent
from blackthorn.client_app.node_data import load_node_client
from blackthorn.launch.cli import main
from blackthorn.settings.config import RunConfig
from blackthorn.settings.keys.problem import ProblemKeys
from blackthorn.tasks.datasets import DATASET_NAMES, load_dataset
from blackthorn.tasks.labelled import example_form

KIND = 'input-shape = "1,4,4"\nnum-classes = 8\n'
POLICY = f"max-sample-epsilon = 1e6\n{KIND}"
OWN = {"task": "own-data", "input-shape": "1,4,4", "num-classes": 8}
# Figures of the noised model and its noise: not the same twice for one data set.
DRAWN = ("update-norm",)


def examples(n: int = 20) -> dict[str, Any]:
    """Labels 0 and 1."""
    x = np.random.default_rng(0).random((n, 1, 4, 4), dtype=np.float32)
    return {"x": x, "y": np.arange(n) % 2}


def one_more(value: float, label: int) -> dict[str, Any]:
    """The same with one example that is like none of them."""
    few = examples()
    x = np.full((1, 1, 4, 4), value, dtype=np.float32)
    return {"x": np.concatenate([few["x"], x]), "y": np.append(few["y"], label)}


NEIGHBOURS = [one_more(1.0, 7), one_more(3e38, 7), one_more(-3e38, 1), examples(1)]


def client(folder: Path, data: dict[str, Any], policy: str = POLICY) -> Client:
    folder.mkdir()
    np.savez(folder / "data.npz", **data)
    one = Client(folder, policy)
    one.node["data-path"] = str(folder / "data.npz")
    return one


def answers(one: Client, config: RunConfig) -> list[Any]:
    """All that the server can tell apart in its answers to a question of each kind, but for
    the numbers of the model."""
    told: list[Any] = []
    content = train_message(config, 1).content
    for kind in ("query", "train", "evaluate"):
        try:
            reply = one.send(config, Message(RecordDict() if kind == "query" else content, 5, kind))
        except Exception as error:  # Flower sends the text of any
            told.append(f"{type(error).__name__}: {error}")
            continue
        for name, record in reply.content.items():
            if isinstance(record, ArrayRecord):
                told.append([(key, a.shape, a.dtype) for key, a in record.items()])
            else:
                told.append([name, {k: v for k, v in record.items() if k not in DRAWN}])
    return [*told, one.sent()]


def alike(tmp_path: Path, config: RunConfig) -> list[Any]:
    """What the client answers, which must be the same for all neighbours."""
    first = answers(client(tmp_path / "few", examples()), config)
    for number, data in enumerate(NEIGHBOURS):
        assert answers(client(tmp_path / str(number), data), config) == first
    return first


@pytest.mark.parametrize("num_classes", [2, 3, 7, 8, 9])
def test_a_server_does_not_learn_the_largest_label(tmp_path: Path, num_classes: int) -> None:
    """A client whose labels are 0 and 1 took part with num-classes = 2, and with 7 among them
    refused: for nothing, since what is refused is not charged."""
    config = run_config({**DP_SGD, **OWN, "num-classes": num_classes})
    first = alike(tmp_path, config)
    assert (first[-1] != Sent()) == (num_classes == 8)


@pytest.mark.parametrize("values", [DP_SGD, AT_CLIENTS])
@pytest.mark.parametrize(
    "asked",
    [
        {"input-shape": "16"},
        {"task": "digits", "input-shape": "", "num-classes": 0},
        {"model": "cnn"},
        {"model": "mlp-4", "dtype": "float64"},
        {"batch-size": 1},
        {"batch-size": 64, "local-lr": 1e30},
        {"partition": "label-shards", "examples-per-client": 10**6},
        {"instruments": True, "claim-privacy": False},
    ],
)
def test_one_example_more_shows_in_no_answer_whatever_the_run_asks(
    tmp_path: Path, values: dict[str, Any], asked: dict[str, Any]
) -> None:
    alike(tmp_path, run_config({**values, **OWN, **asked}))


def test_a_task_without_labelled_examples_is_not_the_policy_s(tmp_path: Path) -> None:
    one = client(tmp_path / "own", examples())
    for task in ("least-squares", "digits"):
        config = run_config({**AT_CLIENTS, "model": "auto"}, task=task)
        told = enrolment(one, config)
        assert told == (
            f"the examples of task {task} have not the client's input-shape and num-classes"
        )


def test_an_input_shape_that_is_none_is_refused(tmp_path: Path) -> None:
    config = run_config({**DP_SGD, **OWN, "input-shape": "8x8"})
    told = enrolment(client(tmp_path / "own", examples()), config)
    assert told.startswith("input-shape is '8x8': allowed are positive integers")


def test_a_policy_without_the_kind_of_its_examples_allows_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = client(tmp_path / "own", examples(), "max-sample-epsilon = 1e6\n")
    assert enrolment(one, run_config({**DP_SGD, **OWN})) == (
        "the client's policy or ledger cannot be used"
    )
    assert "must say what the examples of" in caplog.text


@pytest.mark.parametrize("name", DATASET_NAMES)
def test_the_kind_of_a_task_s_examples_is_known_without_them(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    config: ProblemKeys = run_config({"task": name})
    # Of what cannot be had here, files of the same form.
    write_emnist(tmp_path)
    write_cifar10(tmp_path, monkeypatch)
    folder = str(tmp_path)
    if name in ("mnist", "fashion-mnist"):
        folder = str(request.getfixturevalue("data_dir"))
    dataset = load_dataset(name, folder)
    assert example_form(config) == (
        tuple(dataset.train.x.shape[1:]),
        int(dataset.train.y.max()) + 1,
    )


def test_under_a_policy_a_server_names_no_folder_of_the_client_s(tmp_path: Path) -> None:
    config = run_config({"task": "mnist", "model": "logistic", "data-dir": str(tmp_path)})
    node: dict[str, bool | int | float | str] = {"client-id": 0}
    with pytest.raises(ValueError, match=str(tmp_path)):
        load_node_client(config, node)
    own = {**node, "policy": "policy.toml", "data-dir": str(tmp_path / "own")}
    with pytest.raises(ValueError, match=str(tmp_path / "own")):
        load_node_client(config, own)


# At the start, by the client's own console.


def start(monkeypatch: pytest.MonkeyPatch, words: Sequence[str]) -> int | str | None:
    monkeypatch.setattr("blackthorn.launch.federation.client_service.take_part", lambda _: None)
    command = "client --server localhost --insecure --client-id 0 --policy policy.toml --data"
    monkeypatch.setattr(sys, "argv", ["blackthorn", *command.split(), *words])
    with pytest.raises(SystemExit) as caught:
        main()
    return caught.value.code


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (
            one_more(1.0, 8),
            "data.npz', row 20 (from 0): y holds 8, allowed are 0 to 7: num-classes is 8",
        ),
        (one_more(np.nan, 0), "x holds 16 values that are not finite in float32, the first in row"),
        (
            {"x": np.zeros((3, 16)), "y": np.arange(3)},
            "x has shape (3, 16), allowed is (n, 1, 4, 4)",
        ),
    ],
)
def test_an_example_that_is_not_what_the_policy_says_ends_the_client_before_any_server(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    data: dict[str, Any],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("policy.toml").write_text(POLICY)
    np.savez("data.npz", **data)
    assert start(monkeypatch, ["data.npz"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert not Path("policy.ledger.json").exists()


def test_an_image_that_is_not_what_the_policy_says_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("policy.toml").write_text(POLICY.replace("8", "2"))
    for label in "ab":
        Path("images", label).mkdir(parents=True)
        Image.new("L", (4, 4)).save(Path("images", label, "good.png"))
    assert start(monkeypatch, ["images"]) in (None, 0)
    Image.new("L", (4, 5)).save(Path("images", "b", "long.png"))
    assert start(monkeypatch, ["images"]) == 2
    assert "long.png': it is 4 wide and 5 high" in capsys.readouterr().err


def test_a_policy_for_own_examples_says_what_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("policy.toml").write_text("max-sample-epsilon = 8.0\n")
    np.savez("data.npz", **examples())
    assert start(monkeypatch, ["data.npz"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "must say what the examples of" in line
    assert "set input-shape, such as" in line
    Path("policy.toml").write_text(POLICY)
    assert start(monkeypatch, ["data.npz"]) in (None, 0)


@pytest.mark.parametrize(
    ("policy", "label", "said"),
    [
        ("max-sample-epsilon = 8.0\n", 0, "must say what the examples of"),
        (POLICY.replace("8", "3"), 7, "row 20 (from 0): y holds 7, allowed are 0 to 2"),
    ],
)
def test_a_cluster_with_a_policy_checks_its_clients_examples_as_well(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    policy: str,
    label: int,
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("policy.toml").write_text(policy)
    np.savez("data.npz", **one_more(1.0, label))
    kind = 'task = "own-data"\ninput-shape = "1,4,4"\nnum-classes = 8\nnum-clients = 1\n'
    Path("recipe.toml").write_text(kind)
    command = "blackthorn cluster recipe.toml --policy policy.toml --data data.npz"
    monkeypatch.setattr(sys, "argv", command.split())
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert said in capsys.readouterr().err
