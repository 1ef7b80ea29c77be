"""The executables that Flower's processes start by name, put together in a folder for PATH.

Flower knows its own programs (`flower-superexec`, `flwr-serverapp`, `flwr-clientapp`) only by
name, so a folder in front of PATH decides what they are:

* forked from a server that has imported everything already (`warm_program`),
* a Python function in a process of its own (`cold_program`).
"""

import shlex
import sys
from pathlib import Path

from blackthorn.installation import APP_ROOT

from .fork_server import run_entry


def run_program() -> None:
    """`MODULE:FUNCTION NAME ARGUMENT ...`: run the function as the program NAME."""
    entry, *sys.argv = sys.argv[1:]
    sys.exit(run_entry(entry))


def python_command(entry: str) -> list[str]:
    """The command line that runs a function in a new Python, with this very package in it."""
    module, _, function = entry.partition(":")
    place = repr(str(APP_ROOT.parent))
    code = (
        f"import sys; sys.path.insert(0, {place}); import blackthorn; del sys.path[0]; "
        f"from {module} import {function}; {function}()"
    )
    return [sys.executable, "-P", "-c", code]


def warm_program(folder: Path, name: str, entry: str, server: Path) -> None:
    """Write the executable `name`: a stub for a fork of the server at that socket."""
    stub = Path(__file__).with_name("fork_stub.py")
    _write(folder, name, [sys.executable, "-I", "-S", str(stub), str(server), entry, name])


def cold_program(folder: Path, name: str, entry: str) -> None:
    """Write the executable `name`: a new Python that imports and runs the function."""
    _write(folder, name, [*python_command(f"{__name__}:run_program"), entry, name])


def _write(folder: Path, name: str, command: list[str]) -> None:
    # Through the shell: a "#!" line can hold neither spaces nor a second argument.
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / name
    program.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    program.chmod(0o755)
