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
    renew: Annotated[
        bool,
        typer.Option(
            "--renew",
            help="Replace the server's certificate and key, for the same names or those of --host. "
            "A server that runs takes them at once.",
        ),
    ] = False,
) -> None:
    """Make a certificate authority, the server's certificate, and keys of clients.

    What is there is never overwritten without --renew: run it again with --client to add clients.

    Example: blackthorn certs certs --host fl.example.org --client node0 --client node1
    """
    from blackthorn.launch.federation.certificates import CertificateError

    try:
        for path in make(folder, host or [], client or [], days, renew=renew):
            typer.echo(f"{'renewed' if renew else 'made'} {path}")
    except CertificateError as error:
        raise ConfigError(str(error)) from error


def make(
    folder: Path,
    hosts: list[str],
    clients: list[str],
    days: int | None = None,
    *,
    renew: bool = False,
) -> list[Path]:
    """Make what is asked for and return the files; nothing if any of them is there already, unless
    the server's pair is to be renewed.

    Raises CertificateError and ConfigError, OSError where nothing can be written.
    """
    from blackthorn.launch.federation import certificates as c

    if renew and clients:
        raise ConfigError("--renew makes no key of a client: give --client in a command of its own")
    if not hosts and not clients and not renew:
        raise ConfigError("nothing to make: give --host NAME for a server, --client NAME for a key")
    if days is not None and clients and not hosts:
        raise ConfigError("--days is of use with --host alone: keys of clients do not expire")
    if days is not None and not 0 < days <= c.MOST_DAYS:
        raise ConfigError(f"--days {days} is not allowed: 1 to {c.MOST_DAYS}")
    hosts = [host_of(host, "--host") for host in hosts]
    c.check_hosts(hosts)
    for name in clients:
        c.check_client_name(name)
    if renew:
        _check_authority(folder)
        c.renew_server_certificate(folder, hosts, days or c.SERVER_DAYS)
        return [folder / c.SERVER_CERTIFICATE, folder / c.SERVER_KEY]
    wanted = [c.SERVER_CERTIFICATE, c.SERVER_KEY] if hosts else []
    wanted += [file for name in clients for file in (f"{c.CLIENTS}/{name}", _public(name))]
    there = c.existing(folder, wanted)
    if there:
        raise ConfigError(f"{folder / there[0]} is there already and is not overwritten")
    made = []
    if hosts:
        if len(c.existing(folder, [c.CA_CERTIFICATE, c.CA_KEY])) < 2:
            if (folder / c.CA_CERTIFICATE).exists():
                _check_authority(folder)
            c.make_authority(folder)
            made += [folder / c.CA_CERTIFICATE, folder / c.CA_KEY]
        c.make_server_certificate(folder, hosts, days or c.SERVER_DAYS)
        made += [folder / c.SERVER_CERTIFICATE, folder / c.SERVER_KEY]
    for name in clients:
        made += [c.make_client_key(folder, name), c.public_key_file(folder, name)]
    return made


def _check_authority(folder: Path) -> None:
    """ConfigError where the authority's certificate or its key is not there."""
    from blackthorn.launch.federation import certificates as c

    for name in (c.CA_CERTIFICATE, c.CA_KEY):
        if not (folder / name).exists():
            whose = "the authority's key" if name == c.CA_KEY else "the authority"
            raise ConfigError(
                f"{folder / name} is missing: bring {whose} back, or start anew in an empty folder"
            )


def _public(name: str) -> str:
    return f"clients/{name}.pub"
