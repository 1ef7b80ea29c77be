"""From a recipe, --set and other options of the command line to a checked run configuration."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from blackthorn.settings.config import (
    RunConfig,
    config_keys,
    make_config,
    parse_setting,
    read_recipe,
)
from blackthorn.settings.own_code import OWN_CODE_KEYS, absolute

Recipe = Annotated[Path, typer.Argument(help="Recipe: a TOML file of run-config keys.")]


def _complete_key(incomplete: str) -> list[str]:
    return [f"{key}=" for key in config_keys() if key.startswith(incomplete)]


Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a key of the recipe (repeatable).",
        autocompletion=_complete_key,
    ),
]
OutputDir = Annotated[
    str | None, typer.Option(help="Run folder; by default a new one under runs/.")
]


def recipe_config(
    recipe: Path | None,
    settings: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> RunConfig:
    """The recipe's values, overridden by `key=value` settings, overridden by `options`.

    `defaults` hold for keys that none of them names. Raises ConfigError with one line.
    """
    values = dict(defaults or {})
    values.update(read_recipe(recipe) if recipe is not None else {})
    values.update(parse_setting(text) for text in settings)
    values.update({key: value for key, value in (options or {}).items() if value is not None})
    for key in OWN_CODE_KEYS:
        name = values.get(key)
        if isinstance(name, str):
            folders = (Path.cwd(), *([] if recipe is None else [recipe.absolute().parent]))
            values[key] = absolute(name, *folders)
    return make_config(values)
