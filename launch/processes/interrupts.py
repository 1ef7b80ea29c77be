"""Ctrl-C and SIGTERM, so that what a program started is always stopped before it ends.

Python turns SIGINT into KeyboardInterrupt at any instruction, and dies of SIGTERM and SIGHUP
without running a single `finally`. Both matter to somebody who owns other processes.
Signal handlers belong to the main thread; in any other thread these contexts do nothing.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_STOPPING: tuple[int, ...] = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def deferred() -> Iterator[list[int]]:
    """Hold back SIGINT, SIGTERM and SIGHUP until the block ends; yields those held so far.

    A child process that was started but not yet written down would otherwise be lost to an
    interrupt in between. A long block can look into the list to end at once.
    """
    if threading.current_thread() is not threading.main_thread():
        yield []
        return
    held: list[int] = []

    def hold(number: int, _frame: FrameType | None) -> None:
        held.append(number)

    before = {number: signal.signal(number, hold) for number in _STOPPING}
    try:
        yield held
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        for number in held:
            signal.raise_signal(number)


@contextlib.contextmanager
def termination_unwinds() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise SystemExit(128 + number) in the block, if nobody handles them.

    The usual exit status of a terminated program stays, and every `finally` runs.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    unhandled = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is signal.SIG_DFL
    ]
    for number in unhandled:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in unhandled:
            signal.signal(number, signal.SIG_DFL)
