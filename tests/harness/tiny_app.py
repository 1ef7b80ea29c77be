"""A Flower app that needs nothing but numpy, the clusters that run it, and what these leave."""

import json
from pathlib import Path
from typing import Any

from process_watch import running

from blackthorn.launch.federation.flower_cluster import FlowerCluster, Node

PYPROJECT = """
[project]
name = "tiny"
version = "1.0.0"
description = ""
license = "Apache-2.0"
dependencies = ["flwr"]

[tool.flwr.app]
publisher = "tester"

[tool.flwr.app.components]
serverapp = "tiny.server:app"
clientapp = "tiny.client:app"

[tool.flwr.app.config]
num-server-rounds = 2
result = ""
behaviour = "well"
num-clients = 3
patience = 60.0
"""
SERVER = """
import json, os, sys, time
from pathlib import Path
import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()

def exchange(grid, messages, seconds):
    waiting, replies, end = set(grid.push_messages(messages)), [], time.time() + seconds
    while waiting and time.time() < end:
        got = list(grid.pull_messages(list(waiting)))
        replies += got
        waiting -= {reply.metadata.reply_to_message_id for reply in got}
        time.sleep(0.05)
    return replies

@app.main()
def main(grid, context):
    config = context.run_config
    if config["behaviour"] == "server-raises":
        raise LookupError("no such thing")
    while len(nodes := sorted(grid.get_node_ids())) < config["num-clients"]:
        time.sleep(0.05)
    model, rounds = np.zeros(3), []
    for number in range(1, config["num-server-rounds"] + 1):
        started = time.time()
        messages = [
            Message(RecordDict({"model": ArrayRecord([model])}), dst_node_id=node,
                    message_type=MessageType.TRAIN, group_id=str(number))
            for node in nodes
        ]
        replies = [m for m in exchange(grid, messages, config["patience"]) if m.has_content()]
        told = [m.content["told"] for m in replies]
        model = np.mean([m.content["model"].to_numpy_ndarrays()[0] for m in replies], axis=0)
        rounds.append(time.time() - started)
        print("round", number, model, flush=True)
    Path(config["result"]).write_text(json.dumps({
        "model": model.tolist(), "rounds": rounds, "told": [dict(one) for one in told],
        "cwd": os.getcwd(),
    }))
"""
CLIENT = """
import os, subprocess, time
import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()

@app.train()
def train(message, context):
    own, behaviour = context.node_config, context.run_config["behaviour"]
    if behaviour == "client-raises" and own["partition-id"] == 1:
        raise LookupError("a client's own trouble")
    if own.get("leaves-a-process", False):
        subprocess.Popen(["sleep", "300"], start_new_session=True)
    if behaviour == "client-hangs" and own["partition-id"] == 1:
        time.sleep(300)
    model = message.content["model"].to_numpy_ndarrays()[0]
    told = ConfigRecord({
        "partition": own["partition-id"], "of": own["num-partitions"],
        "words": own.get("words", ""),
        "node-variable": os.environ.get("OWN_VARIABLE", ""), "process": os.getpid(),
        "program": os.environ.get("PROGRAM", "Flower's"),
        "count": context.state.config_records.get("count", {"n": 0})["n"],
    })
    context.state["count"] = ConfigRecord({"n": told["count"] + 1})
    step = np.array([1.0, 10.0, 100.0]) * (1 + own["partition-id"])
    reply = {"model": ArrayRecord([model / 3 + step]), "told": told}
    return Message(RecordDict(reply), reply_to=message)
"""
OTHER_PROGRAM = """
import os
from flwr.supernode.cli import flwr_clientapp

def main():
    os.environ["PROGRAM"] = "another"
    flwr_clientapp()
"""


def expected_model(rounds: int, clients: int = 3) -> list[float]:
    """model <- model / 3 + mean over clients of step: a geometric sum, by hand."""
    mean_step = (clients + 1) / 2
    scale = sum(3.0**-power for power in range(rounds))
    return [mean_step * scale, 10 * mean_step * scale, 100 * mean_step * scale]


def processes_of(cluster_id: str, node: int | None = None) -> set[int]:
    """Everything with the cluster's mark in its environment, or of one node what was not forked."""
    marks = {f"BLACKTHORN_CLUSTER={cluster_id}".encode()}
    if node is not None:
        marks.add(f"BLACKTHORN_NODE={node}".encode())
    found = set()
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            marked = marks <= set(environment.read_bytes().split(b"\0"))
        except OSError:
            continue
        if marked and running(int(environment.parent.name)):
            found.add(int(environment.parent.name))
    return found


def listening_addresses(pids: set[int]) -> set[str]:
    """The addresses on which these processes take TCP connections, in the kernel's hex."""
    sockets = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                target = str(descriptor.readlink())
            except OSError:
                continue
            if target.startswith("socket:["):
                sockets.add(target[8:-1])
    addresses = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == "0A" and columns[9] in sockets:
                addresses.add(columns[1])
    return addresses


def write_app(folder: Path) -> Path:
    """The app's folder, which also has another ClientApp program, `other_program:main`."""
    (folder / "tiny").mkdir()
    (folder / "pyproject.toml").write_text(PYPROJECT)
    (folder / "tiny" / "__init__.py").write_text("")
    (folder / "tiny" / "server.py").write_text(SERVER)
    (folder / "tiny" / "client.py").write_text(CLIENT)
    (folder / "other_program.py").write_text(OTHER_PROGRAM)
    return folder


def new_cluster(nodes: int | list[Node], folder: Path, app: Path, **options: Any) -> FlowerCluster:
    """A cluster whose programs know the app, and import little else."""
    env = {"PYTHONPATH": str(app)}
    return FlowerCluster(
        nodes, folder, env=env, preload=["flwr.superlink.cli", "flwr.clientapp"], **options
    )


def run(
    cluster: FlowerCluster, app: Path, result: Path, **config: str | int | float
) -> dict[str, Any]:
    """What the ServerApp has written of a run that completes."""
    values = {name.replace("_", "-"): value for name, value in config.items()}
    run_id = cluster.submit(app, {"result": str(result), **values}, parts=["tiny"])
    status = cluster.wait(run_id, deadline=90.0)
    assert status.completed, f"{status}: {status.details}\n{cluster.log(run_id)}"
    return json.loads(result.read_text())
