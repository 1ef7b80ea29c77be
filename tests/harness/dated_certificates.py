"""Certificates with any dates, signed by OpenSSL's own program in place of `blackthorn certs`.

They lie where `blackthorn certs` puts its own, and are made by its authority's key.
"""

import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

from blackthorn.launch.federation.certs import make

ANCHORS = "subjectAltName=DNS:localhost,IP:127.0.0.1"


def redate_server(folder: Path, begin: timedelta, end: timedelta) -> None:
    """Give server.pem other dates, counted from now: the same key, names and authority."""
    request, names = folder / "server.csr", folder / "names.cnf"
    names.write_text(f"{ANCHORS}\nextendedKeyUsage=serverAuth\n")
    _openssl(
        "req", "-new", "-key", folder / "server.key", "-subj", "/CN=localhost", "-out", request
    )
    _sign(folder, request, begin, end, folder / "server.pem", ("-extfile", names))


def redate_authority(folder: Path, begin: timedelta, end: timedelta) -> None:
    """Give ca.crt other dates, counted from now: the same key and name, so that it has signed
    server.pem still."""
    request, uses = folder / "ca.csr", folder / "uses.cnf"
    uses.write_text("basicConstraints=critical,CA:TRUE\nkeyUsage=critical,keyCertSign\n")
    subject = "/CN=Blackthorn federation"
    _openssl("req", "-new", "-key", folder / "ca.key", "-subj", subject, "-utf8", "-out", request)
    _sign(folder, request, begin, end, folder / "ca.crt", ("-extfile", uses))


def federation(folder: Path, *clients: str) -> Path:
    """Authority, server's certificate for localhost, and keys."""
    make(folder, ["localhost"], list(clients))
    return folder


def _sign(
    folder: Path,
    request: Path,
    begin: timedelta,
    end: timedelta,
    out: Path,
    more: tuple[object, ...],
) -> None:
    store = folder / "issued"
    store.mkdir(exist_ok=True)
    (store / "index").write_text("")
    (store / "ca.cnf").write_text(
        f"[ca]\ndefault_ca=d\n[d]\ndatabase={store / 'index'}\nnew_certs_dir={store}\n"
        "rand_serial=yes\ndefault_md=sha384\npolicy=p\n[p]\ncommonName=supplied\n"
    )
    now, form = datetime.now(UTC), "%Y%m%d%H%M%SZ"
    if out.name == "ca.crt":
        signer: tuple[object, ...] = ("-selfsign",)
    else:
        signer = ("-cert", folder / "ca.crt")
    _openssl(
        *("ca", "-batch", "-notext", "-config", store / "ca.cnf", "-in", request, "-out", out),
        *("-keyfile", folder / "ca.key", *signer, *more),
        *("-startdate", f"{now + begin:{form}}", "-enddate", f"{now + end:{form}}"),
    )


def _openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, text=True)
