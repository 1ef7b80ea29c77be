"""The program a Byzantine node's operator installs as `flwr-clientapp`.

The deployment test runs it for real: a SuperLink, one SuperNode with the program in its PATH, and
an app that knows nothing of this project but has a package `attacks` of its own.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from flwr.clientapp import ClientApp

from attacks.byzantine_app import ByzantineApp
from attacks.flwr_clientapp import install_runner, lying, main

PROGRAMS = Path(sys.executable).parent


def test_every_app_that_flower_loads_is_wrapped() -> None:
    honest, calls = ClientApp(), []

    def get_load_fn(**options: object) -> object:
        calls.append(options)
        return lambda *bundle: calls.append(bundle) or honest

    app = lying(get_load_fn, "nan")(multi_app=True)("id", "version", "hash")
    assert calls == [{"multi_app": True}, ("id", "version", "hash")]
    assert isinstance(app, ByzantineApp)


def test_the_program_has_flower_s_command_line(tmp_path: Path) -> None:
    program = install_runner(tmp_path / "a folder" / "bin", "nan")
    assert program == tmp_path / "a folder" / "bin" / "flwr-clientapp"
    (program.parent / "attacks.py").write_text("raise RuntimeError('not the package meant')")
    usage = subprocess.run(
        [str(program), "--help"], cwd=program.parent, capture_output=True, text=True, timeout=120
    )
    assert usage.returncode == 0, usage.stderr
    assert usage.stdout.startswith("usage: flwr-clientapp")
    assert "--clientappio-api-address" in usage.stdout


@pytest.mark.parametrize(
    ("written", "environment", "named"),
    [("nan", "kindness", "'kindness'"), ("mercy", "", "'mercy'"), ("", "", "''")],
)
def test_the_environment_s_attack_comes_first_and_is_checked(
    monkeypatch: pytest.MonkeyPatch, written: str, environment: str, named: str
) -> None:
    monkeypatch.setenv("BLACKTHORN_ATTACK", environment)
    with pytest.raises(SystemExit) as ended:
        main(written)
    assert f"attack is {named}; allowed are" in str(ended.value)


def test_an_unknown_attack_is_not_installed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="attack is 'kindness'"):
        install_runner(tmp_path / "bin", "kindness")
    assert not (tmp_path / "bin").exists()


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


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@contextlib.contextmanager
def started(*command: str, log: Path, **environment: str) -> Iterator[None]:
    """One of Flower's long-running programs, ended with all that it started."""
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


@pytest.mark.deployment
def test_a_real_node_lies_whatever_the_bundle_says(tmp_path: Path) -> None:
    app, home, result = tmp_path / "app", tmp_path / "home", tmp_path / "result.json"
    for name, text in APP.items():
        (app / name).parent.mkdir(parents=True, exist_ok=True)
        (app / name).write_text(text)
    server_io, fleet, control = (f"127.0.0.1:{port}" for port in free_ports(3))
    home.mkdir()
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "l"\n[superlink.l]\naddress = "{control}"\ninsecure = true\n'
    )
    common = {
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "OMP_NUM_THREADS": "1",
        "FLWR_HOME": str(home),
        "PATH": f"{PROGRAMS}:{os.environ['PATH']}",
    }
    evil = install_runner(tmp_path / "bin", "reverse-scaled-average").parent
    node = {**common, "FLWR_HOME": str(tmp_path / "node"), "PATH": f"{evil}:{common['PATH']}"}
    flower = str(PROGRAMS)
    with (
        started(
            f"{flower}/flower-superlink",
            "--insecure",
            *("--serverappio-api-address", server_io, "--fleet-api-address", fleet),
            *("--control-api-address", control),
            log=tmp_path / "superlink.log",
            **common,
        ),
        started(
            f"{flower}/flower-supernode",
            *("--insecure", "--superlink", fleet, "--clientappio-api-address", "127.0.0.1:0"),
            log=tmp_path / "supernode.log",
            **node,
        ),
    ):
        submit(app, f'result="{result}"', common)
        wait_for(result, 60)
    logs = "".join((tmp_path / f"{name}.log").read_text() for name in ("superlink", "supernode"))
    assert result.exists(), logs
    answer = json.loads(result.read_text())
    # w - eta_l (-50 u) with w = 0, eta_l = 0.5 and u = (4, 0, -8)
    np.testing.assert_allclose(answer["w"], [100.0, 0.0, -200.0], rtol=1e-5)
    assert answer["num-examples"] == 7


def submit(app: Path, config: str, environment: dict[str, str]) -> None:
    """`flwr run`, again while the SuperLink is not up yet."""
    for _ in range(20):
        run = subprocess.run(
            [f"{PROGRAMS}/flwr", "run", str(app), "--format", "json", "-c", config],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=60,
        )
        if '"run-id"' in run.stdout:
            return
        time.sleep(0.5)
    raise AssertionError(run.stdout + run.stderr)


def wait_for(path: Path, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.2)
    time.sleep(0.2)  # for the writer to finish
