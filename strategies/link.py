"""Calls to the SuperLink that come back in time, also while it is down.

Flower repeats a call that finds no SuperLink for ever, and in mid-call a connection may break in
other ways than it expects: a restart must cost no more than the caller can wait.
"""

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

import grpc
from flwr.serverapp import Grid

_RETRY_SECONDS = 0.5

T = TypeVar("T")


class LinkDown(RuntimeError):
    """The SuperLink has not answered in time."""


def call_within(grid: Grid, call: Callable[[], T], seconds: float) -> T:
    """What `call` to the grid returns or raises, repeated where the connection breaks.

    Raises LinkDown after `seconds`; a call that is still held then is left behind in its thread.
    A grid with `synchronous = True` has no connection.
    """
    if getattr(grid, "synchronous", False):
        return call()
    attempt = _Attempt(call, time.monotonic() + seconds)
    threading.Thread(target=attempt.run, daemon=True).start()
    if not attempt.ended.wait(seconds) or attempt.connection_error is not None:
        reason = f": {attempt.connection_error}" if attempt.connection_error else ""
        raise LinkDown(f"the SuperLink has not answered within {seconds:g} s{reason}")
    if attempt.error is not None:
        raise attempt.error
    return attempt.results[0]


class _Attempt(Generic[T]):
    """One call in a thread of its own."""

    def __init__(self, call: Callable[[], T], deadline: float) -> None:
        self._call = call
        self._deadline = deadline
        self.ended = threading.Event()
        self.results: list[T] = []
        self.error: BaseException | None = None
        self.connection_error: str | None = None

    def run(self) -> None:
        try:
            while not self._tried():
                time.sleep(_RETRY_SECONDS)
        except BaseException as error:  # Flower's way to say that the run was stopped, too
            self.error = error
        self.ended.set()

    def _tried(self) -> bool:
        """Whether it makes no sense to try once more."""
        try:
            self.results = [self._call()]
        except grpc.RpcError as error:
            self.connection_error = connection_problem(error)
            return time.monotonic() >= self._deadline
        self.connection_error = None
        return True


def connection_problem(error: grpc.RpcError) -> str:
    """gRPC's word for what went wrong, such as UNAVAILABLE."""
    code = error.code() if isinstance(error, grpc.Call) else None
    return code.name if code is not None else type(error).__name__
