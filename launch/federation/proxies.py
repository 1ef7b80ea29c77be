"""The HTTP proxy through which gRPC reaches an address, by the variables that gRPC reads.

gRPC takes the first of grpc_proxy, https_proxy and http_proxy that is set, whether the connection
has TLS or not, and none for a host that no_grpc_proxy, or else no_proxy, names.
"""

import base64
import ipaddress
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from .addresses import LOOPBACK, Address

_PROXIES = "grpc_proxy", "https_proxy", "http_proxy"
_EXEMPTIONS = "no_grpc_proxy", "no_proxy"
_HTTP_PORT = 80
_LONGEST_HEAD = 16_384


class ProxyRefuses(OSError):
    """The proxy does not connect us with the server."""


@dataclass(frozen=True)
class Proxy:
    """Where it listens, and user:password for it (empty: none)."""

    address: Address
    credentials: str = ""

    def connect(self, server: Address, seconds: float) -> socket.socket:
        """A connection with the server. Raises OSError, ProxyRefuses among them."""
        where = self.address.host, self.address.port
        connection = socket.create_connection(where, timeout=seconds)
        try:
            request = f"CONNECT {server} HTTP/1.1\r\nHost: {server}\r\n"
            if self.credentials:
                token = base64.b64encode(self.credentials.encode()).decode()
                request += f"Proxy-Authorization: Basic {token}\r\n"
            connection.sendall(f"{request}\r\n".encode())
            head = b""
            # Byte by byte: what comes behind the head is the server's.
            while not head.endswith(b"\r\n\r\n") and len(head) < _LONGEST_HEAD:
                byte = connection.recv(1)
                if not byte:
                    break
                head += byte
            status = head.split(b"\r\n")[0].decode(errors="replace")
            if not status.partition(" ")[2].startswith("2"):
                raise ProxyRefuses(f"the proxy {self.address} says {status or 'nothing'!r}")
        except BaseException:
            connection.close()
            raise
        return connection


def proxy_of(server: Address, environment: Mapping[str, str] = os.environ) -> Proxy | None:
    """The proxy through which gRPC would reach the server; None for none."""
    named = next((value for name in _PROXIES if (value := environment.get(name))), "")
    parts = urlsplit(named)
    # gRPC goes on without a proxy of another kind.
    if parts.scheme != "http" or not parts.hostname:
        return None
    if any(_names(entry.strip(), server.host) for entry in exemptions(environment).split(",")):
        return None
    user = unquote(parts.netloc.rpartition("@")[0])
    return Proxy(Address(parts.hostname, parts.port or _HTTP_PORT), user)


def exemptions(environment: Mapping[str, str] = os.environ) -> str:
    """no_grpc_proxy for our programs: this machine, and whatever is exempt already."""
    known = next((value for name in _EXEMPTIONS if (value := environment.get(name))), "")
    return f"{LOOPBACK},{known}" if known else LOOPBACK


def _names(entry: str, host: str) -> bool:
    """Whether an entry is the host, a domain that it is in, or a network (10.0.0.0/8) of its."""
    domain = entry.lower().removeprefix(".")
    if not domain:
        return False
    if host.lower() == domain or host.lower().endswith(f".{domain}"):
        return True
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(entry, strict=False)
    except ValueError:
        return False
