"""Whether a client would take the server's certificate, found out before one is shown it."""

import ssl
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key

# OpenSSL's verification results for a name, or an address, that is not in a certificate.
NAME_MISMATCHES = (62, 64)
# Both sides of a handshake in memory are done after fewer turns.
_MOST_TURNS = 10


class Unfit(ValueError):
    """Files with which no client, or not every one, could be served: one line that names the file.

    `about` says what has to be made anew, or that --host is another name.
    """

    def __init__(self, about: Literal["certificate", "authority", "name"], why: str) -> None:
        super().__init__(why)
        self.about = about


@dataclass(frozen=True)
class Pair:
    """A certificate that was checked, and its key, in PEM; `leaf` is the certificate, read."""

    certificate: bytes
    key: bytes
    leaf: x509.Certificate


def checked_pair(certificate: Path, key: Path, authority: Path, host: str) -> Pair:
    """The pair in the files, if a client that trusts `authority` and dials `host` takes it now.

    Raises Unfit: what cannot be read, a key of another certificate, a certificate or an authority
    that is not good yet or any more, one that the authority has not signed, a name that is missing.
    """
    shown, secret = _read(certificate), _read(key)
    try:
        leaf = x509.load_pem_x509_certificate(shown)
    except ValueError as error:
        raise Unfit("certificate", f"{certificate} is not a certificate: {error}") from error
    try:
        fits = load_pem_private_key(secret, None).public_key() == leaf.public_key()
    except (TypeError, ValueError) as error:
        raise Unfit("certificate", f"{key} is not a private key: {error}") from error
    if not fits:
        raise Unfit("certificate", f"{key.name} is not the key of {certificate}")
    if wrong := out_of_date(certificate, leaf):
        raise Unfit("certificate", wrong)
    if wrong := authority_out_of_date(authority):
        raise Unfit("authority", wrong)
    try:
        _handshake(certificate, key, authority, host)
    except ssl.SSLCertVerificationError as error:
        if error.verify_code in NAME_MISMATCHES:
            names = ", ".join(certificate_names(leaf))
            missing = f"--host {host} is not in the certificate {certificate}, which is for {names}"
            raise Unfit("name", missing) from error
        why = f"clients that trust {authority} do not take {certificate}: {error.verify_message}"
        raise Unfit("certificate", why) from error
    except (OSError, ValueError) as error:
        raise Unfit("certificate", f"{certificate} cannot be used: {error}") from error
    return Pair(shown, secret, leaf)


def out_of_date(path: Path, certificate: x509.Certificate) -> str:
    """What to say of a certificate that is not good now, by this machine's clock; empty: it is."""
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    now = datetime.now(UTC)
    if end < now:
        return f"{path} expired on {end:%Y-%m-%d}"
    if begin > now:
        return (
            f"{path} is not good before {begin:%Y-%m-%d %H:%M} UTC, and this machine's clock says "
            f"{now:%Y-%m-%d %H:%M}"
        )
    return ""


def authority_out_of_date(path: Path) -> str:
    """The same of a file of authorities, where none of them is good now. Raises Unfit."""
    try:
        found = x509.load_pem_x509_certificates(_read(path))
    except ValueError as error:
        raise Unfit("authority", f"{path} is not a certificate: {error}") from error
    wrong = [out_of_date(path, one) for one in found]
    return wrong[0] if all(wrong) else ""


def certificate_names(certificate: x509.Certificate) -> list[str]:
    """The names and addresses that a certificate is good for."""
    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return []
    return [str(name.value) for name in extension.value]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise Unfit("certificate", f"{path} cannot be read: {error.strerror}") from error


def _handshake(certificate: Path, key: Path, authority: Path, host: str) -> None:
    """TLS in memory: a client's own way to look at the chain, the names and the uses. Raises
    ssl.SSLError."""
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(certificate, key)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = serving.wrap_bio(to_server, to_client, server_side=True)
    trusting = ssl.create_default_context(cafile=str(authority))
    sides = [trusting.wrap_bio(to_client, to_server, server_hostname=host), server]
    for _ in range(_MOST_TURNS):
        for side in list(sides):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            sides.remove(side)
        if not sides:
            return
    raise ssl.SSLError("the handshake does not end")
