"""The two programs of a server, as Flower's own command lines, and their ends in our words."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from . import certificates
from .addresses import Address
from .supervisor import Program, obituary

if TYPE_CHECKING:
    from .server import ServerSettings

_ENDS = {
    "already in use": "another program took the port in the meantime",
    "database schema does not match": (
        "the database was written by another version of Flower: install that one, or move "
        "superlink.db away (its runs and registered clients are then forgotten)"
    ),
    "database disk image is malformed": "superlink.db is damaged: restore it or move it away",
    "database is locked": "another program uses superlink.db",
    "No space left on device": "the disk is full",
}


def superlink_program(
    settings: "ServerSettings",
    apps: Address,
    health: Address,
    secret: Path,
    env: Mapping[str, str],
) -> Program:
    """The SuperLink under process isolation, its state on disk; `apps` is its ServerApps' port."""
    command = ["flower-superlink", "--isolation", "process"]
    command += ["--superexec-auth-secret-file", str(secret)]
    command += ["--database", str(settings.state / "superlink.db")]
    command += ["--serverappio-api-address", str(apps)]
    command += ["--fleet-api-address", str(settings.fleet)]
    command += ["--control-api-address", str(settings.control)]
    command += ["--health-server-address", str(health)]
    if settings.certs is None:
        command += ["--insecure"]
    else:
        command += ["--ssl-ca-certfile", str(settings.certs / certificates.CA_CERTIFICATE)]
        command += ["--ssl-certfile", str(settings.certs / certificates.SERVER_CERTIFICATE)]
        command += ["--ssl-keyfile", str(settings.certs / certificates.SERVER_KEY)]
        command += ["--enable-supernode-auth"]
    return Program("superlink", command, env, on_end=superlink_end)


def superexec_program(apps: Address, secret: Path, env: Mapping[str, str]) -> Program:
    """The executor that starts a ServerApp for every run."""
    command = ["flower-superexec", "--insecure", "--plugin-type", "serverapp"]
    command += ["--appio-api-address", str(apps)]
    command += ["--superexec-auth-secret-file", str(secret)]
    return Program("superexec", command, env)


def superlink_end(status: int | None, tail: str) -> str:
    """Why the SuperLink ended, in our words where we have some."""
    for sign, words in _ENDS.items():
        if sign in tail:
            return f"superlink ended: {words}"
    return obituary("superlink", status, tail)
