"""`blackthorn status`: who is connected, last seen when, and rejected how often."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blackthorn.launch.federation.operator_options import (
    DEFAULT_SERVER,
    Ca,
    Certs,
    IKnow,
    Insecure,
    Server,
    connection,
)
from blackthorn.settings.rounding import upward

if TYPE_CHECKING:
    from blackthorn.flower_port.control_api import ControlApi
    from blackthorn.launch.federation.run_log import RunLog

# Flower takes a node for dead after two missed heartbeats.
_PATIENCE = 2
_LOG_SECONDS = 2.0


def status(
    server: Server = DEFAULT_SERVER,
    ca: Ca = None,
    certs: Certs = None,
    insecure: Insecure = False,
    i_know: IKnow = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object in place of text.")] = (
        False
    ),
) -> None:
    """Show the clients by registered name, and the newest run.

    Example: blackthorn status --certs certs
    """
    from blackthorn.launch.federation.expiry import at_a_client

    to = connection(server, ca or (certs / "ca.crt" if certs else None), insecure, i_know)
    with to.open() as control:
        run_id, log = _newest_run(control)
        guarded = control.guard("list") or {"refusals": []}
        clients = client_lines(control.nodes(), log, _names(certs))
        state = str(control.status(run_id)) if run_id is not None else ""
    expiring = at_a_client(to.address, to.ca, proxied=False)
    if as_json:
        run = _run_as_json(run_id, state, log) if run_id is not None else None
        known = {
            "run": run,
            "clients": [asdict(line) for line in clients],
            "refusals": guarded["refusals"],
            "expiring": expiring,
        }
        typer.echo(json.dumps(known, indent=2, default=lambda moment: moment.isoformat()))
        return
    if run_id is not None:
        done = f", round {log.last_round}/{log.rounds}" if log.rounds else ""
        typer.echo(f"run {run_id}: {state}{done}{spent_said(log)}")
    else:
        typer.echo("no run yet")
    for row in table(clients):
        typer.echo(row)
    for refusal in guarded["refusals"]:
        typer.echo(refusal_line(refusal))
    for warning in expiring:
        typer.echo(warning)


def _run_as_json(run_id: int, state: str, log: "RunLog") -> dict[str, Any]:
    # As text: not every reader of JSON keeps 64 bits.
    return {
        "id": str(run_id),
        "state": state,
        "round": log.last_round,
        "rounds": log.rounds,
        "spent": spent_said(log).removeprefix(", "),
        "folder": log.folder,
    }


def spent_said(log: "RunLog") -> str:
    """What the run has spent of privacy: by its summary, by what is in its folder where that is on
    this machine, or else as it told; empty where nothing is claimed."""
    from blackthorn.launch.federation.run_log import privacy_said

    if log.summary is not None:
        return privacy_said(log.summary)
    if log.folder and (Path(log.folder) / "config.toml").is_file():
        from blackthorn.reporting.run_record import read_record

        record = read_record(Path(log.folder))
        said = privacy_said(record.figures)
        if said or not log.spent:
            return said
    if not log.spent:
        return ""
    known = log.spent["epsilon_rdp"]
    epsilon = "not known here" if known is None else f"{upward(known)}, by RDP"
    return f", epsilon {epsilon}, after {log.spent['rounds']} rounds; one under way is not in it"


@dataclass(frozen=True)
class ClientLine:
    """What is known of one node."""

    name: str
    state: str
    last_seen: datetime | None
    client: int | None
    rejected: int | None


def client_lines(nodes: list[Any], log: "RunLog", names: Mapping[bytes, str]) -> list[ClientLine]:
    """One line a node, those that are gone for good left out; by name."""
    held = {node: client for client, node in log.nodes.items()}
    lines = []
    for node in nodes:
        if node.status == "unregistered":
            continue
        client = held.get(node.node_id)
        rejected = None if client is None else log.rejections.get(client, 0)
        name = names.get(node.public_key, f"node {node.node_id}")
        lines.append(ClientLine(name, node.status, _last_seen(node), client, rejected))
    return sorted(lines, key=lambda line: line.name)


def table(lines: list[ClientLine]) -> list[str]:
    """The lines in columns, under their headings."""
    rows = [("name", "state", "last seen", "client", "rejected in run")]
    now = datetime.now(UTC)
    for one in lines:
        seen = _ago(one.last_seen, now)
        rows.append((one.name, one.state, seen, _shown(one.client), _shown(one.rejected)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _shown(number: int | None) -> str:
    return "" if number is None else str(number)


def refusal_line(refusal: Mapping[str, Any]) -> str:
    """What the server's guard has refused since it was started, of one key and kind."""
    barred = "; it is barred, blackthorn register --lift lets it in" if refusal["barred"] else ""
    often = "once" if refusal["count"] == 1 else f"{refusal['count']} times"
    return f"{refusal['key']}: refused {often}: {refusal['last']}{barred}"


def _last_seen(node: Any) -> datetime | None:
    """The last heartbeat, or the moment it signed off."""
    if node.status == "online":
        heartbeat = node.online_until - _PATIENCE * node.heartbeat_interval
        return datetime.fromtimestamp(heartbeat, tz=UTC)
    if not node.last_activated_at:
        return None
    if node.last_deactivated_at:
        return datetime.fromisoformat(node.last_deactivated_at)
    return datetime.fromisoformat(node.last_activated_at)


def _ago(moment: datetime | None, now: datetime) -> str:
    if moment is None:
        return "never"
    seconds = max(0, int((now - moment).total_seconds()))
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length} {unit} ago"
    return f"{seconds} s ago"


def _names(certs: Path | None) -> dict[bytes, str]:
    from blackthorn.launch.federation.certificates import (
        client_names,
        public_key_file,
        public_key_pem,
    )

    if certs is None:
        return {}
    return {public_key_pem(public_key_file(certs, n)): n for n in client_names(certs)}


def _newest_run(control: "ControlApi") -> "tuple[int | None, RunLog]":
    from blackthorn.launch.federation.run_log import RunLog

    log = RunLog()
    runs = control.run_ids()
    if not runs:
        return None, log
    for _ in log.read(control.log(runs[-1], _LOG_SECONDS)):
        pass
    return runs[-1], log
