"""What `blackthorn server` and `blackthorn client` share: a place to work, and a clean end."""

import contextlib
import os
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from blackthorn.flower_port.programs import POLL_VARIABLE
from blackthorn.launch.processes import interrupts
from blackthorn.launch.processes.process_groups import ProcessKeeper
from blackthorn.launch.processes.supervisor import Supervisor

from .process_environment import ProcessEnvironment, end_marked

GRACE_SECONDS = 5.0
# On a network, a look for work is a request to somebody else's machine.
_POLL_SECONDS = "0.5"


@dataclass(frozen=True)
class Service:
    """A supervisor, the environment of its programs, and a folder that vanishes with them; what
    else ends with them goes on the `stack`."""

    supervisor: Supervisor
    environment: ProcessEnvironment
    stack: contextlib.ExitStack


@contextlib.contextmanager
def service(logs: Path, cwd: Path, *, warm: bool, stop_order: list[str]) -> Iterator[Service]:
    """A service whose programs have all ended when the block is left, whatever the reason.

    What they write is its user's alone, logs and Flower's store of every message among it.
    `stop_order` names the programs that are stopped one after the other, before the rest.
    """
    identity = uuid.uuid4().hex
    with contextlib.ExitStack() as stack:
        stack.enter_context(interrupts.termination_unwinds())
        # Inherited by all of them. The folders may have been there before, open to everybody.
        stack.callback(os.umask, os.umask(0o077))
        folder = Path(
            stack.enter_context(
                tempfile.TemporaryDirectory(prefix="blackthorn-", ignore_cleanup_errors=True)
            )
        )
        environment = ProcessEnvironment(
            folder,
            identity,
            1,
            warm=warm,
            quick_polls=True,
            env={POLL_VARIABLE: _POLL_SECONDS},
            fork_flower=False,
        )
        keeper = ProcessKeeper(folder)
        supervisor = Supervisor(keeper, logs, cwd, say)
        try:
            yield Service(supervisor, environment, stack)
        finally:
            with interrupts.deferred() as held:
                for name in stop_order:
                    supervisor.stop(name, GRACE_SECONDS, lambda: bool(held))
                keeper.close(lambda: bool(held))
                # ServerApps among them, which leave their runs' last states.
                end_marked(identity, 0.0 if held else GRACE_SECONDS)


def say(text: str) -> None:
    """One line for the person, or the log collector, that reads our standard error."""
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}", file=sys.stderr, flush=True)
