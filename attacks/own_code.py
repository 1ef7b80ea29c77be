"""Functions of the user's own, which a configuration names as FILE.py:FUNCTION."""

import importlib.util
import re
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

_NAME = re.compile(r"(?P<file>.+\.py):(?P<function>[A-Za-z_]\w*)")


def is_own_code(name: str) -> bool:
    """Whether `name` has the form FILE.py:FUNCTION."""
    return _NAME.fullmatch(name) is not None


def own_function(name: str) -> Callable[..., Any]:
    """The function that FILE.py:FUNCTION names; the file is run once in a process.

    A relative path is looked for in the working folder, then along the module path, where the
    files of a bundled app are. Raises ValueError, one line, for a file that is not there or
    cannot be imported, or a function that it lacks.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"{name!r} is not of the form FILE.py:FUNCTION")
    module = _module(_existing(match["file"]).resolve())
    function = getattr(module, match["function"], None)
    if not callable(function):
        raise ValueError(f"{match['file']} has no function {match['function']}")
    return function


def absolute(name: str, folder: Path) -> str:
    """FILE.py:FUNCTION with a relative FILE taken from `folder`; any other name as it is."""
    match = _NAME.fullmatch(name)
    if match is None:
        return name
    return f"{(folder / Path(match['file']).expanduser()).resolve()}:{match['function']}"


def _existing(file: str) -> Path:
    for folder in (".", *sys.path):
        path = Path(folder) / Path(file).expanduser()
        if path.is_file():
            return path
    raise ValueError(f"{file} does not exist")


@lru_cache
def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"own_code_{path.stem}", path)
    assert spec is not None and spec.loader is not None  # as the name ends in .py
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    return module
