"""A node operator's own `flwr-clientapp`, which lies about what the honest app learns.

A SuperNode (or SuperExec) starts a program called `flwr-clientapp` for every message. Whoever
puts another program of this name first in the node's PATH decides what really runs there,
whatever bundle the server distributes. `main`, under that name, takes Flower's command line,
unpacks the bundle and loads the ClientApp which it names, and answers train messages with an
attack. The environment variable BLACKTHORN_ATTACK names the attack, and BLACKTHORN_COLLUSION the
service (`collusion`) through which the corrupt clients see each other.
"""

import os
import sys
from collections.abc import Callable

from flwr.clientapp import ClientApp
from flwr.supernode.cli import flwr_clientapp
from flwr.supernode.runtime import run_clientapp

from .byzantine_app import byzantine_app
from .collusion import Accomplices
from .registry import get

ATTACK_VARIABLE = "BLACKTHORN_ATTACK"
PROGRAM = "flwr-clientapp"

LoadClientApp = Callable[..., ClientApp]


def main() -> None:
    """Run Flower's `flwr-clientapp` on this process's command line, with a Byzantine app.

    Exits with one line if the environment's attack is not known.
    """
    name = os.environ.get(ATTACK_VARIABLE, "")
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
