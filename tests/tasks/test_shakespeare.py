"""Shakespeare in LEAF's layout, from small files that the tests write; and the character LSTM."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from shakespeare_files import LINE, samples, write

from blackthorn.launch.commands.recipes import recipe_config
from blackthorn.launch.commands.simulate import simulate
from blackthorn.server_app.run import prepare
from blackthorn.settings.config import ConfigError, make_config
from blackthorn.tasks.char_lstm import CharLSTM, build_char_lstm
from blackthorn.tasks.datasets import DataUnavailable
from blackthorn.tasks.problem import load_problem
from blackthorn.tasks.shakespeare import VOCABULARY

USERS = {"HAMLET_1": 7, "JULIET": 4, "PUCK": 9}


@pytest.fixture
def data_root(tmp_path: Path) -> Path:
    """Two training files whose users are not in order, and one test file."""
    folder = tmp_path / "shakespeare"
    data = {user: samples(LINE + user, count) for user, count in USERS.items()}
    write(folder / "train" / "b.json", {user: data[user] for user in ("PUCK", "HAMLET_1")})
    write(folder / "train" / "a.json", {"JULIET": data["JULIET"]})
    write(folder / "test" / "all.json", {user: samples(LINE, 2) for user in USERS})
    return tmp_path


def configuration(data_root: Path, **values: Any) -> Any:
    given = {key.replace("_", "-"): value for key, value in values.items()}
    return make_config(
        {
            "task": "shakespeare",
            "data-dir": str(data_root),
            "partition": "natural",
            "num-clients": 3,
            "model": "char-lstm-8",
            **given,
        }
    )


def decoded(tokens: torch.Tensor) -> str:
    return "".join(VOCABULARY[token] for token in tokens.tolist())


def test_the_vocabulary_is_leaf_s() -> None:
    assert len(VOCABULARY) == len(set(VOCABULARY)) == 80
    assert sorted(VOCABULARY) == list(VOCABULARY)
    assert [VOCABULARY.index(character) for character in "\n Az}"] == [0, 1, 25, 78, 79]


def test_every_user_is_a_client(data_root: Path) -> None:
    problem = load_problem(configuration(data_root))
    shards = problem.shards()
    assert [shard.num_examples for shard in shards] == [7, 4, 9]  # by name
    for (user, count), shard in zip(sorted(USERS.items()), shards, strict=True):
        x, y = shard.batch(np.random.default_rng(0), 0)
        assert (x.dtype, y.dtype) == (torch.uint8, torch.int64)
        expected = samples(LINE + user, count)
        assert [decoded(row) for row in x] == expected["x"]
        assert decoded(y) == "".join(expected["y"])


def test_clients_are_the_first_users_by_name(data_root: Path) -> None:
    problem = load_problem(configuration(data_root, num_clients=2))
    assert [shard.num_examples for shard in problem.shards()] == [7, 4]
    with pytest.raises(ConfigError, match="num-clients is 4: task 'shakespeare' has 3 natural"):
        prepare(configuration(data_root, num_clients=4))


def test_other_partitions_mix_the_users(data_root: Path) -> None:
    problem = load_problem(configuration(data_root, partition="iid", num_clients=4))
    assert [shard.num_examples for shard in problem.shards()] == [5, 5, 5, 5]


def test_natural_is_for_data_sets_with_clients_of_their_own() -> None:
    with pytest.raises(ConfigError, match="task 'digits' knows no clients of its own"):
        prepare(make_config({"partition": "natural"}))


def test_an_unknown_character_is_leaf_s_last(data_root: Path) -> None:
    strange = {"x": ["é" * 79 + "☺"], "y": ["~"]}
    write(data_root / "shakespeare" / "train" / "c.json", {"ARIEL": strange})
    problem = load_problem(configuration(data_root, num_clients=1))
    x, y = problem.shards()[0].batch(np.random.default_rng(0), 0)
    assert x.tolist() == [[79] * 80]
    assert y.tolist() == [79]


def test_absent_data_give_one_line(tmp_path: Path) -> None:
    with pytest.raises(DataUnavailable) as caught:
        load_problem(configuration(tmp_path / "nowhere"))
    message = str(caught.value)
    assert "preprocess.sh" in message
    assert "BLACKTHORN_DATA_DIR" in message
    assert "\n" not in message


def test_without_a_folder_the_data_are_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BLACKTHORN_DATA_DIR", raising=False)
    with pytest.raises(ConfigError, match="no data folder is named"):
        prepare(make_config({"task": "shakespeare"}))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "Expecting property name"),
        ('{"users": ["A"]}', "user_data"),
        ('{"users": ["A"], "user_data": {}}', "'A'"),
        ('{"users": ["A"], "user_data": {"A": {"x": ["short"], "y": ["a"]}}}', "5 characters"),
        ('{"users": ["A"], "user_data": {"A": {"x": [], "y": ["a"]}}}', "0 x and 1 y"),
        ('{"users": [], "user_data": {}}', "need at least one array"),
        ('{"users": ["A"], "user_data": {"A": {"x": [], "y": []}}}', "there are 0 examples"),
        ('{"users": ["A"], "user_data": {"A": {"x": [3], "y": ["a"]}}}', "has no len"),
        ("[]", "list indices"),
    ],
)
def test_damaged_files_give_one_line(data_root: Path, content: str, reason: str) -> None:
    folder = data_root / "shakespeare" / "train"
    for file in folder.glob("*.json"):
        file.unlink()
    (folder / "bad.json").write_text(content)
    with pytest.raises(DataUnavailable) as caught:
        load_problem(configuration(data_root))
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_run_learns_a_line_by_heart(data_root: Path, repository: Path, tmp_path: Path) -> None:
    options = {
        "data-dir": str(data_root),
        "num-clients": 3,
        "clients-per-round": 3,
        "model": "char-lstm-16",
        "num-server-rounds": 4,
        "local-steps": 10,
        "output-dir": str(tmp_path / "run"),
    }
    recipe = repository / "recipes" / "shakespeare.toml"
    summary = simulate(recipe_config(recipe, (), options), Console(quiet=True))
    assert summary["final"]["loss"] < np.log(80) - 0.5  # what guessing gives


def test_the_model_has_leaf_s_layers() -> None:
    module = build_char_lstm("char-lstm", (80,), 80, seed=0)
    assert isinstance(module, CharLSTM)
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    assert shapes["embedding.weight"] == (80, 8)
    assert shapes["lstm.weight_ih_l0"] == (1024, 8)
    assert shapes["lstm.weight_hh_l1"] == (1024, 256)
    assert shapes["output.weight"] == (80, 256)
    assert module(torch.zeros(3, 80, dtype=torch.uint8)).shape == (3, 80)


def test_its_weights_are_the_seed_s_own() -> None:
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    one, same, other = (build_char_lstm("char-lstm-16", (80,), 80, seed) for seed in (4, 4, 5))
    assert torch.equal(torch.random.get_rng_state(), before)
    for key, value in one.state_dict().items():
        assert torch.equal(value, same.state_dict()[key])
        assert not torch.equal(value, other.state_dict()[key])
        if not key.startswith("embedding"):
            assert value.abs().max() <= 1 / 4
            assert value.abs().max() > 0.2


def test_the_logits_are_of_the_last_state() -> None:
    module = build_char_lstm("char-lstm-16", (80,), 80, seed=0).eval()
    assert isinstance(module, CharLSTM)
    text = torch.arange(80).repeat(2, 1)
    text[1, 79] = 5
    logits = module(text)
    assert not torch.equal(logits[0], logits[1])
    states, _ = module.lstm(module.embedding(text))
    torch.testing.assert_close(logits, module.output(states[:, 79]))


@pytest.mark.parametrize("name", ["cnn", "char-lstm-", "char-lstm-0", "char-lstm-8-8", "lstm"])
def test_other_models_are_refused(name: str, data_root: Path) -> None:
    with pytest.raises(ConfigError, match="allowed are char-lstm and char-lstm-HIDDEN"):
        prepare(configuration(data_root, model=name))
