"""`blackthorn client`: a SuperNode and the executor of its ClientApps, kept alive."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from blackthorn.launch.federation.addresses import check_free, check_insecure, parse_address
from blackthorn.launch.federation.members import OWN_CLIENTAPP, ClientSettings, check_safeguards
from blackthorn.launch.federation.operator_options import IKnow, Insecure, make_folder
from blackthorn.launch.federation.web_port import METRICS_BIND, MetricsBind, web_address
from blackthorn.settings.config import ConfigError


def client(
    server: Annotated[str, typer.Option(metavar="NAME:PORT", help="The server's clients' port.")],
    ca: Annotated[
        Path | None, typer.Option(help="The federation's ca.crt, by which the server is known.")
    ] = None,
    key: Annotated[
        Path | None, typer.Option(help="This client's private key, registered at the server.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="This client's own examples: .npz or image folder.")
    ] = None,
    client_id: Annotated[
        int | None,
        typer.Option(min=0, help="Which client this is; by default the number the key ends in."),
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Where this machine keeps the task's data set.")
    ] = None,
    policy: Annotated[
        Path | None,
        typer.Option(
            help="What this client may send, whatever the server asks for (docs/privacy.md). It "
            "then runs this installation's ClientApp, and none of the server's code."
        ),
    ] = None,
    ledger: Annotated[
        Path | None,
        typer.Option(
            help="Where the client counts what it sends; by default beside the policy, and without "
            "one nowhere. Without a policy Blackthorn's ClientApp and its mod count, an app of the "
            "server's that has neither does not."
        ),
    ] = None,
    members: Annotated[
        Path | None,
        typer.Option(
            help="This client's own list of all clients' public keys, a line each: number, key. In "
            "secure aggregation it then takes no keys that they have not signed."
        ),
    ] = None,
    logs: Annotated[
        Path | None, typer.Option(help="Folder for logs; by default blackthorn-client-ID.")
    ] = None,
    patience: Annotated[
        float,
        typer.Option(
            help="Seconds in which a refused key is tried again (a killed client's is "
            "free after a minute)."
        ),
    ] = 90.0,
    program: Annotated[
        str | None,
        typer.Option(metavar="MODULE:FUNCTION", help="Run in place of Flower's flwr-clientapp."),
    ] = None,
    metrics_port: Annotated[
        int,
        typer.Option(
            help="Port of /metrics (Prometheus) and /healthz (docs/operations.md); 0: none."
        ),
    ] = 0,
    metrics_bind: MetricsBind = METRICS_BIND,
    standard_client: Annotated[
        bool, typer.Option(help="Flower's own client program: a new Python for every message.")
    ] = False,
    insecure: Insecure = False,
    i_know: IKnow = False,
) -> None:
    """Take part in a federation until stopped. Only dials out: works behind NAT.

    Example: blackthorn client --server fl.example.org:9092 --ca ca.crt --key node0 --data a.npz
    """
    address = parse_address(server, "--server", 9092)
    if insecure == (ca is not None):
        raise ConfigError("give either --ca ca.crt, or --insecure")
    if insecure:
        check_insecure(address.host, i_know)
        if key is not None:
            raise ConfigError(f"--key {key} is of no use with --insecure: a key needs TLS")
    files = {"--ca": ca, "--key": key, "--data": data, "--data-dir": data_dir, "--policy": policy}
    files["--members"] = members
    for option, path in files.items():
        if path is not None and not path.exists():
            raise ConfigError(f"{option} {path} does not exist")
    if data is not None:
        _check_examples(data.resolve())
    if ca is not None:
        from blackthorn.launch.federation.probe import check_authority

        check_authority(ca)
    if members is not None:
        from blackthorn.client_app.members import read_members

        read_members(members)
        if key is None:
            raise ConfigError(f"--members {members} is of no use without --key, which signs")
    if program is not None and not re.fullmatch(r"\w+(\.\w+)*:\w+", program):
        raise ConfigError(
            f"--program {program} is not allowed: MODULE:FUNCTION, for example "
            "blackthorn.attacks.flwr_clientapp:main"
        )
    if program is not None and policy is not None:
        raise ConfigError(
            f"--program {program} is not allowed with --policy {policy}, which only the installed "
            "ClientApp is known to keep: leave one of them out"
        )
    own_id = client_id if client_id is not None else _id_of_key(key)
    folder = (logs or Path(f"blackthorn-client-{own_id}")).resolve()
    if ledger is None and policy is not None:
        ledger = policy.with_suffix(".ledger.json")
    settings = ClientSettings(
        server=address,
        ca=ca.resolve() if ca else None,
        key=key.resolve() if key else None,
        client_id=own_id,
        data=data.resolve() if data else None,
        data_dir=data_dir.resolve() if data_dir else None,
        policy=policy.resolve() if policy else None,
        ledger=ledger.expanduser().absolute() if ledger else None,
        logs=folder,
        patience=patience,
        program=OWN_CLIENTAPP if policy is not None else program,
        warm=not standard_client,
        members=members.resolve() if members else None,
        web=web_address(metrics_port, metrics_bind),
    )
    if settings.web is not None:
        check_free(settings.web, "--metrics-bind/--metrics-port")
    if settings.ledger is not None:
        known = check_safeguards(settings.policy, settings.ledger, settings.data)
        settings = replace(settings, ledger_id=known)
    make_folder(settings.logs, "--logs")
    from blackthorn.launch.federation.client_service import take_part

    take_part(settings)


def _check_examples(data: Path) -> None:
    """What no run would take is refused before anybody is contacted. Raises ConfigError."""
    from blackthorn.tasks.own_arrays import check_own_examples

    try:
        check_own_examples(data)
    except ValueError as error:
        raise ConfigError(f"--data: {error}") from error


def _id_of_key(key: Path | None) -> int:
    number = re.search(r"\d+$", key.name) if key is not None else None
    if number is None:
        raise ConfigError(
            "--client-id is missing: a number from 0, another for every client (a key that ends in "
            "one, such as node3, says it as well)"
        )
    return int(number.group())
