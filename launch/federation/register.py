"""`blackthorn register` and `unregister`: which keys may take part."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blackthorn.launch.federation.operator_options import DEFAULT_SERVER, Server, connection
from blackthorn.settings.config import ConfigError

if TYPE_CHECKING:
    from blackthorn.flower_port.control_api import ControlApi

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
    client_id: Annotated[
        int | None,
        typer.Option(
            min=0, help="The only client id of the key; by default the number its name ends with."
        ),
    ] = None,
    max_examples: Annotated[
        int | None, typer.Option(min=1, help="The most examples that the client may declare.")
    ] = None,
    replaces: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The client's key until now, in whose place this one comes; both are good until "
            "that one is unregistered.",
        ),
    ] = None,
    lift: Annotated[
        bool, typer.Option("--lift", help="Let keys in again that the server's guard has barred.")
    ] = False,
) -> None:
    """Let clients take part, by their public keys. One that is registered already stays so.

    A key is one client's, from then on: in runs with node-authentication no other id can be had
    with it, and no other key can have that id, but one that --replaces it (docs/operations.md).

    Example: blackthorn register node0 node1 --certs certs
    """
    from blackthorn.launch.federation.certificates import client_names

    if bool(names) == every:
        raise ConfigError("give the names of clients, or --all")
    keys = _keys(certs, client_names(certs) if every else names or [])
    if client_id is not None and len(keys) > 1:
        raise ConfigError("--client-id is one client's: name that one alone")
    before = None
    if replaces is not None:
        if len(keys) > 1 or client_id is not None or lift:
            raise ConfigError("--replaces is of one key, which has the other's client id: name it")
        before = _keys(certs, [replaces])[replaces]
    with connection(server, certs / "ca.crt", False, False).open() as control:
        for name, key in keys.items():
            if lift:
                typer.echo(_lift(control, name, key))
                continue
            wanted = _id_in(name) if client_id is None else client_id
            told = _register(control, name, key)
            asked = {"client_id": wanted} if before is None else {"replaces": before.decode()}
            typer.echo(told + _bind(control, name, key, asked, max_examples))


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
            control.guard("forget", key=key.decode())
            typer.echo(f"{name} is unregistered")


def _register(control: "ControlApi", name: str, key: bytes) -> str:
    import grpc

    node = _registered(control).get(key)
    if node is not None:
        return f"{name} is registered already, as node {node}"
    try:
        return f"{name} is registered, as node {control.register(key)}"
    except grpc.RpcError as error:
        if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            raise
        raise ConfigError(
            f"{name} cannot be registered ({error.details()}): a key that was unregistered is not "
            "taken again, make a new one"
        ) from error


def _bind(
    control: "ControlApi",
    name: str,
    key: bytes,
    asked: Mapping[str, int | str | None],
    max_examples: int | None,
) -> str:
    """Tell the server's guard whose key it is (a client's by its id, or that of the key that it
    replaces); what to add to the line."""
    try:
        known = control.guard(
            "register", key=key.decode(), name=name, max_examples=max_examples, **asked
        )
    except ValueError as error:
        refused = "--replaces is not possible"
        if "client_id" in asked:
            refused = f"--client-id {asked['client_id']} is not free"
        raise ConfigError(f"{name}: {refused}: {error}") from error
    if known is None:
        for option, value in (("max-examples", max_examples), ("replaces", asked.get("replaces"))):
            if value is not None:
                raise ConfigError(f"--{option} is not allowed: that server has no guard")
        return ""
    bound = "" if known["client_id"] is None else f", client {known['client_id']}"
    most = known["max_examples"]
    return bound + ("" if most is None else f" with at most {most} examples")


def _lift(control: "ControlApi", name: str, key: bytes) -> str:
    answer = control.guard("lift", key=key.decode())
    if answer is None:
        raise ConfigError("--lift is not allowed: that server has no guard")
    return f"{name} is let in again" if answer["lifted"] else f"{name} was not barred"


def _id_in(name: str) -> int | None:
    """The number at the end of a key's name, as `blackthorn client` reads it."""
    found = re.search(r"\d+$", name)
    return int(found.group()) if found else None


def _registered(control: "ControlApi") -> dict[bytes, int]:
    """The node ids by their keys; Flower also lists those that were unregistered."""
    return {n.public_key: n.node_id for n in control.nodes() if n.status != "unregistered"}


def _keys(certs: Path, names: list[str]) -> dict[str, bytes]:
    """Each client's public key. Raises ConfigError."""
    from blackthorn.launch.federation.certificates import (
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
