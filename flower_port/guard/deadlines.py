"""The requests that have begun to arrive, and when each must be whole."""

import threading
import time
from collections.abc import Iterator

import grpc

from .checks import Refused

_TICK_SECONDS = 0.5
_NOT_WHOLE = "a request that was broken off, or larger than any may be"


class Deadlines:
    """Cancels the requests that are not whole in time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[int, tuple[float, grpc.ServicerContext]] = {}
        self._missed: set[int] = set()
        threading.Thread(target=self._watch, name="deadlines", daemon=True).start()

    def read(
        self, requests: Iterator[bytes], context: grpc.ServicerContext, seconds: float
    ) -> bytes:
        """The one request that comes. Raises Refused."""
        number = id(context)
        with self._lock:
            self._waiting[number] = time.monotonic() + seconds, context
        body = None
        try:
            body = next(requests)
        except (StopIteration, grpc.RpcError):
            pass
        finally:
            with self._lock:
                self._waiting.pop(number, None)
                late = number in self._missed
                self._missed.discard(number)
        if body is None:
            what = f"a request that was not whole after {seconds:g} s" if late else _NOT_WHOLE
            raise Refused("unfinished request", what, offence=False)
        return body

    def _watch(self) -> None:
        while True:
            time.sleep(_TICK_SECONDS)
            now = time.monotonic()
            with self._lock:
                late = [n for n, (deadline, _) in self._waiting.items() if deadline < now]
                contexts = [self._waiting.pop(number)[1] for number in late]
                self._missed.update(late)
            for context in contexts:
                context.cancel()
