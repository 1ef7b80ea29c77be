"""Why a server cannot be talked to, found out before Flower tries: one line that says what to do.

Flower's own messages for a wrong authority, a wrong name, or TLS on one side only are poor, and
some of these it tries again for ever.
"""

import contextlib
import socket
import ssl
from datetime import UTC, datetime
from pathlib import Path

from blackthorn.flower_port.guard.server_certificate import (
    NAME_MISMATCHES,
    Unfit,
    authority_out_of_date,
)
from blackthorn.launch.processes.supervisor import NotYet
from blackthorn.settings.config import ConfigError

from .addresses import Address
from .proxies import Proxy, ProxyRefuses, proxy_of

_SECONDS = 10.0
# What an HTTP/2 connection, and so gRPC, begins with; a TLS server answers it with an alert.
_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
_TLS_ALERT = b"\x15"


class Refused(RuntimeError):
    """The other side will not talk to us as we are; the message says what to change."""


def probe(server: Address, ca: Path | None, *, proxied: bool = True) -> datetime | None:
    """Return if a gRPC server answers at `server`, over TLS that `ca` vouches for (None: plain):
    when its certificate expires.

    With `proxied` through the proxy that gRPC would take. Raises NotYet where trying again later
    may help, Refused where it will not.
    """
    proxy = proxy_of(server) if proxied else None
    try:
        with _connection(server, proxy) as connection:
            if ca is None:
                _probe_plain(connection, server)
                return None
            return _probe_tls(connection, server, ca)
    except ProxyRefuses as error:
        raise NotYet(
            f"{error} to a connection with {server}: does it let this port through? no_proxy="
            f"{server.host} goes without it"
        ) from error
    except socket.gaierror as error:
        if proxy is not None:
            named = f"the name of the proxy {proxy.address}"
        else:
            named = f"the server's name {server.host}"
        raise NotYet(f"{named} cannot be resolved: {error}") from error
    except OSError as error:
        where = f"the proxy {proxy.address}" if proxy is not None else str(server)
        raise NotYet(
            f"nobody answers at {where}: {error.strerror or error}; does the server run, and "
            "does its firewall let this port through?"
        ) from error


def _connection(server: Address, proxy: Proxy | None) -> socket.socket:
    if proxy is not None:
        return proxy.connect(server, _SECONDS)
    return socket.create_connection((server.host, server.port), timeout=_SECONDS)


def check_authority(ca: Path) -> None:
    """ConfigError unless the file holds certificates, in PEM, and one of them is good now."""
    try:
        _trusting(ca)
        wrong = authority_out_of_date(ca)
    except (Refused, Unfit) as error:
        raise ConfigError(str(error)) from error
    if wrong:
        raise ConfigError(f"--ca {wrong}: get a new ca.crt from the server's operator")


def _trusting(ca: Path) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=str(ca))
    except (OSError, ssl.SSLError) as error:
        raise Refused(
            f"--ca {ca} is not a certificate that can be read: {error.strerror or error}"
        ) from error


def _probe_tls(connection: socket.socket, server: Address, ca: Path) -> datetime | None:
    context = _trusting(ca)
    context.set_alpn_protocols(["h2"])
    try:
        with context.wrap_socket(connection, server_hostname=server.host) as secured:
            end = (secured.getpeercert() or {}).get("notAfter")
            return datetime.fromtimestamp(ssl.cert_time_to_seconds(str(end)), UTC) if end else None
    except ssl.SSLCertVerificationError as error:
        raise Refused(_why_not_verified(error, server, ca)) from error
    except ssl.SSLError as error:
        raise Refused(
            f"{server} does not speak TLS ({error.reason}): it was started with --insecure, or "
            "something else listens there"
        ) from error


def _why_not_verified(error: ssl.SSLCertVerificationError, server: Address, ca: Path) -> str:
    if error.verify_code in NAME_MISMATCHES:
        return (
            f"the server's certificate is not for {server.host}: use a name that it is for, or "
            f"make one with: blackthorn certs DIR --host {server.host}"
        )
    if "expired" in error.verify_message:
        return f"the certificate of {server} has expired: its operator must make a new one"
    if "not yet valid" in error.verify_message:
        return (
            f"the certificate of {server} is not good yet: set this machine's clock, or the "
            "server's operator must make a new one"
        )
    return (
        f"{server} is not the server that --ca {ca} vouches for ({error.verify_message}): get "
        "ca.crt from the server's operator"
    )


def _probe_plain(connection: socket.socket, server: Address) -> None:
    connection.sendall(_HTTP2_PREFACE)
    answer = b""
    with contextlib.suppress(ConnectionResetError):
        answer = connection.recv(1)
    if answer in (_TLS_ALERT, b""):
        raise Refused(f"{server} wants TLS: give --ca ca.crt in place of --insecure")
