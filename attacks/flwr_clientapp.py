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

from blackthorn.flower_port.programs import run_clientapp_with

from .byzantine_app import byzantine_app
from .collusion import Accomplices
from .registry import get

ATTACK_VARIABLE = "BLACKTHORN_ATTACK"
PROGRAM = "flwr-clientapp"


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
    run_clientapp_with(lambda app: byzantine_app(app, name, accomplices))
