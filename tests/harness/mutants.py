"""A mutant of a module: its source with one change, in force for as long as a test looks at it."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType, ModuleType

import pytest

Killer = Callable[[Path, pytest.MonkeyPatch], None]


def killed_by(test: Callable[..., None], *arguments: object) -> Killer:
    """Runs a test of another file: ``arguments`` are for its parameters, in their order, but for
    ``tmp_path`` and ``monkeypatch``, which are the caller's."""
    names = inspect.signature(test).parameters

    def kill(folder: Path, patch: pytest.MonkeyPatch) -> None:
        fixtures: dict[str, object] = {"tmp_path": folder, "monkeypatch": patch}
        own = [name for name in names if name not in fixtures]
        given = {**fixtures, **dict(zip(own, arguments, strict=True))}
        test(**{name: given[name] for name in names})

    return kill


@contextmanager
def mutated(module: ModuleType, *changes: tuple[str, str]) -> Iterator[None]:
    """The functions and methods of ``module`` run the source in which the old text of each of the
    ``changes``, which must be there once, is the new one; whoever has imported them, from wherever,
    runs it too."""
    source = inspect.getsource(module)
    for old, new in changes:
        assert source.count(old) == 1, f"{old!r} is {source.count(old)} times in {module.__name__}"
        source = source.replace(old, new)
    namespace = {"__name__": module.__name__, "__file__": module.__file__}
    exec(compile(source, f"mutant of {module.__file__}", "exec"), namespace)
    mutants = dict(_functions(namespace, module.__name__))
    live = dict(_functions(vars(module), module.__name__))
    assert live.keys() == mutants.keys()
    codes = {name: function.__code__ for name, function in live.items()}
    try:
        for name, function in live.items():
            function.__code__ = mutants[name].__code__
        yield
    finally:
        for name, function in live.items():
            function.__code__ = codes[name]


def _functions(names: Mapping[str, object], module: str) -> Iterator[tuple[str, FunctionType]]:
    """The functions that ``module`` defines, and the methods of its classes, by qualified name."""
    for found in names.values():
        inner = vars(found).values() if inspect.isclass(found) else [found]
        if getattr(found, "__module__", None) != module:
            continue
        for one in inner:
            behind = _behind(one)
            plain = inspect.unwrap(behind) if callable(behind) else None
            if isinstance(plain, FunctionType) and plain.__module__ == module:
                yield plain.__qualname__, plain


def _behind(one: object) -> object:
    if isinstance(one, property):
        return one.fget
    return one.__func__ if isinstance(one, classmethod | staticmethod) else one
