"""Flower's own programs, with what we change in them; a ProcessEnvironment puts them first in PATH.

SuperNode and SuperExec wait a fixed 3, 1 and 0.5 seconds between two looks for work, and whoever
sees a message a moment before its content has arrived waits a second for it. Flower has no option
for these times. `supernode`, `superexec` and `serverapp` are the same programs with the waits
capped at BLACKTHORN_POLL_SECONDS; `clientapp` unpacks an app once and not for every message;
`superlink` has the guard in front of it (`guard/`), tells the nodes nothing of a run's
configuration that is the server's business alone, and waits for a locked database
(`superlink_store.py`); `superexec` waits as well, and under `blackthorn server` a ServerApp lives
by itself (`serverapp_process.py`).
Everything else about them is Flower's own.

All this is private to Flower: a `ProcessEnvironment` takes no version in which it is not known.
"""

import hashlib
import importlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from . import serverapp_process, superlink_store

if TYPE_CHECKING:
    from flwr.clientapp import ClientApp
    from flwr.proto.run_pb2 import Run as RunMessage
    from flwr.supercore.run import Run

# In a SuperNode's log, before the code and the words with which a call to the server has failed.
FAILED_CALL = "blackthorn: the server said "
# In a SuperNode's log, before what is wrong with this machine's clock.
CLOCK = "blackthorn: this machine's clock is "
POLL_VARIABLE = "BLACKTHORN_POLL_SECONDS"
STANDARD_ENTRIES = {
    "flower-superlink": "flwr.superlink.cli:flower_superlink",
    "flower-supernode": "flwr.supernode.cli:flower_supernode",
    "flower-superexec": "flwr.supercore.cli:flower_superexec",
    "flwr": "flwr.cli.app:app",
    "flwr-serverapp": "flwr.superlink.cli:flwr_serverapp",
    "flwr-clientapp": "flwr.supernode.cli:flwr_clientapp",
}
PACED_ENTRIES = {
    "flower-supernode": f"{__name__}:supernode",
    "flower-superexec": f"{__name__}:superexec",
    "flwr-serverapp": f"{__name__}:serverapp",
    "flwr-clientapp": f"{__name__}:clientapp",
}
GUARDED_ENTRIES = {"flower-superlink": f"{__name__}:superlink"}
# What a fork server imports before Flower's own programs are forked from it,
FLOWER_MODULES = (
    "flwr.superlink.cli",
    "flwr.supernode.cli",
    "flwr.supercore.cli",
    "flwr.cli.app",
)
# and before apps are.
MODULES_OF_APPS = (
    "flwr.superlink.cli",
    "flwr.supernode.cli",
    "flwr.clientapp",
    "flwr.serverapp.strategy",
)
# What Flower calls our app: the publisher and the name in pyproject.toml.
APP_ID = "blackthorn/blackthorn"
_LONGEST_RETRY_SECONDS = 5


class _PacedTime(ModuleType):
    """The module `time`, with sleeps of at most `longest` seconds."""

    def __init__(self, longest: float) -> None:
        super().__init__("time")
        self.__dict__.update(vars(time))
        self.sleep = lambda seconds: time.sleep(min(seconds, longest))


def _poll_seconds() -> float:
    return float(os.environ[POLL_VARIABLE])


def _cap_sleeps(module: str) -> None:
    vars(importlib.import_module(module))["time"] = _PacedTime(_poll_seconds())


def _cap_first_backoff() -> None:
    """The wait before content that was announced, but has not arrived, is asked for again."""
    from flwr.supercore.inflatable.inflatable_utils import pull_objects

    defaults = cast(dict[str, float], pull_objects.__kwdefaults__)
    defaults["initial_backoff"] = _poll_seconds()


def _retry_soon() -> None:
    """A server that is there again is found in seconds, where Flower may wait for twenty."""
    vars(importlib.import_module("flwr.supercore.retry.grpc_retry"))["MAX_RETRY_DELAY"] = (
        _LONGEST_RETRY_SECONDS
    )


def _tell_failures() -> None:
    """Each call that fails is a line with the server's own words, which Flower does not log."""
    module = vars(importlib.import_module("flwr.supernode.start_client_internal"))
    make = module["make_simple_grpc_retry_invoker"]

    def make_telling() -> Any:
        invoker = make()
        gives_up = invoker.should_giveup

        def tell(error: Any) -> bool:
            details = " ".join(str(error.details()).split())
            print(f"{FAILED_CALL}{error.code().name}: {details}", file=sys.stderr, flush=True)
            return bool(gives_up(error))

        invoker.should_giveup = tell
        return invoker

    module["make_simple_grpc_retry_invoker"] = make_telling


def _tell_clock() -> None:
    """What the guard says of a clock that is ahead is a line, once: Flower looks at no head."""
    from .guard.clocks import AHEAD_HEADER, SET_IT

    name = "flwr.client.grpc_rere_client.node_auth_client_interceptor"
    interceptor = vars(importlib.import_module(name))["NodeAuthClientInterceptor"]
    intercept = interceptor.intercept_unary_unary
    told: list[str] = []

    def intercept_and_tell(*call: Any) -> Any:
        answer = intercept(*call)
        ahead = dict(answer.initial_metadata() or ()).get(AHEAD_HEADER)
        if ahead and not told:
            told.append(ahead)
            print(f"{CLOCK}{ahead} s ahead of the server's: {SET_IT}", file=sys.stderr, flush=True)
        return answer

    interceptor.intercept_unary_unary = intercept_and_tell


def _plain_log() -> None:
    """Flower's log has date and time, and no colours where no terminal shows them."""
    logger = importlib.import_module("flwr.common.logger")
    logger.update_console_handler(timestamps=True, colored=sys.stderr.isatty())


def supernode() -> None:
    """`flower-supernode` that looks for messages and replies every BLACKTHORN_POLL_SECONDS."""
    _cap_sleeps("flwr.supernode.start_client_internal")
    _cap_first_backoff()
    _retry_soon()
    _tell_failures()
    _tell_clock()
    _plain_log()
    resolve_name(STANDARD_ENTRIES["flower-supernode"])()


def superexec() -> None:
    """`flower-superexec` that looks for tasks every BLACKTHORN_POLL_SECONDS, and waits for them."""
    serverapp_process.adapt_superexec()
    _plain_log()
    _retry_soon()
    _cap_sleeps("flwr.supercore.superexec.run_superexec")
    resolve_name(STANDARD_ENTRIES["flower-superexec"])()


def serverapp() -> None:
    """`flwr-serverapp` that asks again for a reply's content after BLACKTHORN_POLL_SECONDS."""
    serverapp_process.adapt_serverapp()
    _retry_soon()
    _cap_first_backoff()
    resolve_name(STANDARD_ENTRIES["flwr-serverapp"])()


def clientapp() -> None:
    """`flwr-clientapp` that unpacks the app once: Flower does it for every message."""
    module = importlib.import_module("flwr.supernode.runtime.run_clientapp")
    vars(module)["install_from_fab"] = install_once
    resolve_name(STANDARD_ENTRIES["flwr-clientapp"])()


def answer_with(app: "ClientApp") -> None:
    """`flwr-clientapp` that answers with `app`: what came with the run is not even unpacked."""
    module = importlib.import_module("flwr.supernode.runtime.run_clientapp")
    vars(module)["install_from_fab"] = lambda *_, **__: None
    vars(module)["get_load_client_app_fn"] = lambda **_: lambda *_bundle: app
    resolve_name(STANDARD_ENTRIES["flwr-clientapp"])()


def run_clientapp_with(change: "Callable[[ClientApp], ClientApp]") -> None:
    """`flwr-clientapp` with every app that it loads changed."""
    module = vars(importlib.import_module("flwr.supernode.runtime.run_clientapp"))
    module["get_load_client_app_fn"] = changing(module["get_load_client_app_fn"], change)
    resolve_name(STANDARD_ENTRIES["flwr-clientapp"])()


def changing(
    get_load_fn: Callable[..., Any], change: "Callable[[ClientApp], ClientApp]"
) -> Callable[..., Any]:
    """Flower's factory of what loads a ClientApp, changed to change each that is loaded."""

    def get_changing_load_fn(*args: object, **kwargs: object) -> Any:
        load = get_load_fn(*args, **kwargs)
        return lambda *bundle: change(load(*bundle))

    return get_changing_load_fn


def pull_every(seconds: float) -> None:
    """Flower's own grid looks for replies that often, and not every three seconds."""
    vars(importlib.import_module("flwr.superlink.grid.grpc_grid"))["time"] = _PacedTime(seconds)


def install_once(fab: bytes, install_dir: Path | None = None, skip_prompt: bool = False) -> Path:
    """Flower's `install_from_fab` of a bundle, unless it has been installed to the end before."""
    from flwr.cli.install import install_from_fab
    from flwr.common.config import get_flwr_home

    digest = hashlib.sha256(fab).hexdigest()
    note = (install_dir or get_flwr_home()) / f"installed-{digest}"
    installed = Path(note.read_text()) if note.exists() else None
    if installed is None or not installed.is_dir():
        installed = install_from_fab(fab, install_dir, skip_prompt)
        # Whole or not at all: other nodes of this machine read it at the same time.
        unfinished = note.with_name(f"{note.name}-{os.getpid()}")
        unfinished.write_text(str(installed))
        unfinished.replace(note)
    return installed


def superlink() -> None:
    """`flower-superlink` with the guard, that keeps the server's own keys of a run's configuration
    from the nodes, and waits for a locked database."""
    superlink_store.adapt_superlink()
    _withhold_server_keys()
    _plain_log()
    resolve_name("blackthorn.flower_port.guard.superlink:main")()


def _withhold_server_keys() -> None:
    """Flower sends all of a run's configuration to whoever asks at the Fleet port."""
    # Imported here: a fork server that has this module has no need of it.
    from blackthorn.settings.key_facts import server_keys

    handler = importlib.import_module("flwr.server.superlink.fleet.message_handler.message_handler")
    keys, to_proto = server_keys(), handler.run_to_proto

    def without_server_keys(run: "Run") -> "RunMessage":
        message = to_proto(run)
        # Another app's keys of the same names are its own affair.
        if message.fab_id == APP_ID:
            for key in keys:
                message.override_config.pop(key, None)
        return message

    vars(handler)["run_to_proto"] = without_server_keys
