"""`flower-superlink` with the guard in it: Flower's own arguments, and the three of the guard.

--guard FOLDER            where registrations and bars are kept
--limit NAME=VALUE        changes a limit; may be given several times
--certificate-host NAME   clients dial this name: the certificate is for it, and renewed from its
                          files while it is served
"""

import argparse
import logging
import os
import resource
import stat
import sys
import threading
import time
from pathlib import Path

from ..versions import NotThisFlower
from . import flower
from .audit import FILE, AuditLog
from .checks import Sizes
from .connections import Connections
from .gate import Gate
from .limits import Limits
from .records import Records
from .renewal import Renewal
from .service import ForOperators, ForServerApps

_LOG_SECONDS = 5.0


def main() -> None:
    """Run until a signal comes; exit code 2 for a wrong limit or another Flower."""
    options, sys.argv[1:] = _options(sys.argv[1:])
    try:
        flower.check_arguments(sys.argv[1:])
        limits = Limits.changed(options.limit)
        records = Records(options.guard, int(limits.offences))
        _guard(limits, records, AuditLog(options.guard / FILE))
        if options.certificate_host is not None:
            Renewal(*_certificate_files(sys.argv[1:]), options.certificate_host).start()
    except (ValueError, TypeError, OSError, NotThisFlower) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    _allow_many_descriptors()
    flower.cut_log_lines(int(limits.log_line))
    threading.Thread(target=_bound_log, args=(limits.log_bytes,), daemon=True).start()
    flower.run_superlink()


def _guard(limits: Limits, records: Records, audit: AuditLog) -> None:
    sizes = Sizes()
    connections = Connections(limits, records.refuse)
    flower.install(
        limits,
        gate=lambda state: Gate(limits, state, records, connections, sizes),
        for_serverapps=lambda state: ForServerApps(
            state, records, sizes, lambda: connections.is_private
        ),
        for_operators=lambda state: ForOperators(state, records, audit),
        listening=connections.watch,
    )


def _options(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--guard", type=Path, required=True)
    parser.add_argument("--limit", action="append", default=[])
    parser.add_argument("--certificate-host")
    return parser.parse_known_args(arguments)


def _certificate_files(arguments: list[str]) -> tuple[Path, Path, Path]:
    """The certificate, its key and its authority, of Flower's own arguments."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    names = "--ssl-certfile", "--ssl-keyfile", "--ssl-ca-certfile"
    for name in names:
        parser.add_argument(name, type=Path, required=True)
    found, _ = parser.parse_known_args(arguments)
    return found.ssl_certfile, found.ssl_keyfile, found.ssl_ca_certfile


def _allow_many_descriptors() -> None:
    """As many files and connections as the system lets this user have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _bound_log(most: float) -> None:
    """Keep the file that standard error is, if it is one, below `most` bytes."""
    while True:
        time.sleep(_LOG_SECONDS)
        try:
            rotate(2, most)
        except OSError as error:
            logging.getLogger("flwr").warning("the log cannot be cut: %s", error)
            return


def rotate(descriptor: int, most: float) -> bool:
    """Begin the file at a descriptor anew if it is too large, its content kept as NAME.1.

    Whoever writes to it (and must do so by appending) goes on with the same file.
    """
    now = os.fstat(descriptor)
    if not stat.S_ISREG(now.st_mode) or now.st_size <= most:
        return False
    link = Path(f"/proc/self/fd/{descriptor}")
    if link.is_symlink():
        path = link.readlink()
        unfinished = path.with_name(f"{path.name}.1.part")
        with path.open("rb") as old, unfinished.open("wb") as kept:
            while block := old.read(2**20):
                kept.write(block)
        unfinished.replace(path.with_name(f"{path.name}.1"))
    os.ftruncate(descriptor, 0)
    return True


if __name__ == "__main__":
    main()
