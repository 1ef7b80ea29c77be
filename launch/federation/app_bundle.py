"""What goes to the nodes with a run: the app's components, the run's configuration, own code.

The package `blackthorn` does not: every machine runs the one that is installed there.
"""

import shutil
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

import tomli_w

from blackthorn.installation import CODE, SENT_FROM
from blackthorn.settings.own_code import copy_name, is_own_code

Scalar = str | int | float | bool

# What Flower loads: each takes its app from the package that is installed.
COMPONENTS = (
    *("client_app/__init__.py", "client_app/app.py"),
    *("server_app/__init__.py", "server_app/app.py"),
)
_BUNDLED_SUFFIXES = {".py", ".toml", ".md", ".yaml", ".yml", ".json", ".jsonl"}
_PROJECT = "pyproject.toml"
_LICENSE = "LICENSE"


def stage_app(app_dir: Path, parts: Sequence[str], target: Path) -> Path:
    """Copy `pyproject.toml` and the named folders and files of the app at `app_dir` to `target`.

    Flower bundles every source and text file below the folder it is given (at most 10 MB), and
    may rewrite its pyproject.toml; the copy holds only what the nodes need, and takes the blow.
    ValueError if `app_dir` has no pyproject.toml or lacks one of the parts.
    """
    if not (app_dir / _PROJECT).is_file():
        raise ValueError(f"app folder {app_dir}: there is no {_PROJECT} in it")
    target.mkdir(parents=True)
    project = tomllib.loads((app_dir / _PROJECT).read_text(encoding="utf-8"))
    # All of the copy goes, own code too.
    tools = project.setdefault("tool", {})
    tools.get("flwr", {}).get("app", {}).pop("fab-include", None)
    tools[SENT_FROM] = {"code": CODE}
    (target / _PROJECT).write_text(tomli_w.dumps(project), encoding="utf-8")
    if (app_dir / _LICENSE).is_file():
        shutil.copy2(app_dir / _LICENSE, target / _LICENSE)
    for part in parts:
        if (app_dir / part).is_dir():
            shutil.copytree(app_dir / part, target / part, ignore=_unbundled)
        elif (app_dir / part).is_file():
            (target / part).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(app_dir / part, target / part)
        else:
            raise ValueError(f"app folder {app_dir}: there is no {part} in it")
    return target


def bundle_own_code(
    app: Path, run_config: Mapping[str, Scalar], keys: Sequence[str]
) -> dict[str, Scalar]:
    """Copy the files that FILE.py:FUNCTION names under these keys to `own_code` in the staged app.

    Returns the configuration with the names that the copies have for whoever gets the bundle.
    """
    changed = dict(run_config)
    for key in keys:
        name = str(run_config.get(key))
        if not is_own_code(name):
            continue
        file, _, function = name.rpartition(":")
        copy = copy_name(key, file)
        (app / copy).parent.mkdir(exist_ok=True)
        shutil.copy2(file, app / copy)
        changed[key] = f"{copy.as_posix()}:{function}"
    return changed


def _unbundled(folder: str, names: list[str]) -> list[str]:
    return [
        name
        for name in names
        if name == "__pycache__"
        or ((Path(folder) / name).is_file() and Path(name).suffix not in _BUNDLED_SUFFIXES)
    ]


def write_config(values: Mapping[str, Scalar], path: Path) -> Path:
    """Write flat key-value pairs as TOML, for `--run-config` or `--node-config`.

    A file takes any string; on the command line Flower splits at quotes inside a value.
    ValueError if a value is not a string, integer, float or boolean.
    """
    for key, value in values.items():
        if not isinstance(value, (str, int, float, bool)):
            raise ValueError(f"config key {key!r}: {value!r} is not a string, number or boolean")
    path.write_text(tomli_w.dumps(dict(values)), encoding="utf-8")
    return path
