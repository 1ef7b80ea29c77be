"""Certificates that expire soon are named from 30 days before on: at a start, and once a day."""

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

from blackthorn.launch.processes.supervisor import NotYet

from . import certificates
from .addresses import Address
from .probe import Refused, probe
from .service import say

WARNED = timedelta(days=30)
_DAY_SECONDS = 86_400.0


class DailyWarnings:
    """Says what `warnings` gives at the first look, and at the first one of every day after it."""

    def __init__(
        self,
        warnings: Callable[[], list[str]],
        say: Callable[[str], None] = say,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._warnings = warnings
        self._say = say
        self._clock = clock
        self._due = -float("inf")

    def look(self) -> None:
        """To be called often: it costs nothing between two days."""
        if self._clock() < self._due:
            return
        self._due = self._clock() + _DAY_SECONDS
        for warning in self._warnings():
            self._say(warning)


def at_the_server(certs: Path, host: str) -> list[str]:
    """What expires soon of the server's own files."""
    return _soon(
        (
            certs / certificates.SERVER_CERTIFICATE,
            certificates.expiry(certs / certificates.SERVER_CERTIFICATE),
            f"renew it, with the server running: {certificates.renewal(certs, host)}",
        ),
        (
            certs / certificates.CA_CERTIFICATE,
            certificates.expiry(certs / certificates.CA_CERTIFICATE),
            certificates.NEW_AUTHORITY,
        ),
    )


def expired_at_the_server(certs: Path) -> str:
    """Which of the server's own files has expired, with what to do; empty: none has."""
    now = datetime.now(UTC)
    own = certs / certificates.SERVER_CERTIFICATE, certs / certificates.CA_CERTIFICATE
    for path in own:
        end = certificates.expiry(path)
        if end is not None and end < now:
            return f"{path} {_when(end, now)}: no client connects; see docs/deploy.md"
    return ""


def at_a_client(server: Address, ca: Path | None, *, proxied: bool = True) -> list[str]:
    """What expires soon of the certificate that the server shows now, and of `ca`.

    Nothing without TLS, and of a server that cannot be talked to, of which others say why.
    """
    if ca is None:
        return []
    try:
        served = probe(server, ca, proxied=proxied)
    except (NotYet, Refused):
        served = None
    return _soon(
        (f"the certificate of {server}", served, "its operator must make a new one"),
        (f"--ca {ca}", certificates.expiry(ca), "get a new ca.crt from the server's operator"),
    )


def _soon(*known: tuple[object, datetime | None, str]) -> list[str]:
    now = datetime.now(UTC)
    return [
        f"{what} {_when(end, now)}: {remedy}"
        for what, end, remedy in known
        if end is not None and end - now < WARNED
    ]


def _when(end: datetime, now: datetime) -> str:
    if end < now:
        return f"expired on {end:%Y-%m-%d}"
    days = (end - now).days
    left = "in less than a day" if days < 1 else "in 1 day" if days == 1 else f"in {days} days"
    return f"expires on {end:%Y-%m-%d}, {left}"
