"""A process that has imported the heavy modules once and forks off one process a request.

Flower starts a program for every message: `flwr-clientapp`, by name, from PATH. Most of the
time that costs is spent importing Flower and torch. With `fork_stub.py` under that name, the
same program runs in a fork of this server: a process of its own for every message, as before,
but one whose imports are already there.

A request (see `fork_stub.py`) names the function to run and brings arguments, environment,
working directory and the three standard streams. The forked process

* has a process group of its own, and the signals that the stub receives are passed on to it;
* dies of SIGKILL when its stub dies, and when this server dies (Linux);
* ends as a program does, and its wait status goes back to the stub, which ends the same way.

Nothing that a fork cannot copy may exist here: no thread, no gRPC channel.
"""

import argparse
import atexit
import contextlib
import ctypes
import gc
import importlib
import marshal
import os
import random
import selectors
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

_HEADER = struct.Struct("!I")
_STATUS = struct.Struct("!i")
_REQUEST_SECONDS = 10.0
_DRAIN_SECONDS = 2.0
_HANDLED = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36


@dataclass(frozen=True)
class Request:
    """One program to run: `entry` is "module:function", `argv[0]` the program's name."""

    entry: str
    argv: list[str]
    cwd: str
    env: dict[bytes, bytes]
    streams: list[int]


class ForkServer:
    """Accepts requests on a Unix socket, forks, and reports how each forked process ended."""

    def __init__(self, socket_path: Path) -> None:
        self._pid = os.getpid()
        self._stopping = False
        self._stub_of: dict[int, socket.socket] = {}
        self._listener = _listen(socket_path)
        self._woken, self._waker = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)

    def serve(self) -> Request | None:
        """Serve until SIGTERM. Returns the request in each forked process, None in the server."""
        self._handle_signals()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        while not self._stopping:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    request = self._accept()
                    if request is not None:
                        return request
                elif key.fileobj is self._woken:
                    self._woken.recv(4096)
                    self._reap()
                else:
                    self._hear_stub(key.data)
        self._drain()
        return None

    def _handle_signals(self) -> None:
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        for number in _HANDLED:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number != signal.SIGCHLD:
            self._stopping = True

    def _accept(self) -> Request | None:
        stub, _ = self._listener.accept()
        try:
            request = _receive_request(stub)
        except (OSError, ValueError, EOFError) as error:
            _report(f"dropped a request: {error}")
            stub.close()
            return None
        return request if self._fork(stub, request) else None

    def _fork(self, stub: socket.socket, request: Request) -> bool:
        """True in the new process."""
        # A signal that arrived in the new process before it has its own handlers would be lost.
        signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
        try:
            child = os.fork()
            if child == 0:
                self._leave_server(stub)
                return True
            with contextlib.suppress(OSError):
                os.setpgid(child, child)
            self._stub_of[child] = stub
            self._selector.register(stub, selectors.EVENT_READ, child)
        except OSError as error:
            _report(f"cannot fork: {error}")
            stub.close()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)
        for stream in request.streams:
            os.close(stream)
        return False

    def _leave_server(self, stub: socket.socket) -> None:
        """In a forked process: give up everything that belongs to the server."""
        os.setpgid(0, 0)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != self._pid:
            os._exit(1)
        signal.set_wakeup_fd(-1)
        for number in _HANDLED:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self._selector.close()
        for one in (stub, self._listener, self._woken, self._waker, *self._stub_of.values()):
            one.close()

    def _hear_stub(self, child: int) -> None:
        """A stub passes on a signal (one byte), or is gone."""
        stub = self._stub_of.get(child)
        if stub is None:
            return
        try:
            received = stub.recv(64)
        except OSError:
            received = b""
        for number in received or [signal.SIGKILL]:
            # The process is not reaped yet, so the id is still its own.
            os.kill(child, number)
        if not received:
            self._selector.unregister(stub)
            self._stub_of.pop(child).close()

    def _reap(self) -> None:
        while True:
            try:
                child, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if child == 0:
                return
            stub = self._stub_of.pop(child, None)
            if stub is not None:
                self._selector.unregister(stub)
                with contextlib.suppress(OSError):
                    stub.sendall(_STATUS.pack(status))
                stub.close()

    def _drain(self) -> None:
        """Let what still runs end by itself for a moment, then kill it."""
        deadline = time.monotonic() + _DRAIN_SECONDS
        self._reap()
        while self._stub_of and time.monotonic() < deadline:
            time.sleep(0.02)
            self._reap()
        for child in self._stub_of:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)


def _listen(path: Path) -> socket.socket:
    """A listening socket that appears at `path` when it takes connections, not before."""
    listener = socket.socket(socket.AF_UNIX)
    unfinished = path.with_name(path.name + ".new")
    listener.bind(str(unfinished))
    listener.listen(256)
    unfinished.rename(path)
    return listener


def _report(message: str) -> None:
    print(f"fork server: {message}", file=sys.stderr, flush=True)


def _receive_request(stub: socket.socket) -> Request:
    stub.settimeout(_REQUEST_SECONDS)
    header, streams, _, _ = socket.recv_fds(stub, _HEADER.size, 3)
    try:
        if len(header) != _HEADER.size or len(streams) != 3:
            raise EOFError("the stub closed the connection")
        (size,) = _HEADER.unpack(header)
        body = b""
        while len(body) < size:
            part = stub.recv(size - len(body))
            if not part:
                raise EOFError("the stub closed the connection")
            body += part
        return Request(**marshal.loads(body), streams=streams)
    except BaseException:
        for stream in streams:
            os.close(stream)
        raise
    finally:
        stub.settimeout(None)


def _prctl(option: int, value: int | bytes) -> None:
    """prctl(2); without effect where there is none."""
    function = getattr(ctypes.CDLL(None), "prctl", None)
    if function is not None:
        function(option, value, 0, 0, 0)


def preload(modules: Sequence[str]) -> None:
    """Import what the forked processes will need; what is not installed is left out."""
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError as error:
            _report(f"{name} is not preloaded: {error}")
    tasks = Path("/proc/self/task")
    threads = len(list(tasks.iterdir())) if tasks.is_dir() else threading.active_count()
    if threads > 1:
        _report(f"{threads} threads after the imports; forks have only one")
    # Objects that the collector never visits stay on pages that parent and children share.
    gc.collect()
    gc.freeze()


def become(request: Request) -> NoReturn:
    """Turn the forked process into the requested program, run it, and end as a program does."""
    for target, stream in enumerate(request.streams):
        os.dup2(stream, target)
        os.close(stream)
    os.chdir(request.cwd)
    os.environ.clear()
    os.environ.update(
        {os.fsdecode(name): os.fsdecode(value) for name, value in request.env.items()}
    )
    sys.argv = list(request.argv)
    _prctl(_PR_SET_NAME, os.fsencode(Path(request.argv[0]).name))
    _reseed()
    _end(run_entry(request.entry))


def load_entry(entry: str) -> Callable[[], object]:
    """The function that "module:function" names."""
    module, _, function = entry.partition(":")
    return getattr(importlib.import_module(module), function)


def run_entry(entry: str) -> int:
    """Run a function as a program's main function; the exit code that Python would give it."""
    try:
        result = load_entry(entry)()
    except SystemExit as leaving:
        result = leaving.code
    except BaseException:
        traceback.print_exc()
        return 1
    if result is None or isinstance(result, int):
        return int(result or 0)
    print(result, file=sys.stderr)
    return 1


def _reseed() -> None:
    """Fresh global random generators, as every new process has."""
    random.seed()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(numpy.frombuffer(os.urandom(32), dtype=numpy.uint32))
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.manual_seed(int.from_bytes(os.urandom(8)))


def _end(code: int) -> NoReturn:
    """Exit with the interpreter's own steps, save for taking the imported modules apart.

    In a forked process that would touch, and so copy, every page shared with the server.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code & 0xFF)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """`SOCKET MODULE ...`: preload the modules, then serve on the socket until SIGTERM."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("socket", type=Path)
    parser.add_argument("modules", nargs="*")
    options = parser.parse_args(arguments)
    preload(options.modules)
    request = ForkServer(options.socket).serve()
    if request is None:
        _end(0)
    become(request)
