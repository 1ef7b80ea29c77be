"""The program a Byzantine node's operator installs as `flwr-clientapp`.

The deployment test runs it for real: a SuperLink, one SuperNode with the program in its PATH, and
an app that knows nothing of this project but has a package `attacks` of its own.
"""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from flwr.clientapp import ClientApp

from blackthorn.attacks.byzantine_app import ByzantineApp, byzantine_app
from blackthorn.attacks.flwr_clientapp import main
from blackthorn.flower_port.programs import changing
from blackthorn.launch.federation.flower_cluster import FlowerCluster, Node
from blackthorn.launch.processes.program_files import cold_program


def test_every_app_that_flower_loads_is_wrapped() -> None:
    honest = ClientApp()
    calls: list[object] = []

    def get_load_fn(**options: object) -> Callable[..., ClientApp]:
        def load(*bundle: object) -> ClientApp:
            calls.append(bundle)
            return honest

        calls.append(options)
        return load

    load_changed = changing(get_load_fn, lambda app: byzantine_app(app, "nan"))
    app = load_changed(multi_app=True)("id", "version", "hash")
    assert calls == [{"multi_app": True}, ("id", "version", "hash")]
    assert isinstance(app, ByzantineApp)


def install(folder: Path) -> Path:
    """The program, as a node's operator puts it first into the PATH."""
    cold_program(folder, "flwr-clientapp", "blackthorn.attacks.flwr_clientapp:main")
    return folder / "flwr-clientapp"


def test_the_program_has_flower_s_command_line(tmp_path: Path) -> None:
    program = install(tmp_path / "a folder" / "bin")
    for name in ("attacks.py", "blackthorn.py"):
        (program.parent / name).write_text("raise RuntimeError('not the package meant')")
    usage = subprocess.run(
        [str(program), "--help"],
        cwd=program.parent,
        env={**os.environ, "BLACKTHORN_ATTACK": "nan"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert usage.returncode == 0, usage.stderr
    assert usage.stdout.startswith("usage: flwr-clientapp")
    assert "--clientappio-api-address" in usage.stdout


@pytest.mark.parametrize(
    ("environment", "named"),
    [({"BLACKTHORN_ATTACK": "kindness"}, "'kindness'"), ({}, "''")],
)
def test_the_environment_s_attack_is_checked(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], named: str
) -> None:
    monkeypatch.delenv("BLACKTHORN_ATTACK", raising=False)
    for variable, attack in environment.items():
        monkeypatch.setenv(variable, attack)
    with pytest.raises(SystemExit) as ended:
        main()
    assert f"attack is {named}; allowed are" in str(ended.value)


APP = {
    "pyproject.toml": """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "stranger"
version = "1.0.0"
license = "Apache-2.0"
[tool.flwr.app]
publisher = "stranger"
[tool.flwr.app.components]
serverapp = "stranger.server:app"
clientapp = "stranger.client:app"
[tool.flwr.app.config]
result = ""
""",
    "stranger/__init__.py": "",
    "attacks/__init__.py": "KIND = 'the bundle has attacks of its own'\n",
    "stranger/client.py": """
import attacks
import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

assert attacks.KIND
app = ClientApp()

@app.train()
def train(message, context):
    w = message.content["arrays"]["w"].numpy() - np.float32(0.5) * np.float32([4, 0, -8])
    records = {"arrays": ArrayRecord({"w": Array(w)}), "metrics": MetricRecord({"num-examples": 7})}
    return Message(RecordDict(records), reply_to=message)
""",
    "stranger/server.py": """
import json, time
from pathlib import Path
import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()

@app.main()
def main(grid, context):
    end = time.time() + 30
    while not (nodes := list(grid.get_node_ids())) and time.time() < end:
        time.sleep(0.2)
    config = ConfigRecord({"local-lr": 0.5, "server-round": 1, "client-id": 0})
    model = ArrayRecord({"w": Array(np.zeros(3, dtype=np.float32))})
    order = Message(RecordDict({"arrays": model, "config": config}), nodes[0], "train")
    reply, = grid.send_and_receive([order], timeout=30)
    answer = {
        "w": reply.content["arrays"]["w"].numpy().tolist(),
        "num-examples": reply.content["metrics"]["num-examples"],
    }
    Path(context.run_config["result"]).write_text(json.dumps(answer))
""",
}


@pytest.mark.deployment
def test_a_real_node_lies_whatever_the_bundle_says(tmp_path: Path) -> None:
    app, result = tmp_path / "app", tmp_path / "result.json"
    for name, text in APP.items():
        (app / name).parent.mkdir(parents=True, exist_ok=True)
        (app / name).write_text(text)
    evil = install(tmp_path / "bin").parent
    # Flower's own programs, as a stranger's deployment starts them.
    node = Node(path_prefix=evil, env={"BLACKTHORN_ATTACK": "reverse-scaled-average"})
    with FlowerCluster([node], tmp_path / "out", warm=False, quick_polls=False) as cluster:
        status = cluster.wait(cluster.submit(app, {"result": str(result)}), deadline=120.0)
        logs = "".join(path.read_text() for path in cluster.logs.glob("*.log"))
    assert status.completed, logs
    answer = json.loads(result.read_text())
    # w - eta_l (-50 u) with w = 0, eta_l = 0.5 and u = (4, 0, -8)
    np.testing.assert_allclose(answer["w"], [100.0, 0.0, -200.0], rtol=1e-5)
    assert answer["num-examples"] == 7
