"""Which Blackthorn this is: where it lies, which code it has, and which extras are installed."""

import hashlib
import os
import re
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

# Has pyproject.toml and the components of the Flower app in it.
APP_ROOT = Path(__file__).resolve().parent
# The table in which a bundle's pyproject.toml says which code sent it.
SENT_FROM = "blackthorn"


def code_of(root: Path) -> str:
    """The version of the package in `root`, and a digest of the names and texts of its modules."""
    # In a checkout the packages are links.
    modules = {
        (Path(folder) / name).relative_to(root).as_posix()
        for folder, _, names in os.walk(root, followlinks=True)
        for name in names
        if name.endswith(".py")
    }
    digest = hashlib.sha256()
    for module in sorted(modules):
        text = (root / module).read_bytes()
        digest.update(f"{module} {len(text)}\n".encode() + text)
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return f"{project['version']} (code {digest.hexdigest()[:12]})"


# Of the code that was there when this was imported: a process that goes on with the modules it has
# loaded says which, whatever is installed by then.
CODE = code_of(APP_ROOT)


def difference(other: str, whose: str) -> str | None:
    """One line where another installation's CODE is not this one's, None where it is."""
    if other == CODE:
        return None
    return f"this is Blackthorn {CODE}, {whose} has {other}: install the same on both"


def sent_from(bundle: Path) -> str | None:
    """The CODE of the Blackthorn that staged the Flower app in `bundle`; None where none did."""
    project = tomllib.loads((bundle / "pyproject.toml").read_text(encoding="utf-8"))
    code = project.get("tool", {}).get(SENT_FROM, {}).get("code")
    return None if code is None else str(code)


class NotInstalled(ValueError):
    """Something needs an extra that is not installed; the message is one line that says which."""


def require(extra: str, what: str) -> None:
    """NotInstalled where `what` needs an extra of ours that is not here as a whole."""
    project = tomllib.loads((APP_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    absent = [
        name
        for requirement in project["optional-dependencies"][extra]
        if not _installed(name := re.split(r"[^\w.-]", requirement)[0])
    ]
    if absent:
        raise NotInstalled(_needs(what, ", ".join(absent), extra))


@contextmanager
def needing(extra: str, what: str) -> Iterator[None]:
    """Around imports of what only an extra brings: NotInstalled, a line for `what`, without it."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise NotInstalled(_needs(what, str(error.name), extra)) from error


def _needs(what: str, absent: str, extra: str) -> str:
    return f'{what} needs {absent}, not installed here: pip install "blackthorn[{extra}]"'


def _installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True
