"""From a recipe, --set and other options of the command line to a checked run configuration."""

import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any

import typer

from blackthorn.installation import APP_ROOT
from blackthorn.settings.config import (
    ConfigError,
    RunConfig,
    config_keys,
    make_config,
    parse_setting,
    read_recipe,
)
from blackthorn.settings.own_code import OWN_CODE_KEYS, absolute, in_one_of

INITIAL_MODEL = "initial-model"
_OWN = APP_ROOT / "recipes"

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


def recipe_file(recipe: Path) -> Path:
    """The recipe's file; what is no file's name may be that of one of Blackthorn's own recipes.

    Raises ConfigError for another name.
    """
    if recipe.suffix or recipe.is_file():
        return recipe
    files = _own_recipes()
    if recipe.as_posix() not in files:
        names = ", ".join(files)
        raise ConfigError(f"recipe {recipe} does not exist; Blackthorn's own are {names}")
    return files[recipe.as_posix()]


def _own_recipes() -> dict[str, Path]:
    """Blackthorn's own, by name."""
    files = sorted(_OWN.rglob("*.toml"))
    return {file.relative_to(_OWN).with_suffix("").as_posix(): file for file in files}


def recipe_lines() -> list[str]:
    """A line for each of Blackthorn's own recipes: its name and what its first comment says."""
    files = _own_recipes()
    width = max(map(len, files))
    return [f"{name:{width}}  {_about(file)}" for name, file in files.items()]


def _about(file: Path) -> str:
    """The comment at the file's head, up to its first full stop or colon."""
    lines = file.read_text(encoding="utf-8").splitlines()
    comment = " ".join(line[1:].strip() for line in takewhile(lambda x: x.startswith("#"), lines))
    return re.split(r"(?<=[^.\d]{2})[.:;](?: |$)", comment, maxsplit=1)[0]


def copy_recipes(names: Sequence[str], folder: Path) -> list[Path]:
    """Copies of Blackthorn's own recipes, each with the code that lies beside it under its name.

    Raises ConfigError, one line, before anything is copied: a name that is not known, a file that
    is there already, a folder that cannot be written.
    """
    files = [recipe_file(Path(name)) for name in names]
    for name, file in zip(names, files, strict=True):
        if not file.is_relative_to(_OWN):
            raise ConfigError(
                f"recipe {name} is none of Blackthorn's own: {', '.join(_own_recipes())}"
            )
    beside = [path for file in files for path in (file, file.with_suffix(".py")) if path.is_file()]
    copies = [folder / path.name for path in beside]
    for copy in copies:
        if copy.exists():
            raise ConfigError(f"{copy} is there already: choose another --output-dir")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, copy in zip(beside, copies, strict=True):
            copy.write_bytes(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror}") from None
    return copies


def recipe_config(
    recipe: Path | None,
    settings: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> RunConfig:
    """The recipe's values, overridden by `key=value` settings, overridden by `options`.

    `defaults` hold for keys that none of them names. Raises ConfigError with one line.
    """
    recipe = None if recipe is None else recipe_file(recipe)
    values = dict(defaults or {})
    values.update(read_recipe(recipe) if recipe is not None else {})
    values.update(parse_setting(text) for text in settings)
    values.update({key: value for key, value in (options or {}).items() if value is not None})
    folders = (Path.cwd(), *([] if recipe is None else [recipe.absolute().parent]))
    for key in OWN_CODE_KEYS:
        name = values.get(key)
        if isinstance(name, str):
            values[key] = absolute(name, *folders)
    weights = values.get(INITIAL_MODEL)
    if isinstance(weights, str) and weights:
        values[INITIAL_MODEL] = str(in_one_of(folders, weights))
    return make_config(values)
