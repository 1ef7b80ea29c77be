"""Stands in for a program that runs in a fork of `fork_server.py`.

Run as `python -I -S fork_stub.py SOCKET MODULE:FUNCTION NAME ARGUMENT ...`, with nothing but the
standard library, so that it starts in a few milliseconds. It hands its arguments, environment,
working directory and standard streams to the server, passes on the signals it receives, and ends
as the forked process ended: with the same exit code, or of the same signal.
"""

import marshal
import os
import signal
import socket
import struct
import sys
from types import FrameType
from typing import NoReturn

_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def request_fork(path: str, entry: str, argv: list[str]) -> socket.socket:
    """Ask the server at `path` to run `entry`; the connection lives as long as the process."""
    server = socket.socket(socket.AF_UNIX)
    server.connect(path)
    body = marshal.dumps(
        {"entry": entry, "argv": argv, "cwd": os.getcwd(), "env": dict(os.environb)}  # noqa: PTH109
    )
    socket.send_fds(server, [struct.pack("!I", len(body))], [0, 1, 2])
    server.sendall(body)
    return server


def pass_on_signals(server: socket.socket) -> None:
    """Send the number of each signal that arrives here, as one byte."""

    def pass_on(number: int, _frame: FrameType | None) -> None:
        server.send(bytes([number]))

    for number in _PASSED_ON:
        signal.signal(number, pass_on)


def wait_status(server: socket.socket) -> int:
    """The forked process's wait status; SIGKILL when the server died and it with it."""
    reply = b""
    while len(reply) < 4:
        part = server.recv(4 - len(reply))
        if not part:
            return signal.SIGKILL
        reply += part
    return int(struct.unpack("!i", reply)[0])


def end_like(status: int) -> NoReturn:
    """End this process as a process with that wait status ended."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        # SIGKILL has no handler to reset.
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def main() -> NoReturn:
    """Stand for the process that the fork server starts: its signals, its exit status."""
    path, entry, *argv = sys.argv[1:]
    try:
        server = request_fork(path, entry, argv)
    except OSError as error:
        sys.exit(f"{argv[0]}: the fork server at {path} cannot be reached: {error}")
    pass_on_signals(server)
    end_like(wait_status(server))


if __name__ == "__main__":
    main()
