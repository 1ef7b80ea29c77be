"""HOST:PORT, and which addresses may be used without TLS."""

import ipaddress
from dataclasses import dataclass

from blackthorn.settings.config import ConfigError


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
    host = host.removeprefix("[").removesuffix("]")
    if not port and default_port is not None:
        port = str(default_port)
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"{option} {text} is not allowed: HOST:PORT, for example localhost:9092")
    return Address(host, int(port))


def is_loopback(host: str) -> bool:
    """Whether nothing sent to `host` leaves this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_insecure(host: str, i_know: bool) -> None:
    """Refuse to leave TLS out on an address that others can listen in on. Raises ConfigError."""
    if not is_loopback(host) and not i_know:
        raise ConfigError(
            f"--insecure is not allowed for {host}: anybody on the way could read and change "
            "everything; use TLS (blackthorn certs), or add --i-know"
        )
