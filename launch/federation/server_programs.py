"""The two programs of a server, as Flower's own command lines, and their ends in our words."""

import errno
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from blackthorn.flower_port import serverapp_process, superlink_store
from blackthorn.launch.processes.supervisor import NotYet, Program, describe_exit

from . import certificates
from .addresses import Address
from .members import ServerSettings
from .service import say

# A database that cannot grow loses what clients and runs report.
_LEAST_BYTES, _ENOUGH_BYTES = 16 * 2**20, 32 * 2**20
SERVERAPPS, DATABASE = "serverapps", "superlink.db"
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
_UNWRITABLE = {
    errno.ENOSPC: "is full: make room on its disk",
    errno.EIO: "cannot be written (disk I/O error): see to its disk, and to its user's quota",
}


def serverapp_environment(settings: ServerSettings) -> dict[str, str]:
    """What SuperLink, SuperExec and ServerApps have to know of how ServerApps live here."""
    folder = str(settings.state / SERVERAPPS)
    return {
        serverapp_process.FOLDER_VARIABLE: folder,
        serverapp_process.SERVER_VARIABLE: str(os.getpid()),
        superlink_store.GO_ON_VARIABLE: str(int(settings.resume)),
        serverapp_process.NOTES_VARIABLE: folder,
    }


def superlink_program(
    settings: ServerSettings,
    apps: Address,
    health: Address,
    secret: Path,
    env: Mapping[str, str],
) -> Program:
    """The SuperLink under process isolation, its state on disk; `apps` is its ServerApps' port."""
    command = ["flower-superlink", "--isolation", "process"]
    command += ["--superexec-auth-secret-file", str(secret)]
    command += ["--database", str(settings.state / DATABASE)]
    command += ["--serverappio-api-address", str(apps)]
    command += ["--fleet-api-address", str(settings.fleet)]
    command += ["--control-api-address", str(settings.control)]
    command += ["--health-server-address", str(health)]
    command += ["--guard", str(settings.state / "guard")]
    command += [part for limit in settings.limits for part in ("--limit", limit)]
    if settings.certs is None:
        command += ["--insecure"]
    else:
        command += ["--ssl-ca-certfile", str(settings.certs / certificates.CA_CERTIFICATE)]
        command += ["--ssl-certfile", str(settings.certs / certificates.SERVER_CERTIFICATE)]
        command += ["--ssl-keyfile", str(settings.certs / certificates.SERVER_KEY)]
        command += ["--enable-supernode-auth", "--certificate-host", settings.host]
    return Program(
        "superlink",
        command,
        env,
        before=lambda: _check_start(settings),
        on_line=superlink_news,
        on_end=lambda status, tail: superlink_end(settings, status, tail),
    )


def _check_start(settings: ServerSettings) -> None:
    """Raises NotYet where the disk is full, or the certificate has been spoilt meanwhile."""
    check_space(settings.state)
    if settings.certs is not None:
        try:
            certificates.check_server_files(settings.certs, settings.host)
        except certificates.CertificateError as error:
            raise NotYet(str(error)) from error


def check_space(state: Path) -> None:
    """Raises NotYet where the disk is full."""
    if lack := lack_of_space(state):
        raise NotYet(lack)


def lack_of_space(state: Path, *, to_go_on: bool = False) -> str:
    """What to say of a disk that is full; empty where it is not. To go on needs more."""
    left, needed = shutil.disk_usage(state).free, _ENOUGH_BYTES if to_go_on else _LEAST_BYTES
    if left >= needed:
        return ""
    return (
        f"the disk of --state {state} is full: {left // 2**20} MiB are left, "
        f"{needed // 2**20} are needed"
    )


def end_serverapps(state: Path) -> None:
    """End the ServerApps, which have no SuperLink; their runs go on when there is one again."""
    serverapp_process.end_all(state / SERVERAPPS)


def superexec_program(apps: Address, secret: Path, env: Mapping[str, str]) -> Program:
    """The executor that starts a ServerApp for every run."""
    command = ["flower-superexec", "--insecure", "--plugin-type", "serverapp"]
    command += ["--appio-api-address", str(apps)]
    command += ["--superexec-auth-secret-file", str(secret)]
    return Program("superexec", command, env)


def superlink_news(line: str) -> None:
    """Say what our part of the SuperLink has to say to a person."""
    _, ours, text = line.partition(superlink_store.NEWS)
    if ours:
        say(text)


def superlink_end(settings: ServerSettings, status: int | None, tail: str) -> str:
    """Why the SuperLink ended, in our words where we have some."""
    if status in _UNWRITABLE:
        # Without it their rounds would be lost to the deadlines.
        end_serverapps(settings.state)
        then = "runs go on then" if settings.resume else "the runs in it have failed"
        return f"superlink ended: {settings.state / DATABASE} {_UNWRITABLE[status]}; {then}"
    for sign, words in _ENDS.items():
        if sign in tail:
            return f"superlink ended: {words}"
    return describe_exit("superlink", status, tail)
