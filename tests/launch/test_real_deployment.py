"""Server, clients and operator as separate programs over TLS on the loopback interface."""

import json
import os
import re
import signal
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import pytest
from process_watch import running, until
from real_deployment import Bench, Started, bench

from blackthorn.launch.federation.addresses import free_loopback_ports
from blackthorn.launch.federation.certs import make
from blackthorn.recording.run_folder import read_metrics

pytestmark = [
    pytest.mark.deployment,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc to see what runs"),
]

CLIENTS = 3
ROUNDS = 3


@dataclass
class Federation:
    """A server over TLS with keys made; node0 to node2 are registered."""

    bench: Bench
    server: Started
    fleet: str
    control: str

    def client(self, name: str, *arguments: object, trust: str = "certs/ca.crt") -> Started:
        return self.bench.start(name, "client", "--server", self.fleet, "--ca", trust, *arguments)

    def operate(self, command: str, *arguments: object) -> str:
        done = self.bench.call(command, *arguments, "--server", self.control)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    folder = tmp_path_factory.mktemp("federation")
    keys = [f"node{i}" for i in range(CLIENTS)]
    make(folder / "certs", ["localhost"], [*keys, "node3", "stranger"])
    make(folder / "elsewhere", ["localhost"], [])
    fleet, control = free_loopback_ports(2)
    with bench(folder) as programs:
        server = programs.start(
            "server",
            *("server", "--host", "localhost", "--certs", "certs", "--state", "state"),
            *("--port", fleet, "--control", f"127.0.0.1:{control}"),
        )
        server.says("ready:")
        one = Federation(programs, server, f"localhost:{fleet}", f"localhost:{control}")
        told = one.operate("register", *keys, "--certs", "certs")
        assert [line.split(",")[0] for line in told.splitlines()] == [
            f"{key} is registered" for key in keys
        ]
        yield one


@pytest.fixture(scope="module")
def clients(federation: Federation) -> list[Started]:
    started = [
        federation.client(f"client{i}", "--key", f"certs/clients/node{i}") for i in range(CLIENTS)
    ]
    for client in started:
        client.says("connected to localhost")
    return started


def node_of(client: Started) -> list[str]:
    return re.findall(r"as node (\d+)", client.text())


def run_demo(federation: Federation, repository: Path, *arguments: object) -> tuple[int, str, str]:
    done = federation.bench.call(
        *("run", repository / "recipes" / "demo.toml", "--server", federation.control),
        *("--ca", "certs/ca.crt", "--follow", "--clients", CLIENTS),
        *("--set", f"num-server-rounds={ROUNDS}", "--set", "round-timeout=120", *arguments),
    )
    return done.returncode, done.stdout, done.stderr


def test_a_run_ends_with_a_model_and_says_where(
    federation: Federation, clients: list[Started], repository: Path
) -> None:
    del clients
    code, said, errors = run_demo(federation, repository, "--output-dir", "runs/first")
    assert code == 0, said + errors
    assert [f"round {number}/{ROUNDS}" in said for number in range(1, ROUNDS + 1)] == [True] * 3
    folder = federation.bench.folder / "state" / "runs" / "first"
    assert f"run folder: {folder}" in said
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["rounds_completed"]) == ("completed", ROUNDS)
    assert summary["clients"] == {"invited": 9, "replied": 9, "rejected": 0}
    # Over TLS with registered keys, a client is known by its key.
    assert "node-authentication = true" in (folder / "config.toml").read_text()
    assert "completed: 3 rounds" in said
    status = federation.operate("status", "--certs", "certs")
    assert f"finished:completed, round {ROUNDS}/{ROUNDS}" in status
    for number in range(CLIENTS):
        # Name, state, last seen, client, and no rejection.
        assert re.search(rf"node{number} +online +\d+ s ago +{number} +0\n", status), status


def test_a_client_that_was_killed_comes_back_as_the_same_node(
    federation: Federation, clients: list[Started]
) -> None:
    before = clients[0]
    assert before.stop() == 128 + signal.SIGTERM
    again = federation.client("client0-again", "--key", "certs/clients/node0")
    again.says("connected to localhost")
    clients[0] = again
    assert node_of(again) == node_of(before)[-1:]


def test_a_supernode_that_dies_is_started_again(
    federation: Federation, clients: list[Started], repository: Path
) -> None:
    client = clients[1]
    (supernode,) = children_named(client.process.pid, "flower-supernode")
    connections = len(node_of(client))
    os.kill(supernode, signal.SIGTERM)
    until(lambda: len(node_of(client)) > connections, 240.0)
    assert "somebody stopped the SuperNode; starting it again" in client.text()
    assert len(set(node_of(client))) == 1
    code, said, errors = run_demo(federation, repository, "--output-dir", "runs/second")
    assert code == 0, said + errors


def test_a_client_comes_back_to_a_server_that_was_set_up_anew(tmp_path: Path) -> None:
    """With another state folder, where its key is registered as another node."""
    make(tmp_path / "certs", ["localhost"], ["node0"])
    fleet, control, *elsewhere = free_loopback_ports(4)
    with bench(tmp_path) as programs:

        def serve(state: str, fleet: int, control: int) -> Started:
            return programs.start(
                *(f"{state}-{fleet}", "server", "--host", "localhost", "--certs", "certs"),
                *("--state", state, "--port", fleet, "--control", f"127.0.0.1:{control}"),
            )

        def register(server: Started, control: int) -> None:
            server.says("ready:")
            where = ("--certs", "certs", "--server", f"localhost:{control}")
            assert programs.call("register", "node0", *where).returncode == 0

        first = serve("first", fleet, control)
        register(first, control)
        client = programs.start(
            *("client", "client", "--server", f"localhost:{fleet}", "--ca", "certs/ca.crt"),
            *("--key", "certs/clients/node0"),
        )
        client.says("connected to localhost")
        # Before the client can ask there: a key that is not registered yet is sent away.
        second = serve("second", *elsewhere)
        register(second, elsewhere[1])
        second.stop()
        first.stop()
        serve("second", fleet, control)
        until(lambda: len(set(node_of(client))) == 2, 240.0)
        assert "says it is node" in client.text()


def last_round(folder: Path) -> int:
    return max((entry["round"] for entry in read_metrics(folder)), default=-1)


def children_named(parent: int, name: str) -> list[int]:
    """Direct children of a process with that program on their command line."""
    found = []
    for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        try:
            words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        except OSError:  # it has ended meanwhile
            continue
        if any(word.rpartition(b"/")[2] == name.encode() for word in words):
            found.append(int(child))
    return found


def test_a_second_client_with_the_same_key_is_refused(
    federation: Federation, clients: list[Started]
) -> None:
    assert clients[2].process.poll() is None
    errors = refused(federation, "--key", "certs/clients/node2", "--client-id", 1)
    assert "another program is connected with it" in errors


def test_an_unregistered_key_is_refused(federation: Federation) -> None:
    errors = refused(federation, "--key", "certs/clients/stranger", "--client-id", 0)
    assert "refused the key" in errors
    assert "not registered there (blackthorn register NAME)" in errors


def test_no_key_is_refused(federation: Federation) -> None:
    assert "takes registered clients only: give --key" in refused(federation, "--client-id", 0)


def test_a_key_that_flower_does_not_take_is_refused(federation: Federation) -> None:
    key = federation.bench.folder / "no-key"
    key.write_text("-----BEGIN OPENSSH PRIVATE KEY-----\n")
    errors = refused(federation, "--key", key, "--client-id", 0)
    assert "is not a private key that Flower takes" in errors


def test_a_wrong_authority_is_refused(federation: Federation) -> None:
    errors = refused(federation, "--client-id", 0, trust=("--ca", "elsewhere/ca.crt"))
    assert "is not the server that --ca" in errors


def test_plaintext_is_refused(federation: Federation) -> None:
    errors = refused(federation, "--client-id", 0, trust=("--insecure",))
    assert "wants TLS: give --ca ca.crt" in errors


def refused(
    federation: Federation,
    *arguments: object,
    trust: tuple[str, ...] = ("--ca", "certs/ca.crt"),
) -> str:
    """The one line with which a client gives up at once."""
    done = federation.bench.call(
        *("client", "--server", federation.fleet, *trust, "--patience", 0),
        *("--logs", "refused-logs", *arguments),
        seconds=90,
    )
    assert done.returncode == 1
    failed = [line for line in done.stderr.splitlines() if line.startswith("failed: ")]
    assert len(failed) == 1
    return failed[0]


def test_an_unregistered_client_is_shut_out(federation: Federation) -> None:
    federation.operate("register", "stranger", "--certs", "certs")
    client = federation.client("stranger", "--key", "certs/clients/stranger", "--client-id", 7)
    client.says("connected to localhost")
    federation.operate("unregister", "stranger", "--certs", "certs")
    client.says("its key was unregistered there")
    assert client.stop() in (1, 128 + signal.SIGTERM)
    assert "stranger" not in federation.operate("status", "--certs", "certs")
    again = federation.bench.call(
        *("register", "stranger", "--certs", "certs", "--server", federation.control)
    )
    assert again.returncode == 2
    assert "a key that was unregistered is not taken again" in again.stderr


def test_on_the_clients_port_only_the_fleet_service_answers(federation: Federation) -> None:
    trust = grpc.ssl_channel_credentials(
        (federation.bench.folder / "certs" / "ca.crt").read_bytes()
    )
    options = [("grpc.enable_http_proxy", 0)]
    calls = {
        "/flwr.proto.Fleet/PullMessages": grpc.StatusCode.UNAUTHENTICATED,
        "/flwr.proto.Control/ListRuns": grpc.StatusCode.UNIMPLEMENTED,
        "/flwr.proto.Runtime/PullPendingTasks": grpc.StatusCode.UNIMPLEMENTED,
        "/grpc.health.v1.Health/Check": grpc.StatusCode.UNIMPLEMENTED,
    }
    with grpc.secure_channel(federation.fleet, trust, options=options) as channel:
        for method, expected in calls.items():
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(method)(b"", timeout=10)
            assert caught.value.code() == expected, method


def test_a_wrong_configuration_at_the_server_ends_with_2(
    federation: Federation, clients: list[Started], repository: Path
) -> None:
    del clients
    code, _, errors = run_demo(
        federation, repository, "--set", "task=mnist", "--set", "data-dir=/nonexistent"
    )
    assert code == 2, errors
    assert errors.strip().splitlines()[-1].startswith("error: ")
    assert "/nonexistent" in errors


def test_a_failed_run_ends_with_1(
    federation: Federation, clients: list[Started], repository: Path
) -> None:
    """Nobody is client 4, and client 3 has examples of another shape than the recipe's."""
    del clients
    data = federation.bench.folder / "data.npz"
    np.savez(data, x=np.zeros((50, 20)), y=np.arange(50) % 10)
    federation.operate("register", "node3", "--certs", "certs")
    misfit = federation.client("client3", "--key", "certs/clients/node3", "--data", data)
    misfit.says("connected to localhost")
    settings = ("--set", "min-replies=5", "--set", "start-timeout=20", "--clients", 5)
    code, _, errors = run_demo(federation, repository, *settings)
    misfit.stop()
    assert code == 1
    assert "failed: 3 of 5 clients connected within 20 s (start-timeout); missing: 3, 4" in errors
    wrong = "x has shape (50, 20), allowed is (n, 1, 8, 8): the task's input-shape is 1,8,8"
    *_, failed, go_on = errors.splitlines()
    told = f"client 3: data-path 'data.npz': {wrong}"
    assert told in errors.splitlines()
    assert failed.endswith(f"; {told}")
    # On a busy machine it is told before all three have said who they are.
    assert re.search(r"waiting for 5 clients, \d are connected: 20 s \(start-timeout\)", errors)
    assert go_on.startswith("to go on with it: blackthorn run ")
    assert "--set resume=" in go_on
    assert misfit.text().count("cannot take part in run") == 1
    assert f"data-path '{data}': {wrong}" in misfit.text()


def test_a_run_is_followed_by_its_number_and_stopped(
    federation: Federation, clients: list[Started], repository: Path
) -> None:
    del clients
    trust = ("--ca", "certs/ca.crt")
    recipe = repository / "recipes" / "demo.toml"
    rounds = ("--set", "num-server-rounds=5000")
    said = federation.operate("run", recipe, *trust, "--clients", CLIENTS, *rounds)
    found = re.match(r"run (\d+) has started\n", said)
    assert found is not None, said
    number = found[1]
    assert f"blackthorn follow {number}" in said
    where = ("--server", federation.control, *trust)
    follower = federation.bench.start("follow", "follow", number, *where)
    follower.says("round    2/5000")
    assert federation.operate("stop", number, *trust) == "stopped\n"
    assert follower.process.wait(60) == 1
    assert "\nstopped\n" in follower.text()
    assert federation.operate("stop", number, *trust) == "it had ended before\n"
    unknown = federation.bench.call("follow", 1, *where)
    assert (unknown.returncode, unknown.stderr) == (2, "error: the server knows no run 1\n")


def test_orders_to_lie_are_refused(federation: Federation, repository: Path) -> None:
    code, _, errors = run_demo(federation, repository, "--set", "attack=all-ones")
    assert code == 2
    assert "take no orders to lie" in errors


def test_the_state_folder_and_the_ports_are_this_servers_alone(federation: Federation) -> None:
    port = federation.fleet.partition(":")[2]
    common = ("server", "--host", "localhost", "--certs", "certs")
    done = federation.bench.call(*common, "--state", "state", "--port", 1)
    assert (done.returncode, "in use by another server" in done.stderr) == (2, True)
    done = federation.bench.call(*common, "--state", "other-state", "--port", port)
    assert done.returncode == 2
    assert f"--port: 127.0.0.1:{port} cannot be listened on: Address already in use" in done.stderr


def test_stopping_the_server_leaves_nothing_behind(federation: Federation) -> None:
    """Last in this file: the server is gone afterwards."""
    family = [federation.server.process.pid]
    for pid in family:
        family += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    assert len(family) >= 3
    assert federation.server.stop() == 128 + signal.SIGTERM
    until(lambda: not any(running(pid) for pid in family))
    host, _, port = federation.fleet.partition(":")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), timeout=5).close()
