"""The server's certificate is renewed while it is served: who connects next is shown the new one.

gRPC asks at every handshake which pair to show. A thread looks at the files, and takes a pair from
them only when a client would take it; connections that there are go on as they began.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc

from ..superlink_store import NEWS
from .server_certificate import Pair, Unfit, checked_pair

_LOOK_SECONDS = 1.0

Stamp = tuple[int, int, int] | None


def tell_the_operator(line: str) -> None:
    """A line of the server's own output."""
    logging.getLogger("flwr").warning("%s%s", NEWS, line)


class Renewal:
    """The pair in two files, for clients that trust `authority` and dial `host`.

    `say` gets a line of every other pair that is found there, taken or not. Raises Unfit.
    """

    def __init__(
        self,
        certificate: Path,
        key: Path,
        authority: Path,
        host: str,
        say: Callable[[str], None] = tell_the_operator,
    ) -> None:
        self._files = certificate, key, authority
        self._host = host
        self._say = say
        self._judged = self._found = self._stamps()
        self._shown = checked_pair(*self._files, host)

    def credentials(
        self,
        private_key_certificate_chain_pairs: Sequence[tuple[bytes, bytes]] = (),
        root_certificates: bytes | None = None,
        require_client_auth: bool = False,
    ) -> grpc.ServerCredentials:
        """In the place of `grpc.ssl_server_credentials`: the pair of each handshake's own moment,
        not the one that is given."""
        del private_key_certificate_chain_pairs
        given = self._shown

        def configuration(pair: Pair) -> Any:
            pairs = ((pair.key, pair.certificate),)
            return grpc.ssl_server_certificate_configuration(pairs, root_certificates)

        def changed() -> Any:
            # None: the one before stays. Several handshakes at once may each give the new one.
            nonlocal given
            shown = self._shown
            if shown is given:
                return None
            given = shown
            return configuration(shown)

        return grpc.dynamic_ssl_server_credentials(
            configuration(given), changed, require_client_auth
        )

    def start(self) -> None:
        """Have every server with TLS of this process show the pair, and look after its files in a
        thread."""
        # Flower's servers take what this function gives: their credentials can be had no other way.
        vars(grpc)["ssl_server_credentials"] = self.credentials
        threading.Thread(target=self._watch, name="certificate", daemon=True).start()

    def look(self) -> None:
        """Take the pair in the files, if it is another one and has been left alone since the last
        look: two files are not written at once."""
        found, self._found = self._found, self._stamps()
        if self._found == self._judged or self._found != found:
            return
        try:
            pair, problem = checked_pair(*self._files, self._host), None
        except Unfit as error:
            pair, problem = self._shown, error
        if self._stamps() != self._found:
            return
        self._judged = self._found
        if problem is not None:
            self._say(f"{problem}; the certificate before stays in use until its files fit")
        elif (pair.certificate, pair.key) != (self._shown.certificate, self._shown.key):
            self._shown = pair
            end = pair.leaf.not_valid_after_utc
            self._say(f"{self._files[0]} was renewed, and is good until {end:%Y-%m-%d}")

    def _watch(self) -> None:
        while True:
            time.sleep(_LOOK_SECONDS)
            self.look()

    def _stamps(self) -> tuple[Stamp, ...]:
        """What changes where a file is written or replaced."""
        return tuple(map(_stamp, self._files))


def _stamp(path: Path) -> Stamp:
    try:
        known = path.stat()
    except OSError:
        return None
    return known.st_mtime_ns, known.st_size, known.st_ino
