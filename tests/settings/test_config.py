"""Run configuration: one place for every key, one line for every mistake."""

import tomllib
from pathlib import Path

import pytest

from blackthorn.launch.commands.keys import flower_defaults, key_document
from blackthorn.server_app.run import prepare
from blackthorn.settings.config import (
    ConfigError,
    RunConfig,
    make_config,
    parse_setting,
    read_recipe,
    to_mapping,
)


def test_flower_defaults_are_the_declared_defaults(repository: Path) -> None:
    project = tomllib.loads((repository / "pyproject.toml").read_text())
    flower = project["tool"]["flwr"]["app"]["config"]
    assert flower == to_mapping(RunConfig())
    assert {k: type(v) for k, v in flower.items()} == {
        k: type(v) for k, v in to_mapping(RunConfig()).items()
    }


def test_flowers_table_is_as_the_command_writes_it(repository: Path) -> None:
    """`blackthorn keys --defaults`, between the table's head and the next."""
    text = (repository / "pyproject.toml").read_text()
    table = text.partition("[tool.flwr.app.config]\n")[2].partition("\n[")[0]
    assert table == flower_defaults()


def test_every_key_has_a_line_of_help() -> None:
    for name, field in RunConfig.model_fields.items():
        assert field.description, name
        assert "\n" not in field.description


def test_recipes_are_valid(repository: Path) -> None:
    recipes = sorted((repository / "recipes").glob("*.toml"))
    assert recipes
    for recipe in recipes:
        make_config(read_recipe(recipe))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"local-lrr": 0.1}, "unknown key local-lrr; did you mean local-lr?"),
        ({"agregator": "mean"}, "did you mean aggregator?"),
        ({"local-lr": -1.0}, "local-lr = -1.0 is not allowed: should be greater than 0"),
        ({"local-lr": float("nan")}, "local-lr = nan is not allowed"),
        ({"local-lr": float("inf")}, "local-lr = inf is not allowed"),
        ({"num-clients": "5"}, "num-clients = '5' is not allowed: should be a valid integer"),
        ({"num-clients": 2.5}, "num-clients = 2.5 is not allowed"),
        ({"seed": True}, "seed = True is not allowed"),
        ({"aggregator": "best"}, "aggregator = 'best' is not allowed: auto, mean, rage, median"),
        ({"corrupt-fraction": 1 / 3}, "corrupt-fraction = 0.333"),
        ({"corrupt-fraction": 0.34}, "fewer than a third"),
        ({"num-corrupt": 4, "num-clients": 12}, "at most 3"),
        ({"num-byzantine": 11, "attack": "all-ones"}, "at most num-clients = 10"),
        ({"num-byzantine": 1}, "attack = none is not allowed"),
        ({"participation": "fixed"}, "clients-per-round = 0 is not allowed"),
        ({"clients-per-round": 3}, "set participation = fixed"),
        ({"sample-rate": 0.5}, "set participation = poisson"),
        ({"sample-rate": 0.0}, "sample-rate = 0.0 is not allowed"),
        (
            {"participation": "fixed", "clients-per-round": 2, "sample-rate": 0.3},
            "set participation = poisson or sample-rate = 1",
        ),
        ({"task": "own-data"}, "needs a shape such as 1,28,28"),
        (
            {"algorithm": "fa-ld", "burn-in": 4, "thinning": 7},
            "thinning = 7 is not allowed with num-server-rounds = 10 and burn-in = 4: at most 6",
        ),
        ({"algorithm": "fa-ld", "prior-precision": 1e300}, "prior-precision = 1e+300 is not"),
        ({"algorithm": "fa-ld", "temperature": 1e300}, "temperature = 1e+300 is not allowed"),
    ],
)
def test_wrong_values_give_one_line(values: dict[str, object], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_config(values)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_fewer_than_a_third_of_the_clients_may_be_corrupt() -> None:
    assert make_config({"num-corrupt": 3, "num-clients": 10}).num_corrupt == 3
    with pytest.raises(ConfigError):
        make_config({"num-corrupt": 3, "num-clients": 9})


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"attack": "bribery"}, "attack = 'bribery' is not allowed: none, "),
        ({"task": "mnist", "data-dir": "/nonexistent"}, "data-dir"),
        ({"model": "transformer"}, "transformer"),
        ({"num-clients": 5000}, "5000"),
        (
            {
                "algorithm": "fa-ld",
                "task": "bayes-linear",
                "num-clients": 2,
                "examples-per-client": 1,
            },
            "2 examples leave directions of the 10 open: set prior-precision above 0",
        ),
    ],
)
def test_what_only_the_data_can_tell_is_found_before_a_run(
    values: dict[str, object], expected: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    with pytest.raises(ConfigError) as caught:
        prepare(make_config({**values, "output-dir": str(folder)}))
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not folder.exists()


def test_an_earlier_run_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match="already holds a run"):
        prepare(make_config({"output-dir": str(tmp_path)}))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("local-lr=0.5", ("local-lr", 0.5)),
        ("attack=all-ones", ("attack", "all-ones")),
        ('model="mlp-25"', ("model", "mlp-25")),
        ("collusion = false", ("collusion", False)),
        ("data-dir=/some where/else", ("data-dir", "/some where/else")),
        ("data-dir=", ("data-dir", "")),
        ("input-shape=64", ("input-shape", "64")),
        ("output-dir=2026", ("output-dir", "2026")),
    ],
)
def test_settings_are_toml_values_or_plain_strings(text: str, expected: tuple[str, object]) -> None:
    assert parse_setting(text) == expected


@pytest.mark.parametrize("text", ["local-lr", "=3", ""])
def test_a_setting_without_key_or_value_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="key=value"):
        parse_setting(text)


def test_recipes_that_cannot_be_read_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        read_recipe(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_recipe(tmp_path)
    broken = tmp_path / "broken.toml"
    broken.write_text("a = = 1")
    with pytest.raises(ConfigError, match="not valid TOML"):
        read_recipe(broken)


def test_the_documented_table_is_the_declared_one(repository: Path) -> None:
    written = (repository / "docs" / "configuration.md").read_text()
    assert written == key_document(), "run: blackthorn keys --markdown > docs/configuration.md"
