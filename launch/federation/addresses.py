"""HOST:PORT, which addresses may be used without TLS, and free ports on the loopback interface."""

import contextlib
import ipaddress
import socket
from dataclasses import dataclass

from blackthorn.flower_port.guard.connections import is_loopback
from blackthorn.settings.config import ConfigError

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Address:
    """A host name or IP address and a TCP port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str, option: str, default_port: int | None = None) -> Address:
    """The address that `option` was given. Raises ConfigError with one line."""
    host, colon, port = text.rpartition(":")
    if not colon or (":" in host and not host.startswith("[")):
        host, port = text, ""
    if ":" in host:
        host = _ipv6(host) or ""
    if not port and default_port is not None:
        port = str(default_port)
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"{option} {text} is not allowed: HOST:PORT, for example localhost:9092")
    return Address(host, int(port))


def host_of(text: str, option: str) -> str:
    """The host that `option` was given, an IPv6 address with brackets or without. ConfigError."""
    if ":" not in text:
        return text
    if (host := _ipv6(text)) is None:
        raise ConfigError(
            f"{option} {text} is not allowed: a host name, an IPv4 address, or an IPv6 address "
            "such as 2001:db8::1 or [2001:db8::1], without a port"
        )
    return host


def _ipv6(text: str) -> str | None:
    """The address without its brackets; None for what is none."""
    host = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return None
    return host


def check_insecure(host: str, i_know: bool) -> None:
    """Refuse to leave TLS out on an address that others can listen in on. Raises ConfigError."""
    if not is_loopback(host) and not i_know:
        raise ConfigError(
            f"--insecure is not allowed for {host}: anybody on the way could read and change "
            "everything; use TLS (blackthorn certs), or add --i-know"
        )


def check_free(address: Address, option: str) -> None:
    """ConfigError where nobody can listen on the address that `option` names."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.host, address.port))
        except OSError as error:
            raise ConfigError(
                f"{option}: {address} cannot be listened on: {error.strerror or error}"
            ) from error


def free_loopback_ports(count: int) -> list[int]:
    """`count` different TCP ports that nobody listens on at 127.0.0.1.

    All are held at once while they are drawn, so they differ. They are released before the
    caller's programs bind them: whoever starts a program must be ready to draw again. Raises
    OSError where there are none, or where nobody can be reached there.
    """
    _reach_loopback()
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((LOOPBACK, 0))
        return [one.getsockname()[1] for one in sockets]


def _reach_loopback() -> None:
    """OSError where nothing connects to 127.0.0.1, to which one can bind even so."""
    with socket.socket() as one:
        one.bind((LOOPBACK, 0))
        one.listen()
        socket.create_connection(one.getsockname(), timeout=5.0).close()
