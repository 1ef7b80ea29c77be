"""A node operator's own `flwr-clientapp`, which lies about what the honest app learns.

A SuperNode (or SuperExec) starts a program called `flwr-clientapp` for every message. Whoever
puts another program of this name first in the node's PATH decides what really runs there,
whatever bundle the server distributes. The program that `install_runner` writes takes Flower's
command line, unpacks the bundle and loads the ClientApp which it names, and answers train
messages with an attack from this installation of the package, not from the bundle's. The
environment variable BLACKTHORN_ATTACK names another attack than the one written down in it, and
BLACKTHORN_COLLUSION the service (`collusion`) through which the corrupt clients see each other.
"""

import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from flwr.clientapp import ClientApp
from flwr.supernode.cli import flwr_clientapp
from flwr.supernode.runtime import run_clientapp

from .byzantine_app import byzantine_app
from .collusion import Accomplices
from .registry import get

ATTACK_VARIABLE = "BLACKTHORN_ATTACK"
PROGRAM = "flwr-clientapp"

LoadClientApp = Callable[..., ClientApp]

# The first two lines are a shell script that hands the file to the interpreter, whose path may
# be too long for a #! line, and to that interpreter a string. The package is loaded under a name
# of its own, so that it neither hides the bundle's `attacks` nor is hidden by it.
_RUNNER = """\
#!/bin/sh
'''exec' {interpreter} -P "$0" "$@"
' '''
import importlib.util
import sys

spec = importlib.util.spec_from_file_location(
    "byzantine_attacks", {init!r}, submodule_search_locations=[{folder!r}]
)
package = importlib.util.module_from_spec(spec)
sys.modules["byzantine_attacks"] = package
spec.loader.exec_module(package)

from byzantine_attacks.flwr_clientapp import main

main({attack!r})
"""


def install_runner(folder: Path, attack: str) -> Path:
    """Write the program into `folder` (made if need be) and return its path.

    `folder` is what goes first into the PATH of the Byzantine SuperNode. ValueError for an
    attack that `attacks.get` does not know.
    """
    get(attack)
    package = Path(__file__).resolve().parent
    script = _RUNNER.format(
        interpreter=shlex.quote(sys.executable),
        init=str(package / "__init__.py"),
        folder=str(package),
        attack=attack,
    )
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / PROGRAM
    program.write_text(script, encoding="utf-8")
    program.chmod(0o755)
    return program


def main(attack: str = "") -> None:
    """Run Flower's `flwr-clientapp` on this process's command line, with a Byzantine app.

    The environment's attack comes before `attack`; exits with one line if neither is known.
    """
    name = os.environ.get(ATTACK_VARIABLE) or attack
    try:
        get(name)
    except ValueError as error:
        sys.exit(f"{PROGRAM}: {error}; set {ATTACK_VARIABLE}")
    try:
        accomplices = Accomplices.from_environment()
    except (OSError, ValueError) as error:
        sys.exit(f"{PROGRAM}: the collusion service's settings cannot be used: {error}")
    load_fn = lying(run_clientapp.get_load_client_app_fn, name, accomplices)
    run_clientapp.get_load_client_app_fn = load_fn
    flwr_clientapp()


def lying(
    get_load_fn: Callable[..., LoadClientApp],
    attack: str,
    accomplices: Accomplices | None = None,
) -> Callable[..., LoadClientApp]:
    """Flower's factory of ClientApp loaders, changed to wrap the app each of them loads."""

    def get_lying_load_fn(*args: object, **kwargs: object) -> LoadClientApp:
        load = get_load_fn(*args, **kwargs)
        return lambda *bundle: byzantine_app(load(*bundle), attack, accomplices)

    return get_lying_load_fn
