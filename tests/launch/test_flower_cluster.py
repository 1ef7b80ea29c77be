"""FlowerCluster with real processes, and a Flower app that needs nothing but numpy."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from process_watch import running, until
from tiny_app import (
    expected_model,
    listening_addresses,
    new_cluster,
    processes_of,
    run,
    write_app,
)

from blackthorn.launch.federation import deployment
from blackthorn.launch.federation.flower_cluster import DeploymentError, FlowerCluster, Node

pytestmark = [
    pytest.mark.deployment,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc to see what runs"),
]


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_app(tmp_path_factory.mktemp("tiny-app"))


@pytest.fixture(scope="module")
def cluster(app: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FlowerCluster]:
    """Three warm nodes: a plain one, one with settings of its own, one with another program."""
    nodes = [
        Node(),
        Node(config={"words": 'it\'s "so" = 1'}, env={"OWN_VARIABLE": "mine"}),
        Node(program="other_program:main"),
    ]
    with new_cluster(nodes, tmp_path_factory.mktemp("cluster"), app) as cluster:
        yield cluster


def test_a_run_completes_with_the_right_model(
    cluster: FlowerCluster, app: Path, tmp_path: Path
) -> None:
    seen = []
    result = tmp_path / "with 'quotes\" and = signs.json"
    run_id = cluster.submit(app, {"result": str(result), "num-server-rounds": 4})
    status = cluster.wait(run_id, deadline=90.0, on_tick=lambda status: seen.append(str(status)))
    assert (str(status), status.details) == ("finished:completed", "")
    assert seen[-1] == "finished:completed"
    told = json.loads(result.read_text())
    assert told["model"] == pytest.approx(expected_model(4), rel=1e-12)
    assert told["cwd"] == str(cluster.output_dir)
    by_node = sorted(told["told"], key=lambda one: one["partition"])
    assert [(one["partition"], one["of"]) for one in by_node] == [(0, 3), (1, 3), (2, 3)]
    assert [one["words"] for one in by_node] == ["", 'it\'s "so" = 1', ""]
    assert [one["node-variable"] for one in by_node] == ["", "mine", ""]
    assert [one["program"] for one in by_node] == ["Flower's", "Flower's", "another"]
    # The state of a ClientApp goes from message to message through the SuperNode.
    assert [one["count"] for one in by_node] == [3, 3, 3]
    assert "round 4" in (cluster.logs / "serverapp.log").read_text()
    assert "Sent successfully" in (cluster.logs / "supernode-0.log").read_text()


def test_every_message_has_a_process_of_its_own(
    cluster: FlowerCluster, app: Path, tmp_path: Path
) -> None:
    first = run(cluster, app, tmp_path / "1.json", num_server_rounds=1)
    second = run(cluster, app, tmp_path / "2.json", num_server_rounds=1)
    processes = {one["process"] for told in (first, second) for one in told["told"]}
    assert len(processes) == 6
    assert not any(running(process) for process in processes)


def test_a_warm_round_is_fast(cluster: FlowerCluster, app: Path, tmp_path: Path) -> None:
    told = run(cluster, app, tmp_path / "fast.json", num_server_rounds=5)
    # Flower's own processes and waits take 6 to 9 seconds a round where nothing else runs.
    assert sorted(told["rounds"])[2] < 4.0


def test_everything_listens_on_loopback_only(cluster: FlowerCluster) -> None:
    addresses = listening_addresses(processes_of(cluster.id))
    # Four of the SuperLink, and one of each SuperNode.
    assert len(addresses) == 4 + 3
    hosts = {address.rpartition(":")[0] for address in addresses}
    # 127.0.0.1, as an IPv4 address or in gRPC's IPv6 clothes (::ffff:127.0.0.1).
    assert hosts <= {"0100007F", "0000000000000000FFFF00000100007F"}


def test_a_failed_run_is_reported_as_failed(
    cluster: FlowerCluster, app: Path, tmp_path: Path
) -> None:
    config = {"result": str(tmp_path / "none.json"), "behaviour": "server-raises"}
    run_id = cluster.submit(app, config)
    status = cluster.wait(run_id, deadline=60.0)
    assert status.finished
    assert not status.completed
    assert str(status) == "finished:failed"
    assert "no such thing" in status.details
    assert "no such thing" in cluster.log(run_id)


def test_a_client_that_raises_does_not_stop_the_others(
    cluster: FlowerCluster, app: Path, tmp_path: Path
) -> None:
    told = run(cluster, app, tmp_path / "r.json", num_server_rounds=1, behaviour="client-raises")
    assert sorted(one["partition"] for one in told["told"]) == [0, 2]
    assert "a client's own trouble" in (cluster.logs / "supernode-1.log").read_text()


def test_a_refused_submission_says_why(cluster: FlowerCluster, app: Path, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'nothing'\n")
    with pytest.raises(DeploymentError, match=r"flwr run did not start the run: .*pyproject"):
        cluster.submit(tmp_path, {})
    with pytest.raises(ValueError, match="there is no absent in it"):
        cluster.submit(app, {}, parts=["absent"])


def test_a_run_past_its_deadline_is_stopped(
    cluster: FlowerCluster, app: Path, tmp_path: Path
) -> None:
    # Waits for nodes that never come.
    run_id = cluster.submit(app, {"result": str(tmp_path / "r.json"), "num-clients": 99})
    until(lambda: str(cluster.status(run_id)) == "running")
    with pytest.raises(TimeoutError, match=f"run {run_id}: not finished within 0.5 seconds"):
        cluster.wait(run_id, deadline=0.5)
    assert str(cluster.status(run_id)) == "finished:stopped"
    assert not cluster.stop(run_id)
    with pytest.raises(KeyError, match=f"no run {run_id + 1}"):
        cluster.status(run_id + 1)


def test_a_killed_client_process_is_dead_and_the_round_goes_on(app: Path, tmp_path: Path) -> None:
    config: dict[str, Any] = {"behaviour": "client-hangs", "num-server-rounds": 1, "patience": 8.0}
    nodes = [Node(config={"leaves-a-process": True}), Node(), Node()]
    with new_cluster(nodes, tmp_path, app) as cluster:
        run_id = cluster.submit(app, {**config, "result": str(tmp_path / "r.json")})
        until(lambda: len(cluster.client_processes(1)) == 1)
        before = processes_of(cluster.id)
        (process,) = cluster.client_processes(1)
        os.kill(process, signal.SIGKILL)
        until(lambda: not cluster.client_processes(1))
        assert cluster.wait(run_id, deadline=60.0).completed
        told = json.loads((tmp_path / "r.json").read_text())
        assert sorted(one["partition"] for one in told["told"]) == [0, 2]
        assert not cluster.deaths()
        assert len(processes_of(cluster.id, node=2)) == 2
        cluster.kill_node(2)
        until(lambda: list(cluster.deaths()) == [2])
        # Its SuperExec notices.
        until(lambda: not processes_of(cluster.id, node=2))
        assert len(processes_of(cluster.id, node=0)) >= 2
    assert not any(running(process) for process in before)
    assert not processes_of(cluster.id)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_when_the_launcher_is_interrupted(
    app: Path, tmp_path: Path, number: int
) -> None:
    launcher = f"""
import sys, time
from pathlib import Path
from blackthorn.launch.federation.flower_cluster import FlowerCluster
with FlowerCluster(2, Path("out"), preload=["flwr.superlink.cli", "flwr.clientapp"]) as cluster:
    run_id = cluster.submit(Path({str(app)!r}), {{
        "behaviour": "client-hangs", "num-clients": 2, "result": "r.json"
    }})
    print(cluster.id, flush=True)
    cluster.wait(run_id, deadline=100.0)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", launcher],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    cluster_id = process.stdout.readline().strip()
    assert cluster_id
    # In mid-round: a ClientApp and the ServerApp run.
    names = {"flwr-clientapp", "flwr-serverapp"}
    until(lambda: names <= {_name(pid) for pid in processes_of(cluster_id)})
    before = processes_of(cluster_id)
    assert len(before) > 10
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    if number == signal.SIGTERM:
        assert process.returncode == 128 + signal.SIGTERM
    else:
        assert process.returncode == -number, errors
    if number == signal.SIGKILL:
        until(lambda: not processes_of(cluster_id))
    assert not processes_of(cluster_id)
    assert not any(running(pid) for pid in before)


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def test_standard_programs_give_the_same_result(app: Path, tmp_path: Path) -> None:
    nodes = [Node(), Node(program="other_program:main")]
    with new_cluster(nodes, tmp_path, app, warm=False, quick_polls=False) as cluster:
        told = run(cluster, app, tmp_path / "cold.json", num_clients=2)
        assert told["model"] == pytest.approx(expected_model(2, clients=2), rel=1e-12)
        programs = {one["partition"]: one["program"] for one in told["told"]}
        assert programs == {0: "Flower's", 1: "another"}
        before = processes_of(cluster.id)
        commands = {Path(f"/proc/{pid}/cmdline").read_text() for pid in before}
        assert not any("fork_server" in command for command in commands)
    assert not any(running(process) for process in before)
    assert not processes_of(cluster.id)


def test_ports_that_are_taken_are_drawn_again(
    app: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    occupant = socket.socket()
    occupant.bind(("127.0.0.1", 0))
    occupant.listen()
    taken = occupant.getsockname()[1]
    draw, draws = deployment.free_loopback_ports, []

    def unlucky(count: int) -> list[int]:
        ports = draw(count)
        draws.append(ports)
        # The control port the first time, the health port the second.
        if len(draws) == 1:
            return [*ports[:2], taken, ports[3]]
        return [*ports[:3], taken] if len(draws) == 2 else ports

    monkeypatch.setattr(deployment, "free_loopback_ports", unlucky)
    with new_cluster(1, tmp_path, app) as second:
        assert len(draws) == 3
        told = run(second, app, tmp_path / "r.json", num_clients=1, num_server_rounds=1)
        assert told["model"] == pytest.approx(expected_model(1, clients=1), rel=1e-12)
    occupant.close()


def test_a_node_that_cannot_start_is_named_and_nothing_stays(app: Path, tmp_path: Path) -> None:
    broken = tmp_path / "bin"
    broken.mkdir()
    (broken / "flower-supernode").write_text("#!/bin/sh\necho out of order\nexit 3\n")
    (broken / "flower-supernode").chmod(0o755)
    cluster = new_cluster([Node(), Node(path_prefix=broken)], tmp_path, app)
    with pytest.raises(DeploymentError, match=r"(?s)supernode-1 ended with status 3.*out of order"):
        cluster.__enter__()
    assert not processes_of(cluster.id)


def test_only_the_waits_are_shorter() -> None:
    """In `flower-supernode` and `flower-superexec`: of Flower's sleeps, and no longer than told."""
    program = """
import inspect, json, os, sys, time
from blackthorn.flower_port import programs
from flwr.supercore.inflatable.inflatable_utils import pull_objects
from flwr.supercore.superexec import run_superexec as executor
import importlib
node = importlib.import_module("flwr.supernode.start_client_internal")
seen = []
def look():
    for sleep in (node.time.sleep, executor.time.sleep, time.sleep):
        started = time.monotonic()
        sleep(0.5)
        seen.append(time.monotonic() - started)
    seen.append(inspect.signature(pull_objects).parameters["initial_backoff"].default)
    seen.append(node.time.time() - time.time())
sys.modules["look"] = type(sys)("look")
sys.modules["look"].look = look
for name in programs.STANDARD_ENTRIES:
    programs.STANDARD_ENTRIES[name] = "look:look"
look(); programs.superexec(); programs.supernode()
print(json.dumps(seen))
"""
    env = {**os.environ, "BLACKTHORN_POLL_SECONDS": "0.05"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)
    seen = json.loads(done.stdout)
    before, executor, node = seen[:5], seen[5:10], seen[10:]
    for told, waits in ((before, "long long"), (executor, "long short"), (node, "short short")):
        for seconds, wait in zip(told[:2], waits.split(), strict=True):
            assert seconds < 0.3 if wait == "short" else seconds >= 0.5
        assert told[2] >= 0.5
        assert abs(told[4]) < 0.1
    assert [before[3], executor[3], node[3]] == [1, 1, 0.05]
