"""`blackthorn certs`: the certificates and keys of a federation."""

from pathlib import Path
from typing import Annotated

import typer

from blackthorn.launch.federation.addresses import host_of
from blackthorn.settings.config import ConfigError


def certs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where they go.")],
    host: Annotated[
        list[str] | None,
        typer.Option(help="A name or IP address by which the server is reached (repeatable)."),
    ] = None,
    client: Annotated[
        list[str] | None, typer.Option(help="A client that gets a key pair (repeatable).")
    ] = None,
    days: Annotated[
        int | None,
        typer.Option(help="Days for which the server's certificate is good; by default 730."),
    ] = None,
) -> None:
    """Make a certificate authority, the server's certificate, and keys of clients.

    What is there is never overwritten: run it again with --client to add clients. Remove
    server.pem and server.key to make a new server certificate from the same authority.

    Example: blackthorn certs certs --host fl.example.org --client node0 --client node1
    """
    from blackthorn.launch.federation.certificates import CertificateError

    try:
        for path in make(folder, host or [], client or [], days):
            typer.echo(f"made {path}")
    except CertificateError as error:
        raise ConfigError(str(error)) from error


def make(folder: Path, hosts: list[str], clients: list[str], days: int | None = None) -> list[Path]:
    """Make what is asked for and return the files; nothing if any of them is there already.

    Raises CertificateError and ConfigError.
    """
    from blackthorn.launch.federation import certificates as c

    if not hosts and not clients:
        raise ConfigError("nothing to make: give --host NAME for a server, --client NAME for a key")
    if days is not None and not hosts:
        raise ConfigError("--days is of use with --host alone: keys of clients do not expire")
    if days is not None and not 0 < days <= c.MOST_DAYS:
        raise ConfigError(f"--days {days} is not allowed: 1 to {c.MOST_DAYS}")
    hosts = [host_of(host, "--host") for host in hosts]
    c.check_hosts(hosts)
    for name in clients:
        c.check_client_name(name)
    wanted = [c.SERVER_CERTIFICATE, c.SERVER_KEY] if hosts else []
    wanted += [file for name in clients for file in (f"{c.CLIENTS}/{name}", _public(name))]
    there = c.existing(folder, wanted)
    if there:
        raise ConfigError(f"{folder / there[0]} is there already and is not overwritten")
    made = []
    if hosts:
        if len(c.existing(folder, [c.CA_CERTIFICATE, c.CA_KEY])) < 2:
            if (folder / c.CA_CERTIFICATE).exists():
                raise ConfigError(
                    f"{folder / c.CA_KEY} is missing: bring the authority's key back, or start "
                    "anew in an empty folder"
                )
            c.make_authority(folder)
            made += [folder / c.CA_CERTIFICATE, folder / c.CA_KEY]
        c.make_server_certificate(folder, hosts, days or c.SERVER_DAYS)
        made += [folder / c.SERVER_CERTIFICATE, folder / c.SERVER_KEY]
    for name in clients:
        made += [c.make_client_key(folder, name), c.public_key_file(folder, name)]
    return made


def _public(name: str) -> str:
    return f"clients/{name}.pub"
