"""The run configuration: its keys checked together, from recipes, options and Flower."""

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError, model_validator

from blackthorn.settings.combinations import check_combinations
from blackthorn.settings.credentials import check_no_credentials
from blackthorn.settings.declaration import ConfigError, KeyGroup, Scalar, kebab
from blackthorn.settings.key_facts import place_keys
from blackthorn.settings.keys import Keys
from blackthorn.settings.own_code import OWN_CODE_KEYS, name_of_copy
from blackthorn.settings.privacy_checks import claims_anything


class RunConfig(Keys):
    """Everything that decides what a run computes. Keys are written in kebab-case."""

    @model_validator(mode="before")
    @classmethod
    def _check_secrets(cls, values: Any) -> Any:
        # Before any other message could show the value.
        if isinstance(values, Mapping):
            check_no_credentials(values)
        return values

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        check_combinations(self)
        return self


def config_keys() -> list[str]:
    """All keys, in kebab-case, in the order of declaration."""
    return [kebab(name) for name in RunConfig.model_fields]


def make_config(values: Mapping[str, Any]) -> RunConfig:
    """Check kebab-case `values` and fill in the defaults.

    Raises ConfigError with one line that names the key, the value and what is allowed.
    """
    check_known(values, config_keys(), "see blackthorn keys")
    try:
        return RunConfig.model_validate(dict(values))
    except ValidationError as error:
        raise ConfigError(one_line(error)) from None


def check_known(values: Mapping[str, Any], keys: Sequence[str], where: str) -> None:
    """Raises ConfigError for the first key of `values` that is none of `keys`."""
    for key in values:
        if key not in keys:
            near = difflib.get_close_matches(key, keys, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"unknown key {key}{hint} ({where})")


def one_line(error: ValidationError) -> str:
    """The first of a validation's mistakes: key, value and what is allowed."""
    first = error.errors()[0]
    if not first["loc"]:
        return str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "missing":
        return f"{kebab(str(first['loc'][0]))} is not set: it has no default"
    message = first["msg"].removeprefix("Input ").removeprefix("Value error, ")
    return f"{first['loc'][0]} = {first['input']!r} is not allowed: {message}"


def to_mapping(config: RunConfig) -> dict[str, Scalar]:
    """The configuration as kebab-case keys and plain scalars (what Flower's run config holds)."""
    return config.model_dump(by_alias=True)


def as_released(config: RunConfig) -> dict[str, Scalar]:
    """As `to_mapping`; under a claim, of what does not say whose machine ran it: places are left
    out, and own code has the names of the copies in the run's folder."""
    if not claims_anything(config):
        return to_mapping(config)
    told = {key: value for key, value in to_mapping(config).items() if key not in place_keys()}
    return {**told, **{key: name_of_copy(key, str(told[key])) for key in OWN_CODE_KEYS}}


def read_recipe(path: Path) -> dict[str, Any]:
    """Values of a recipe (TOML, flat, kebab-case keys). Raises ConfigError with one line."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"recipe {path} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"recipe {path} cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"recipe {path} is not valid TOML: {error}") from None


def parse_setting(text: str) -> tuple[str, Any]:
    """Turn `key=value` from the command line into a key and a TOML value (else a string).

    The value of a key that holds text is text whatever it looks like: input-shape=64.
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {text} is not allowed: write --set key=value")
    try:
        parsed = tomllib.loads(f"value = {value.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()
    field = RunConfig.model_fields.get(key.strip().replace("-", "_"))
    if field is not None and field.annotation is str and not isinstance(parsed, str):
        parsed = value.strip()
    return key.strip(), parsed


def read_options(text: str, declared: type[KeyGroup] | None) -> dict[str, Any]:
    """An algorithm's own options: the values of `text`, the key `algorithm-options`, such as
    "low = 0.1, high = 1", and the defaults of what it leaves out.

    By the names of the fields of `declared` (None: the algorithm has no options). Raises
    ConfigError, one line, for what is no list of TOML values, an option that is not there, and a
    value that it does not take.
    """
    values = _options(text)
    if declared is None:
        if values:
            raise ConfigError(
                f'algorithm-options = "{text}" is not allowed: the algorithm has no options'
            )
        return {}
    try:
        options = [kebab(name) for name in declared.model_fields]
        check_known(values, options, f"the algorithm's options are {', '.join(options)}")
        return dict(declared.model_validate(values))
    except ValidationError as error:
        raise ConfigError(f"algorithm-options: {one_line(error)}") from None
    except ConfigError as error:
        raise ConfigError(f"algorithm-options: {error}") from None


def _options(text: str) -> dict[str, Any]:
    try:
        (values,) = tomllib.loads(f"options = {{ {text} }}").values()
    except (tomllib.TOMLDecodeError, ValueError) as error:
        raise ConfigError(
            f'algorithm-options = "{text}" is not allowed: write TOML values such as "low = 0.1, '
            f'high = 1" ({error})'
        ) from None
    return dict(values)
