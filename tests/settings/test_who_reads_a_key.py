"""Who reads a key is declared with it: what nobody reads is refused or told, and changes nothing;
about what is read no word is lost."""

from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import numpy as np
import pytest
from digits_runs import configuration, model
from rich.console import Console

from blackthorn.launch.commands.simulate import simulate
from blackthorn.server_app.run import prepare
from blackthorn.settings.catalogue import ALGORITHMS
from blackthorn.settings.config import ConfigError, RunConfig, config_keys, make_config, to_mapping
from blackthorn.settings.declaration import BY_ALGORITHM
from blackthorn.settings.key_facts import (
    free_between_chains,
    free_on_resume,
    marked,
    place_keys,
    readers_of,
    unread,
    unused_settings,
)

# Runs that differ in what they read.
BASES: dict[str, dict[str, Any]] = {
    "digits": {},
    "an attack, and rage": {
        "algorithm": "rage",
        "num_clients": 5,
        "num_byzantine": 1,
        "num_corrupt": 1,
        "attack": "sign-flip",
        "participation": "fixed",
        "clients_per_round": 4,
    },
    "quadratic-noise": {
        "task": "quadratic-noise",
        "model": "auto",
        "partition": "iid",
        "examples_per_client": 0,
        "noise_law": "stable",
        "noise_alpha": 1.5,
        "batch_size": 4,
    },
    "fa-ld": {
        "task": "bayes-linear",
        "algorithm": "fa-ld",
        "partition": "iid",
        "model": "auto",
        "local_lr": 0.001,
        "langevin_seed": 5,
    },
    "seeded noise": {
        "algorithm": "dp-fedavg",
        "noise_multiplier": 0.5,
        "clip_norm": 1.0,
        "insecure_seeded_noise": True,
    },
    "seeded DP-SGD": {
        "local_dp_sgd": True,
        "dp_sgd_sample_rate": 0.2,
        "batch_size": 10,
        "insecure_seeded_noise": True,
    },
}


def base(folder: Path, name: str) -> RunConfig:
    options = {"num_server_rounds": 2, "instruments": False, **BASES[name]}
    config = configuration(folder, **options)
    prepare(config)
    return config


def others(key: str) -> list[Any]:
    """Values of a key beside its default."""
    field = RunConfig.model_fields[key.replace("-", "_")]
    default = field.default
    if get_origin(field.annotation) is Literal:
        return [value for value in get_args(field.annotation) if value != default]
    if isinstance(default, bool):
        return [not default]
    if isinstance(default, int):
        return [default + 1, default + 2]
    if isinstance(default, float):
        return [value for value in (0.5, 0.25, 1.5, 2.0, default + 1) if value != default]
    return {"model": ["mlp-4"], "attack": ["all-ones"], "input-shape": ["1,8,8"]}.get(key, ["x"])


def with_another(config: RunConfig, key: str) -> RunConfig | None:
    """The same but for the key; None where every other value is refused."""
    for value in others(key):
        try:
            return prepare(make_config({**to_mapping(config), key: value})).config
        except ConfigError:
            continue
    return None


def unread_keys(config: RunConfig) -> list[str]:
    return [key for key in config_keys() if unread(config, key) is not None]


@pytest.mark.parametrize("name", BASES)
def test_a_key_that_nothing_reads_is_refused_or_told_whichever_it_is(
    tmp_path: Path, name: str
) -> None:
    config = base(tmp_path, name)
    assert unread_keys(config)
    for key in unread_keys(config):
        changed = with_another(config, key)
        if changed is not None:
            told = [line for line in unused_settings(changed) if line.startswith(f"{key} = ")]
            assert len(told) == 1, key
            assert " is not used: " in told[0]


@pytest.mark.parametrize("name", BASES)
def test_keys_that_nothing_reads_change_no_number_of_a_run(tmp_path: Path, name: str) -> None:
    """All of them at once."""
    config = base(tmp_path / "one", name)
    changed = make_config({**to_mapping(config), "output-dir": str(tmp_path / "other")})
    set_otherwise = 0
    for key in unread_keys(config):
        after = with_another(changed, key)
        # Some of them choose who reads others.
        if after is not None and set(unread_keys(config)) <= set(unread_keys(after)):
            changed, set_otherwise = after, set_otherwise + 1
    assert set_otherwise > 12
    for one in (config, changed):
        simulate(one, Console(quiet=True))
    np.testing.assert_array_equal(model(tmp_path / "one"), model(tmp_path / "other"))


def test_what_the_recipes_set_is_read(repository: Path) -> None:
    from blackthorn.settings.config import read_recipe

    for recipe in sorted((repository / "recipes").glob("*.toml")):
        config = make_config(read_recipe(recipe))
        assert [line for line in unused_settings(config) if "is not used" in line] == [], recipe


def test_every_reader_is_chosen_by_a_key_and_values_that_there_are() -> None:
    keys = set(config_keys())
    for key in keys:
        for reader in readers_of(key):
            if reader.chooser == "noise":
                continue
            assert reader.chooser in keys - {key}
            field = RunConfig.model_fields[reader.chooser.replace("-", "_")]
            if get_origin(field.annotation) is Literal:
                assert set(reader.values) <= set(get_args(field.annotation)), key
            else:
                assert {type(value) for value in reader.values} == {type(field.default)}, key


def test_the_keys_of_algorithms_are_those_that_rows_of_the_catalogue_name() -> None:
    named = {key for facts in ALGORITHMS.values() for key in facts.keys}
    assert named == set(marked(BY_ALGORITHM))


def test_what_may_differ_and_what_names_a_place() -> None:
    """Written down a second time, so that a mark too many or too few is seen."""
    assert set(free_on_resume()) == {
        *("resume", "output-dir", "data-dir", "num-server-rounds", "round-timeout"),
        *("start-timeout", "checkpoint-every", "state-every", "below-quorum", "fail-after"),
        *("report", "tensorboard", "mlflow-uri", "client-processes"),
    }
    assert set(free_between_chains()) - set(free_on_resume()) == {
        *("langevin-seed", "burn-in", "max-samples", "initial-point", "evaluate-every"),
        *("instruments", "chain", "chains"),
    }
    assert set(place_keys()) == {
        *("data-dir", "ledger", "mlflow-uri", "output-dir", "resume", "trusted-data"),
        "initial-model",
    }
