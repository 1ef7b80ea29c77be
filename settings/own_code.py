"""Functions and classes of the user's own, which a configuration names as FILE.py:NAME."""

import hashlib
import importlib.util
import re
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, wraps
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

# Keys of the run configuration that may name one.
OWN_CODE_KEYS = ("algorithm", "task", "model", "aggregator", "attack")
# How the name of a module begins that is a file of the user's own.
OWN_MODULE = "own_code_"
# The folder of their copies in an app or a run's folder.
_COPIES = "own_code"
_NAME = re.compile(r"(?P<file>.+\.py):(?P<function>[A-Za-z_]\w*)")


def is_own_code(name: str) -> bool:
    """Whether `name` has the form FILE.py:FUNCTION."""
    return _NAME.fullmatch(name) is not None


def short_name(name: str) -> str:
    """NAME of FILE.py:NAME; any other name as it is."""
    return name.rpartition(":")[2]


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


def guarded_function(name: str) -> Callable[..., Any]:
    """`own_function`, whose exceptions of whatever kind are ValueErrors of one line."""
    guarded: Callable[..., Any] = guard(own_function(name), name)
    return guarded


class OwnCodeFailed(ValueError):
    """Code of the user's own has raised, or given what it may not; the message is one line."""


@contextmanager
def in_one_line(name: str) -> Iterator[None]:
    """Exceptions of whatever kind, out of FILE.py:NAME or because of what it gave, become
    OwnCodeFailed; a ValueError keeps its reason, the user's own, and a kind of it its kind.
    """
    try:
        yield
    except ValueError as error:
        if type(error) is not ValueError:
            raise
        raise OwnCodeFailed(str(error)) from error
    except Exception as error:
        raise OwnCodeFailed(failure(name, error)) from error


def guard(function: Any, name: str, gives: type | None = None) -> Any:
    """A function or class method out of FILE.py:NAME whose exceptions are as by `in_one_line`, and
    which may only give what is of the kind `gives`; what is neither stays as it is."""
    if isinstance(function, classmethod):
        return classmethod(guard(function.__func__, name, gives))
    if not isinstance(function, FunctionType):
        return function

    @wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        with in_one_line(name):
            given = function(*args, **kwargs)
            if gives is not None and not isinstance(given, gives):
                raise OwnCodeFailed(
                    f"{name}: {function.__name__} gave {type(given).__name__}, not {gives.__name__}"
                )
            return given

    return guarded


def absolute(name: str, *folders: Path) -> str:
    """FILE.py:FUNCTION with a relative FILE taken from the first of `folders` that has it.

    From the first of all where none has it; any other name as it is.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        return name
    paths = [(folder / Path(match["file"]).expanduser()).resolve() for folder in folders]
    path = next((path for path in paths if path.is_file()), paths[0])
    return f"{path}:{match['function']}"


def keep(key: str, name: str, folder: Path) -> None:
    """Copy the FILE of FILE.py:FUNCTION, which a configuration has under `key`, into `folder`.

    A relative FILE keeps its name there: that is how a bundled app names its copy, which ends with
    the app. Another becomes own_code/KEY_FILE.py, as a bundled app would name it, for `kept` to
    find when the user's own has changed or is gone. OSError where it cannot be written.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        return
    source, target = _existing(match["file"]).resolve(), _copy(key, match["file"], folder)
    if source != target and target.is_relative_to(folder.resolve()):
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)


def kept(key: str, name: str, folder: Path) -> str:
    """FILE.py:FUNCTION with FILE the copy that `keep` left in `folder`, where it did.

    Without a copy, a relative FILE is taken from the working folder; any other name stays.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        return name
    copy = _copy(key, match["file"], folder)
    return f"{copy}:{match['function']}" if copy.is_file() else absolute(name, Path.cwd())


def copy_name(key: str, file: str) -> Path:
    """Where an app or a run folder has its copy of the FILE that is configured under `key`."""
    folder, name = Path(file).parent.name, Path(file).name
    if folder == _COPIES and name.startswith(f"{key}_"):
        # A copy's copy is the same.
        return Path(_COPIES) / name
    return Path(_COPIES) / f"{key}_{name}"


def name_of_copy(key: str, name: str) -> str:
    """FILE.py:FUNCTION with an absolute FILE as its copy is called in a run's folder, relative to
    that; any other name as it is."""
    match = _NAME.fullmatch(name)
    if match is None or not Path(match["file"]).expanduser().is_absolute():
        return name
    return f"{copy_name(key, match['file']).as_posix()}:{match['function']}"


def is_same_code(key: str, one: str, other: str, folder: Path) -> bool:
    """Whether two values of `key` name the same function, by the copy in `folder` if it is there:
    of a run that goes on from its copy, or from a bundle that has another. OSError where the file
    cannot be read."""
    if name_of_copy(key, one) != name_of_copy(key, other):
        return False
    match = _NAME.fullmatch(one)
    if match is None:
        return True
    copy = _copy(key, match["file"], folder)
    return not copy.is_file() or _existing(match["file"]).read_bytes() == copy.read_bytes()


def _copy(key: str, file: str, folder: Path) -> Path:
    path = Path(file).expanduser()
    return (folder / (copy_name(key, file) if path.is_absolute() else path)).resolve()


def failure(name: str, error: Exception) -> str:
    """One line: what FILE.py:FUNCTION raised, and in which line of FILE."""
    match = _NAME.fullmatch(name)
    file = Path(match["file"]).name if match else ""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).name == file]
    where = f" (line {frames[-1].lineno})" if frames else ""
    words = " ".join(f"{type(error).__name__}: {error}".split())
    return f"{name} failed: {words}{where}"


def _existing(file: str) -> Path:
    for folder in (".", *sys.path):
        path = Path(folder) / Path(file).expanduser()
        if path.is_file():
            return path
    raise ValueError(f"{file} does not exist")


@lru_cache
def _module(path: Path) -> ModuleType:
    # Known by its name, as dataclasses in it need, which two files of one name do not share.
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    spec = importlib.util.spec_from_file_location(f"{OWN_MODULE}{path.stem}_{digest}", path)
    assert spec is not None and spec.loader is not None  # as the name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[spec.name]
        raise ValueError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    return module
