"""The connections to the Fleet port: how many an address or a key may hold, and for how long.

gRPC takes every connection there is. So a thread looks at the sockets of this process a few times
a second, and shuts down those that no registered key has used in time or that are too many: gRPC
then finds them closed by the other side. Nothing lies between a client and gRPC.
"""

import contextlib
import ipaddress
import os
import socket
import stat
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from .limits import Limits

_LOOK_SECONDS = 0.25
_MINUTE = 60.0
_DESCRIPTORS = Path("/dev/fd")

Address = tuple[str, int]
Refuse = Callable[[str, str, bytes], None]


@dataclass
class _Connection:
    since: float
    key: bytes = b""
    doomed: bool = False


class Connections:
    """Watches over the connections to one port. `refuse` is called with kind, words and key."""

    # Whether nobody can read what goes over the port: it has TLS, or no network leads to it.
    is_private = False

    def __init__(self, limits: Limits, refuse: Refuse) -> None:
        self._limits = limits
        self._refuse = refuse
        self._lock = threading.Lock()
        self._open: dict[Address, _Connection] = {}
        self._new_of_key: dict[bytes, deque[float]] = defaultdict(deque)

    def watch(self, port: int, is_private: bool) -> None:
        """Start to look after the connections to `port`, in a thread."""
        self.is_private = is_private
        if not _DESCRIPTORS.is_dir():
            raise OSError(f"{_DESCRIPTORS} is missing: connections cannot be watched here")
        threading.Thread(target=self._watch, args=(port,), name="connections", daemon=True).start()

    def spoke(self, peer: str, key: bytes) -> None:
        """A registered key has used the connection that gRPC calls `peer`."""
        with self._lock:
            connection = self._open.setdefault(address_of(peer), _Connection(time.monotonic()))
            if connection.key != key:
                connection.key = key
                self._note_new(key, connection)

    def cut(self, peer: str) -> None:
        """Close the connection that gRPC calls `peer`, on which no registered key has spoken."""
        with self._lock:
            known = self._open.setdefault(address_of(peer), _Connection(time.monotonic()))
            known.doomed = not known.key

    def look(self, port: int) -> None:
        """Close what is too many or too old now."""
        now = time.monotonic()
        with open_sockets(port) as found:
            with self._lock:
                self._open = {a: c for a, c in self._open.items() if a in found}
                for address in found:
                    self._open.setdefault(address, _Connection(now))
                doomed = dict(self._doomed(now))
            for address, (kind, what, key) in doomed.items():
                with contextlib.suppress(OSError):
                    found[address].shutdown(socket.SHUT_RDWR)
                self._refuse(kind, what, key)

    def _watch(self, port: int) -> None:
        while True:
            with contextlib.suppress(OSError):
                self.look(port)
            time.sleep(_LOOK_SECONDS)

    def _note_new(self, key: bytes, connection: _Connection) -> None:
        recent = self._new_of_key[key]
        recent.append(time.monotonic())
        while recent and recent[0] < time.monotonic() - _MINUTE:
            recent.popleft()
        if len(recent) > self._limits.key_connections_a_minute:
            connection.doomed = True

    def _doomed(self, now: float) -> Iterator[tuple[Address, tuple[str, str, bytes]]]:
        by_address: dict[str, list[tuple[float, Address]]] = defaultdict(list)
        by_key: dict[bytes, list[tuple[float, Address]]] = defaultdict(list)
        for address, one in self._open.items():
            if one.doomed:
                what = "too many new connections in a minute" if one.key else "many refusals"
                yield address, ("connections", what, one.key)
            elif one.key:
                by_key[one.key].append((one.since, address))
            elif now - one.since > self._limits.idle_connection_seconds:
                yield address, ("silent connection", _silent(self._limits), b"")
            else:
                by_address[address[0]].append((one.since, address))
        # The oldest go: who is honest has spoken soon after it came.
        for ip, held in by_address.items():
            for _, address in sorted(held)[: -int(self._limits.stranger_connections)]:
                what = f"{len(held)} connections of {ip} on which no registered key speaks"
                yield address, ("connections", what, b"")
        for key, held in by_key.items():
            for _, address in sorted(held)[: -int(self._limits.key_connections)]:
                yield address, ("connections", f"{len(held)} connections at a time", key)


def _silent(limits: Limits) -> str:
    seconds = limits.idle_connection_seconds
    return f"a connection on which no registered key has spoken in {seconds:g} s"


def is_loopback(host: str) -> bool:
    """Whether nothing sent to `host` leaves this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def address_of(peer: str) -> Address:
    """IP address and port of `ipv4:IP:PORT`, or of `ipv6:[IP]:PORT` with percent signs."""
    host, _, port = unquote(peer.partition(":")[2]).rpartition(":")
    return _plain(host.strip("[]")), int(port) if port.isdigit() else 0


def _plain(host: str) -> str:
    """The address as both gRPC and the kernel write it; one of IPv4 in IPv6 is IPv4."""
    try:
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    return str(getattr(found, "ipv4_mapped", None) or found)


@contextlib.contextmanager
def open_sockets(port: int) -> Iterator[dict[Address, socket.socket]]:
    """This process's connected TCP sockets with that local port, by the other side's address.

    They are duplicates: another thread may close the original at any moment, and its number may
    then be another file's.
    """
    with contextlib.ExitStack() as stack:
        found = {}
        for name in os.listdir(_DESCRIPTORS):  # noqa: PTH208 (a Path for each is too much)
            try:
                one = _duplicate(int(name))
            except OSError:
                continue
            if one is not None and (address := _other_side(one, port)) is not None:
                found[address] = stack.enter_context(one)
            elif one is not None:
                one.close()
        yield found


def _duplicate(descriptor: int) -> socket.socket | None:
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        return None
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def _other_side(one: socket.socket, port: int) -> Address | None:
    """Whom a TCP connection to our port is with; None for any other socket."""
    if one.family not in (socket.AF_INET, socket.AF_INET6) or one.type != socket.SOCK_STREAM:
        return None
    with contextlib.suppress(OSError):
        if one.getsockname()[1] == port:
            host, its_port = one.getpeername()[:2]
            return _plain(host), its_port
    return None
