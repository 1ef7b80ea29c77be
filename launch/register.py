"""`blackthorn register` and `unregister`: which keys may take part."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from launch.operator_options import DEFAULT_SERVER, Server, connection
from server_app.config import ConfigError

if TYPE_CHECKING:
    from launch.control_api import ControlApi

Folder = Annotated[Path, typer.Option(help="Folder of `blackthorn certs`.")]


def register(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME...", help="Clients with a key CERTS/clients/NAME.pub."),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="All clients with a key in the folder.")
    ] = False,
    certs: Folder = Path("certs"),
    server: Server = DEFAULT_SERVER,
) -> None:
    """Let clients take part, by their public keys. One that is registered already stays so.

    Example: blackthorn register node0 node1 --certs certs
    """
    from launch.certificates import client_names

    if bool(names) == every:
        raise ConfigError("give the names of clients, or --all")
    keys = _keys(certs, client_names(certs) if every else names or [])
    with connection(server, certs / "ca.crt", False, False).open() as control:
        for name, key in keys.items():
            typer.echo(_register(control, name, key))


def unregister(
    names: Annotated[
        list[str], typer.Argument(metavar="NAME...", help="Clients, as at their registration.")
    ],
    certs: Folder = Path("certs"),
    server: Server = DEFAULT_SERVER,
) -> None:
    """Shut clients out, for good: a client that shall come back needs a new key.

    Example: blackthorn unregister node1 --certs certs
    """
    keys = _keys(certs, names)
    with connection(server, certs / "ca.crt", False, False).open() as control:
        registered = _registered(control)
        for name, key in keys.items():
            if key not in registered:
                typer.echo(f"{name} was not registered")
                continue
            control.unregister(registered[key])
            typer.echo(f"{name} is unregistered")


def _register(control: "ControlApi", name: str, key: bytes) -> str:
    import grpc

    node = _registered(control).get(key)
    if node is not None:
        return f"{name} is registered already, as node {node}"
    try:
        return f"{name} is registered, as node {control.register(key)}"
    except grpc.RpcError as error:
        raise ConfigError(
            f"{name} cannot be registered ({error.details()}): a key that was unregistered is not "
            "taken again, make a new one"
        ) from error


def _registered(control: "ControlApi") -> dict[bytes, int]:
    """The node ids by their keys; Flower also lists those that were unregistered."""
    return {n.public_key: n.node_id for n in control.nodes() if n.status != "unregistered"}


def _keys(certs: Path, names: list[str]) -> dict[str, bytes]:
    """Each client's public key. Raises ConfigError."""
    from launch.certificates import (
        CertificateError,
        check_client_name,
        public_key_file,
        public_key_pem,
    )

    try:
        for name in names:
            check_client_name(name)
        return {name: public_key_pem(public_key_file(certs, name)) for name in names}
    except CertificateError as error:
        raise ConfigError(str(error)) from error
