"""Functions and classes of the user's own, which a configuration names as FILE.py:NAME."""

import hashlib
import importlib.util
import inspect
import re
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

# Keys of the run configuration that may name one: what clients run of it, and what the server does.
CLIENT_CODE_KEYS = ("algorithm", "task", "model", "data", "loss", "trainer", "evaluate")
OWN_CODE_KEYS = (*CLIENT_CODE_KEYS, "test-data", "aggregator", "attack")
# How the name of a module begins that is a file of the user's own.
OWN_MODULE = "own_code_"
# The folder of their copies in an app or a run's folder.
_COPIES = "own_code"
_ONE_FILE = (
    "own code is one file, which a run keeps and sends: put what it imports of yours into it, or "
    "install that as a package"
)
# So many characters of what own code says are told.
_TOLD = 200
# What `failure` says, and what is said of a function that gave what it may not.
_FAILURE = re.compile(
    r"(?P<what>.*\.py:[A-Za-z_]\w*\b.*?)"
    r"( gave (?P<given>.+?)( = .*)?"
    r"| failed( for client \d+)?: (?P<kind>\w+): .*?(?P<line> \(line \d+\))?)"
)
_NAME = re.compile(r"(?P<file>.+\.py):(?P<function>[A-Za-z_]\w*)")


def is_own_code(name: str) -> bool:
    """Whether `name` has the form FILE.py:FUNCTION."""
    return _NAME.fullmatch(name) is not None


def short_name(name: str) -> str:
    """NAME of FILE.py:NAME; any other name as it is."""
    return name.rpartition(":")[2]


def own_function(name: str) -> Callable[..., Any]:
    """The function that FILE.py:FUNCTION names; the file is run once in a process, and again where
    it has changed before `read_anew`.

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


def offer(function: Callable[..., Any], *args: Any, **offered: Any) -> Any:
    """What the function gives for `args`, and those of `offered` that it has a name for."""
    parameters = inspect.signature(function).parameters.values()
    every = any(one.kind is one.VAR_KEYWORD for one in parameters)
    named = {one.name for one in parameters if one.kind is not one.POSITIONAL_ONLY}
    return function(*args, **{key: offered[key] for key in offered if every or key in named})


def guarded_function(name: str) -> Callable[..., Any]:
    """`own_function`, whose exceptions of whatever kind are ValueErrors of one line."""
    function = own_function(name)

    # Also of a class, whose attributes are not the wrapper's.
    @wraps(function, updated=())
    def guarded(*args: Any, **kwargs: Any) -> Any:
        with in_one_line(name):
            return function(*args, **kwargs)

    return guarded


class OwnCodeFailed(ValueError):
    """Code of the user's own has raised, or given what it may not; the message is one line."""


@contextmanager
def in_one_line(name: str, client: int | None = None) -> Iterator[None]:
    """Exceptions of whatever kind, out of FILE.py:NAME or because of what it gave, become
    OwnCodeFailed, by `failure`; so does a SystemExit, but for that of a signal.

    A ValueError of Blackthorn's in which no line of the user's has a part keeps its reason; a kind
    of it that Blackthorn declares is raised as it is. `client`: for whom it was called.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        raised_by_us = _is_ours(_raised_in(error))
        if isinstance(error, ValueError) and _is_ours(type(error).__module__):
            raise
        if type(error) is ValueError and raised_by_us and not _lines(error):
            raise OwnCodeFailed(str(error)) from error
        if isinstance(error, SystemExit) and raised_by_us:
            raise
        raise OwnCodeFailed(failure(name, error, client)) from error


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
    return f"{in_one_of(folders, match['file'])}:{match['function']}"


def in_one_of(folders: Sequence[Path], file: str) -> Path:
    """The absolute path of a file: from the first of `folders` that has it, else of all."""
    paths = [(folder / Path(file).expanduser()).resolve() for folder in folders]
    return next((path for path in paths if path.is_file()), paths[0])


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


def failure(name: str, error: BaseException, client: int | None = None) -> str:
    """One line: what FILE.py:FUNCTION raised, for which client, and in which line of FILE."""
    lines = _lines(error)
    where = f" (line {lines[-1]})" if lines else ""
    whom = "" if client is None else f" for client {client}"
    return f"{name} failed{whom}: {_told(error)}{where}"


def place_of(reason: str) -> str | None:
    """What is alike where several clients fail for the same reason: of a `failure` the function,
    what it raised and the line; of what it gave the name. None where no own code is at fault."""
    found = _FAILURE.fullmatch(reason)
    if found is None:
        return None
    kind, line = found["kind"], found["line"]
    if found["given"]:
        return f"{found['what']} gave {found['given']}"
    return f"{found['what']} {kind} {line}" if line else reason


def _told(error: BaseException) -> str:
    """Its kind and text in one line, which is not long; of an import what to do about it."""
    words = " ".join(f"{type(error).__name__}: {error}".split())
    if isinstance(error, ModuleNotFoundError) or "relative import" in words:
        return f"{words}: {_ONE_FILE}"
    return words if len(words) <= _TOLD else f"{words[:_TOLD]}..."


def _lines(error: BaseException, *files: str) -> list[int]:
    """The lines of the user's files, or of `files`, through which it came, the innermost last."""
    own = files or {module.__file__ for module in _modules.values()}
    return [f.lineno or 0 for f in traceback.extract_tb(error.__traceback__) if f.filename in own]


def _raised_in(error: BaseException) -> str:
    """The name of the module that raised it."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__"))


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in ("blackthorn", "flwr")


def _existing(file: str) -> Path:
    for folder in (".", *sys.path):
        path = Path(folder) / Path(file).expanduser()
        if path.is_file():
            return path
    raise ValueError(f"{file} does not exist")


def read_anew() -> None:
    """Another run begins, whose files may have changed since the last one's were read."""
    _read.clear()


def _module(path: Path) -> ModuleType:
    """The module of the file as it was when it was read: whoever changes it while a run goes on
    changes nothing of the run."""
    if path not in _read:
        _read[path] = _module_of_content(path)
    return _read[path]


def _module_of_content(path: Path) -> ModuleType:
    """One for all files in a folder that hold the same, as the copies do of one file which several
    keys name."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    place = f"{path.parent}/{hashlib.sha256(content).hexdigest()}"
    if place not in _modules:
        _modules[place] = _executed(path)
    return _modules[place]


# By path, and by folder and content.
_read: dict[Path, ModuleType] = {}
_modules: dict[str, ModuleType] = {}


def _executed(path: Path) -> ModuleType:
    # Known by its name, as dataclasses in it need, which two files of one name do not share.
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    spec = importlib.util.spec_from_file_location(f"{OWN_MODULE}{path.stem}_{digest}", path)
    assert spec is not None and spec.loader is not None  # as the name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[spec.name]
        if isinstance(error, SystemExit) and _is_ours(_raised_in(error)):
            raise
        lines = _lines(error, str(path))
        where = f" (line {lines[-1]})" if lines else ""
        raise ValueError(f"{path} cannot be imported: {_told(error)}{where}") from error
    return module
