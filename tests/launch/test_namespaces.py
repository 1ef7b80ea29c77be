"""Hosts of their own, a router in between, and links that fail: network namespaces."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from network import Host, network, require_namespaces
from process_watch import until
from real_deployment import Bench, bench

from blackthorn.launch.federation.certs import make
from blackthorn.recording.run_folder import read_metrics, read_summary

pytestmark = pytest.mark.deployment

SERVER = "fl.example.org"
NAMES = ("server", "node0", "node1", "node2", "node3")
CUT, THROTTLED, ATTACKER = 1, 2, 3
ROUNDS = 10
DEADLINE = 40


@dataclass
class Federation:
    """A server and four clients that are connected, each on its own host."""

    bench: Bench
    server: Host
    clients: list[Host]


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    require_namespaces()
    folder = tmp_path_factory.mktemp("network")
    make(folder / "certs", [SERVER], list(NAMES[1:]))
    with network(NAMES, SERVER) as (server, *clients), bench(folder) as programs:
        arguments = ("--host", SERVER, "--certs", "certs", "--state", "state")
        programs.start("server", "server", *arguments, prefix=server.prefix).says("ready:")
        told = programs.call("register", "--all", "--certs", "certs", prefix=server.prefix)
        assert told.returncode == 0, told.stderr
        for name, host in zip(NAMES[1:], clients, strict=True):
            options = (
                ["--program", "blackthorn.attacks.flwr_clientapp:main"] if name == "node3" else []
            )
            prefix = [*host.prefix, "env", "BLACKTHORN_ATTACK=nan"]
            programs.start(
                name,
                *("client", "--server", f"{SERVER}:9092", "--ca", "certs/ca.crt"),
                *("--key", f"certs/clients/{name}", *options),
                prefix=prefix,
            )
        for started in programs.started[1:]:
            started.says(f"connected to {SERVER}")
        yield Federation(programs, server, clients)


def test_of_the_server_only_the_fleet_port_answers(federation: Federation) -> None:
    listening = federation.server.listening_ports()
    assert {9092, 9093} < listening
    assert len(listening) >= 4
    for client in federation.clients:
        assert client.reachable_ports(federation.server, listening) == {9092}


def test_of_the_clients_nothing_answers(federation: Federation) -> None:
    for client in federation.clients:
        listening = client.listening_ports()
        assert listening
        assert federation.server.reachable_ports(client, listening) == set()


def test_over_a_port_without_tls_the_claim_counts_who_is_on_the_way(
    federation: Federation, repository: Path
) -> None:
    programs, here = federation.bench, federation.server.prefix
    server = programs.start(
        *("plain-server", "server", "--host", SERVER, "--insecure", "--i-know", "--state", "plain"),
        *("--port", 9192, "--control", "127.0.0.1:9193"),
        prefix=here,
    )
    server.says("ready:")
    clients = [
        programs.start(
            *(f"plain-client{i}", "client", "--server", f"{SERVER}:9192", "--insecure"),
            *("--i-know", "--client-id", i),
            prefix=federation.clients[i].prefix,
        )
        for i in range(2)
    ]
    for client in clients:
        client.says(f"connected to {SERVER}")
    settings = {
        "algorithm": "dp-fedavg",
        "num-server-rounds": 1,
        "participation": "full",
        "sample-rate": 1.0,
        "epsilon": 0.0,
        "noise-multiplier": 1.0,
        "output-dir": "runs/plain",
    }
    done = programs.call(
        *("run", repository / "recipes" / "dp-digits.toml", "--server", "127.0.0.1:9193"),
        *("--insecure", "--follow", "--clients", 2),
        *(part for key, value in settings.items() for part in ("--set", f"{key}={value}")),
        prefix=here,
    )
    assert done.returncode == 0, done.stdout + done.stderr + server.text()
    for program in (*clients, server):
        program.stop()
    summary = read_summary(programs.folder / "plain" / "runs" / "plain")
    assert summary is not None
    assert summary["privacy"]["covers_clients"] is False
    assert "whoever is on the way to it, who reads what clients send" in summary["privacy"]["claim"]


def test_a_run_survives_an_outage_loss_and_a_slow_link(
    federation: Federation, repository: Path
) -> None:
    folder = federation.bench.folder / "state" / "runs" / "outage"
    federation.clients[0].add_loss(5)
    federation.clients[THROTTLED].throttle("512kbit")
    run = federation.bench.start(
        "run",
        *("run", repository / "recipes" / "demo.toml", "--ca", "certs/ca.crt", "--follow"),
        *("--clients", 4, "--output-dir", "runs/outage"),
        *("--set", f"num-server-rounds={ROUNDS}", "--set", f"round-timeout={DEADLINE}"),
        prefix=federation.server.prefix,
    )
    until(lambda: rounds_of(folder) >= 2, 300)
    federation.clients[CUT].link("down")
    until(lambda: len(missed(folder, CUT)) >= 2, 300)
    federation.clients[CUT].link("up")
    assert run.process.wait(600) == 0, run.text()
    summary = read_summary(folder)
    assert summary is not None
    assert (summary["status"], summary["rounds_completed"]) == ("completed", ROUNDS)
    entries = read_metrics(folder)[1:]
    absences = [entry["round"] for entry in missed(folder, CUT)]
    assert len(absences) >= 2
    # It came back: its absence is one stretch of rounds, with replies before and after.
    assert absences == list(range(absences[0], absences[-1] + 1))
    assert absences[0] > 2
    assert absences[-1] < ROUNDS
    for entry in entries:
        assert entry["invited"] == entry["replied"] + len(entry["rejected"])
        assert entry["seconds"]["training"] <= DEADLINE + 5
        (reason,) = [r["reason"] for r in entry["rejected"] if r["client"] == ATTACKER]
        assert "not finite" in reason
    assert summary["final"]["accuracy"] > 0.5
    status = federation.bench.call(
        "status", "--certs", "certs", prefix=federation.server.prefix
    ).stdout
    # Beside a line of what was refused of it, as an answer that came too late.
    (line,) = [line for line in status.splitlines() if line.split()[:1] == [NAMES[1 + CUT]]]
    assert line.split()[-2:] == [str(CUT), str(len(absences))]


def rounds_of(folder: Path) -> int:
    return max((entry["round"] for entry in read_metrics(folder)), default=-1)


def missed(folder: Path, client: int) -> list[dict[str, Any]]:
    """The rounds whose metrics say that the client was asked and did not count."""
    return [
        entry
        for entry in read_metrics(folder)
        if any(rejection["client"] == client for rejection in entry["rejected"])
    ]


def test_a_run_ends_over_a_link_with_delay_and_loss(
    federation: Federation, repository: Path
) -> None:
    host = federation.clients[0]
    if not host.has_netem():
        pytest.skip("this kernel has no netem: no link can be given a delay of 100 ms")
    host.add_loss_and_delay(percent=5, milliseconds=100)
    began = time.monotonic()
    assert host.reachable_ports(federation.server, {9092}) == {9092}
    assert time.monotonic() - began >= 0.2
    done = federation.bench.call(
        *("run", repository / "recipes" / "demo.toml", "--ca", "certs/ca.crt", "--follow"),
        *("--clients", 4, "--output-dir", "runs/delay", "--set", "num-server-rounds=3"),
        prefix=federation.server.prefix,
        seconds=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    entries = read_metrics(federation.bench.folder / "state" / "runs" / "delay")
    assert [entry["replied"] for entry in entries[1:]] == [3, 3, 3]
