"""How the ServerApps of `blackthorn server` live: by themselves, and known to be alive.

Flower ties a ServerApp to the SuperExec that started it, and takes it for alive as long as it
sends a heartbeat. Here it belongs to the server: it outlives its SuperExec, ends with the server,
and holds a lock for as long as it lives, which the kernel gives back however it ends. What the
SuperLink makes of one that is dead is in `superlink_store.py`.

In SuperExec and ServerApp this changes Flower's private functions.
"""

import atexit
import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, NoReturn

# The folder of the locks, and the process id of the server; there where `blackthorn server` is.
FOLDER_VARIABLE = "BLACKTHORN_SERVERAPPS"
SERVER_VARIABLE = "BLACKTHORN_SERVER_PID"
# As in recording/run_notes.py, which this package does not import.
NOTES_VARIABLE = "BLACKTHORN_RUN_NOTES"
_LOOK_SECONDS = 0.2
# A ServerApp that is to end leaves its run's last state within these.
GRACE_SECONDS = 5.0
_NAME_LENGTH = 32
# A server error that may be over in a moment, such as a locked database or a full disk.
_PASSING = ("INTERNAL", "UNKNOWN", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED")


def is_alive(folder: Path, token: str) -> bool:
    """Whether the ServerApp to which the SuperLink gave this token runs."""
    return _is_held(_lock_file(folder, token))


def _is_held(lock: Path) -> bool:
    try:
        descriptor = os.open(lock, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def end_all(folder: Path, grace: float = GRACE_SECONDS) -> None:
    """End the ServerApps that live, and kill those that do not within `grace` seconds: their runs
    go on, or not, as after any such death."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        living = [lock for lock in folder.glob("[0-9a-f]" * _NAME_LENGTH) if _is_held(lock)]
        for lock in living:
            with contextlib.suppress(ValueError, ProcessLookupError, FileNotFoundError):
                os.kill(int(lock.read_text()), number)
        deadline = time.monotonic() + grace
        while any(map(_is_held, living)) and time.monotonic() < deadline:
            time.sleep(0.02)


def forget(folder: Path, token: str) -> None:
    """Remove what a ServerApp that is dead has left."""
    _lock_file(folder, token).unlink(missing_ok=True)


def live(folder: Path, token: str) -> None:
    """From now on, and until this process ends, its ServerApp is alive."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(_lock_file(folder, token), os.O_RDWR | os.O_CREAT, 0o600)
    # Never closed: that would give the lock back.
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    os.write(descriptor, str(os.getpid()).encode())
    atexit.register(forget, folder, token)


def adapt_superexec() -> None:
    """In a SuperExec: wait out what passes at the SuperLink; let ServerApps live by themselves."""
    loop = vars(importlib.import_module("flwr.supercore.superexec.run_superexec"))
    loop["make_simple_grpc_retry_invoker"] = _patient(loop["make_simple_grpc_retry_invoker"])
    server = os.environ.get(SERVER_VARIABLE)
    if server is not None:
        executor = importlib.import_module("flwr.supercore.superexec.executor.subprocess_executor")
        start = functools.partial(subprocess.Popen, start_new_session=True)
        vars(executor)["subprocess"] = SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL)
        launch = executor.SubprocessExecutor.launch

        def launch_for_server(self: Any, spec: Any) -> Any:
            return launch(self, dataclasses.replace(spec, parent_pid=int(server)))

        executor.SubprocessExecutor.launch = launch_for_server


def adapt_serverapp() -> None:
    """In a ServerApp of `blackthorn server`: hold the lock, and end with the server.

    Flower's own way to leave tells the SuperLink that the run has failed, and so that it need not
    go on. Only for the end of the run itself (SIGINT, as Flower has it) is that the truth.
    SIGTERM, also where the server has died, lets the run folder keep the last round and tells
    nobody.
    """
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder is None:
        return
    live(Path(folder), sys.argv[sys.argv.index("--token") + 1])
    program = vars(importlib.import_module("flwr.superlink.runtime.run_serverapp"))
    register = program["register_signal_handlers"]

    def register_and_unwind(*args: Any, **kwargs: Any) -> None:
        register(*args, **kwargs)
        signal.signal(signal.SIGTERM, _unwind)

    program["register_signal_handlers"] = register_and_unwind
    program["start_parent_process_monitor"] = _die_with


def _patient(make: Callable[[], Any]) -> Callable[[], Any]:
    """Flower's retries, which know only a connection that is down, for errors that pass too."""

    def make_patient() -> Any:
        invoker = make()
        gives_up = invoker.should_giveup

        def gives_up_on(error: Any) -> bool:
            return error.code().name not in _PASSING and bool(gives_up(error))

        invoker.should_giveup = gives_up_on
        return invoker

    return make_patient


def _unwind(number: int, _frame: FrameType | None) -> NoReturn:
    """End by an exception that Flower lets pass, so that every `finally` runs, in bounded time."""
    signal.signal(number, signal.SIG_IGN)
    _die_in(GRACE_SECONDS)
    raise SystemExit(128 + number)


def _die_in(seconds: float) -> None:
    end = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
    end.daemon = True
    end.start()


def _die_with(server: int) -> None:
    def watch() -> None:
        while True:
            time.sleep(_LOOK_SECONDS)
            try:
                os.kill(server, 0)
            except ProcessLookupError:
                # Also where it is held up, and cannot unwind.
                _die_in(GRACE_SECONDS)
                os.kill(os.getpid(), signal.SIGTERM)
                return

    threading.Thread(target=watch, daemon=True).start()


def _lock_file(folder: Path, token: str) -> Path:
    # The token itself lets whoever knows it speak for the run.
    return folder / hashlib.sha256(token.encode()).hexdigest()[:_NAME_LENGTH]
