"""A private certificate authority, the server's certificate and the clients' keys.

DIR/ca.crt             what every client and operator needs to know the server
DIR/ca.key             signs certificates; needed again only for a new server certificate
DIR/server.pem .key    the SuperLink's certificate and key
DIR/clients/NAME .pub  a client's key pair (ECDSA P-384 as OpenSSH writes it, as Flower reads it)
"""

import ipaddress
import os
import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_ssh_public_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from blackthorn.flower_port.guard.server_certificate import (
    Unfit,
    certificate_names,
    checked_pair,
)

CA_CERTIFICATE, CA_KEY = "ca.crt", "ca.key"
SERVER_CERTIFICATE, SERVER_KEY = "server.pem", "server.key"
CLIENTS = "clients"
NEW_AUTHORITY = (
    "make a new authority and certificate in an empty folder (blackthorn certs), and give its "
    "ca.crt to every client"
)
# Always in the server's certificate: its operator reaches it through the loopback interface.
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
_CA_LIFE = timedelta(days=3650)
SERVER_DAYS, MOST_DAYS = 730, 3600
# Clocks differ: a certificate is good from a little before it was made.
_CLOCK_SKEW = timedelta(hours=1)
_CLIENT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class CertificateError(ValueError):
    """A certificate or key cannot be made or used; the message says which, and what to do."""


def make_authority(folder: Path) -> None:
    """Write ca.crt and ca.key. FileExistsError if either is there."""
    key = ec.generate_private_key(ec.SECP384R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Blackthorn federation")])
    certificate = (
        _builder(name, name, key.public_key(), _CA_LIFE)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .sign(key, hashes.SHA384())
    )
    _write_private(folder / CA_KEY, _pem(key))
    _write(folder / CA_CERTIFICATE, certificate.public_bytes(Encoding.PEM))


def make_server_certificate(folder: Path, hosts: Sequence[str], days: int = SERVER_DAYS) -> None:
    """Write server.pem and server.key for `hosts` (names and IP addresses) and the loopback.

    FileExistsError if either is there; CertificateError for a host that is neither, an authority
    that cannot be read, or one that is good for less than `days`.
    """
    certificate, key = _server_pair(folder, hosts, days)
    _write_private(folder / SERVER_KEY, key)
    _write(folder / SERVER_CERTIFICATE, certificate)


def renew_server_certificate(folder: Path, hosts: Sequence[str], days: int = SERVER_DAYS) -> None:
    """Put another server.pem and server.key in the place of those that are there, each whole or not
    at all; for the names of the one before where there are no `hosts`.

    CertificateError as of a new one, and where those names cannot be read; OSError, with the pair
    as it was, where one cannot be written.
    """
    certificate, key = _server_pair(folder, hosts or _names_of(folder / SERVER_CERTIFICATE), days)
    wanted = {SERVER_KEY: (key, 0o600), SERVER_CERTIFICATE: (certificate, 0o644)}
    parts = {folder / name: folder / f"{name}.part" for name in wanted}
    try:
        for path, part in parts.items():
            part.unlink(missing_ok=True)
            _create(part, *wanted[path.name])
        # A server that looks in between finds two that do not fit, and looks again.
        for path, part in parts.items():
            part.replace(path)
    finally:
        for part in parts.values():
            part.unlink(missing_ok=True)


def _names_of(certificate: Path) -> list[str]:
    try:
        names = certificate_names(x509.load_pem_x509_certificate(certificate.read_bytes()))
    except (OSError, ValueError) as error:
        raise CertificateError(
            f"{certificate} cannot be read ({error}): give its names with --host"
        ) from error
    return names


def _server_pair(folder: Path, hosts: Sequence[str], days: int) -> tuple[bytes, bytes]:
    """A certificate and its key, in PEM, as `make_server_certificate` says."""
    authority, authority_key = _load_authority(folder)
    left = authority.not_valid_after_utc - datetime.now(UTC)
    if left < timedelta(days=days):
        raise CertificateError(
            f"--days {days} is not allowed: the authority in {folder} itself expires in "
            f"{left.days} days; make a new one in an empty folder, or give --days"
        )
    key = ec.generate_private_key(ec.SECP384R1())
    names = list(dict.fromkeys([*hosts, *LOOPBACK_NAMES]))
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0][:64])])
    issuer_key = authority_key.public_key()
    certificate = (
        _builder(subject, authority.subject, key.public_key(), timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(map(_general_name, names)), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key), critical=False
        )
        .sign(authority_key, hashes.SHA384())
    )
    return certificate.public_bytes(Encoding.PEM), _pem(key)


def check_hosts(hosts: Sequence[str]) -> None:
    """CertificateError unless all of them are host names or IP addresses."""
    for host in hosts:
        _general_name(host)


def make_client_key(folder: Path, name: str) -> Path:
    """Write clients/NAME and clients/NAME.pub and return the private key's path.

    FileExistsError if either is there; CertificateError for a name that is no file name.
    """
    check_client_name(name)
    path = folder / CLIENTS / name
    if public_key_file(folder, name).exists():
        raise FileExistsError(17, "there already", str(public_key_file(folder, name)))
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    _write_private(path, private)
    _write(public_key_file(folder, name), public + f" {name}\n".encode())
    return path


def check_client_name(name: str) -> None:
    """CertificateError unless `name` is letters, digits, dots, dashes and underscores."""
    if not _CLIENT_NAME.fullmatch(name) or name.endswith(".pub"):
        raise CertificateError(
            f"client name {name!r} is not allowed: letters, digits, '.', '-' and '_', no .pub"
        )


def public_key_file(folder: Path, name: str) -> Path:
    """Where the public key of the client NAME lies."""
    return folder / CLIENTS / f"{name}.pub"


def client_names(folder: Path) -> list[str]:
    """The clients whose public key lies in the folder, ascending."""
    return sorted(path.name.removesuffix(".pub") for path in (folder / CLIENTS).glob("*.pub"))


def public_key_pem(path: Path) -> bytes:
    """A client's public key as Flower's messages hold it. CertificateError if it is none."""
    try:
        key = load_ssh_public_key(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CertificateError(f"{path} is not a public key that can be read: {error}") from error
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise CertificateError(
            f"{path} is not an ECDSA key: make one with ssh-keygen -t ecdsa -b 384"
        )
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def check_server_files(folder: Path, host: str) -> None:
    """CertificateError unless clients that have ca.crt and dial `host` take the folder's pair now;
    the message says what to do."""
    for name in (CA_CERTIFICATE, SERVER_CERTIFICATE, SERVER_KEY):
        if not (folder / name).is_file():
            # The pair is made together: what is left of it is in the way.
            left = existing(folder, [SERVER_CERTIFICATE, SERVER_KEY])
            first = f"remove {left[0]}, then" if left and name != CA_CERTIFICATE else "make it with"
            raise CertificateError(
                f"--certs {folder}: there is no {name}; {first}: "
                f"blackthorn certs {folder} --host {host}"
            )
    pair = folder / SERVER_CERTIFICATE, folder / SERVER_KEY
    try:
        checked_pair(*pair, folder / CA_CERTIFICATE, host)
    except Unfit as error:
        remedies = {
            "certificate": f"make a new one: {renewal(folder, host)}",
            "authority": NEW_AUTHORITY,
            "name": f"start with one of these, or make a new one: {renewal(folder, host)}",
        }
        raise CertificateError(f"{error}; {remedies[error.about]}") from error


def renewal(folder: Path, host: str) -> str:
    """The command that renews the server's certificate: for the names that it has, if it has
    `host`."""
    try:
        has_it = host in _names_of(folder / SERVER_CERTIFICATE)
    except CertificateError:
        has_it = False
    return f"blackthorn certs {folder} --renew" + ("" if has_it else f" --host {host}")


def expiry(path: Path) -> datetime | None:
    """When the certificate in a file expires; None where no certificate can be read."""
    try:
        return x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc
    except (OSError, ValueError):
        return None


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, life: timedelta
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + life)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    labels = host.rstrip(".").split(".")
    if not all(re.fullmatch(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)", label) for label in labels):
        raise CertificateError(f"--host {host!r} is neither a host name nor an IP address")
    return x509.DNSName(host)


def _load_authority(folder: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    try:
        certificate = x509.load_pem_x509_certificate((folder / CA_CERTIFICATE).read_bytes())
        key = load_pem_private_key((folder / CA_KEY).read_bytes(), None)
    except (OSError, ValueError) as error:
        raise CertificateError(f"the authority in {folder} cannot be read: {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise CertificateError(f"{folder / CA_KEY} is not an elliptic curve key")
    return certificate, key


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _write_private(path: Path, data: bytes) -> None:
    _create(path, data, 0o600)


def _write(path: Path, data: bytes) -> None:
    _create(path, data, 0o644)


def _create(path: Path, data: bytes, mode: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def existing(folder: Path, names: Iterable[str]) -> list[str]:
    """Those of the files `names` that are in the folder."""
    return [name for name in names if (folder / name).exists()]
