"""The key `algorithm-options`: an algorithm's own options, which its class declares."""

import tomllib
from typing import Any

from pydantic import ValidationError

from blackthorn.settings.config import ConfigError, check_known, one_line
from blackthorn.settings.declaration import KeyGroup, kebab


def read_options(text: str, declared: type[KeyGroup] | None) -> dict[str, Any]:
    """The values of `text`, such as "low = 0.1, high = 1", and the defaults of what it leaves out.

    By the names of the fields of `declared` (None: the algorithm has no options). Raises
    ConfigError, one line, for what is no list of TOML values, an option that is not there, and a
    value that it does not take.
    """
    values = _values(text)
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


def _values(text: str) -> dict[str, Any]:
    try:
        (values,) = tomllib.loads(f"options = {{ {text} }}").values()
    except (tomllib.TOMLDecodeError, ValueError) as error:
        raise ConfigError(
            f'algorithm-options = "{text}" is not allowed: write TOML values such as "low = 0.1, '
            f'high = 1" ({error})'
        ) from None
    return dict(values)
