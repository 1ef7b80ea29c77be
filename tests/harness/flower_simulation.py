"""Flower's own simulation of our app: a SuperLink in the foreground, ended when it is done."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from blackthorn.flower_port.control_api import ControlApi, RunStatus, is_serving
from blackthorn.launch.federation.addresses import LOOPBACK, free_loopback_ports
from blackthorn.launch.federation.app_bundle import COMPONENTS, stage_app, write_config
from blackthorn.launch.federation.process_environment import marked_processes
from blackthorn.settings.config import RunConfig, to_mapping

START_SECONDS = 60.0
RUN_SECONDS = 240.0
RAY_STARTS = 3
# What Ray says of a server of its own, or of a node, that did not come up in a fixed time.
_RAY_START_FAILED = (
    "ray._raylet.wait_for_persisted_port",
    "The current node timed out during startup",
)


def run_in_flower_simulation(repository: Path, config: RunConfig, work: Path) -> None:
    """`flwr run` of the app with one simulated SuperNode a client; AssertionError with its log."""
    for attempt in range(1, RAY_STARTS + 1):
        folder = work / f"attempt-{attempt}"
        folder.mkdir()
        failure = _run_once(repository, config, folder)
        if not ray_did_not_start(failure):
            break
        # The ServerApp had begun its run folder, and nobody's run may go into one that is there.
        shutil.rmtree(config.output_dir, ignore_errors=True)
    assert not failure, failure


def ray_did_not_start(failure: str) -> bool:
    """Whether a run failed because of what else the machine did meanwhile."""
    return any(sign in failure for sign in _RAY_START_FAILED)


def _run_once(repository: Path, config: RunConfig, work: Path) -> str:
    """One attempt; the log of a run that failed, empty for one that completed."""
    app = stage_app(repository, COMPONENTS, work / "app")
    run_config = write_config(to_mapping(config), work / "run-config.toml")
    with simulating_superlink(work) as (environment, control):
        done = subprocess.run(
            [
                *("flwr", "run", str(app), "local", "--format", "json"),
                *("--run-config", str(run_config)),
                *("--federation-config", f"num-supernodes={config.num_clients}"),
            ],
            env=environment,
            capture_output=True,
            text=True,
            timeout=START_SECONDS,
        )
        run_id = int(json.loads(done.stdout[done.stdout.index("{") :])["run-id"])
        api = ControlApi(control)
        try:
            status = _finished(api, run_id)
            return "" if status.completed else f"{status} {status.details}\n{api.log(run_id)}"
        finally:
            api.close()


def _finished(api: ControlApi, run_id: int) -> RunStatus:
    deadline = time.monotonic() + RUN_SECONDS
    while time.monotonic() < deadline:
        status = api.status(run_id)
        if status.finished:
            return status
        time.sleep(0.5)
    raise TimeoutError(f"run {run_id} is not over after {RUN_SECONDS:g} s")


@contextmanager
def simulating_superlink(work: Path) -> Iterator[tuple[dict[str, str], str]]:
    """A simulating SuperLink on free loopback ports: the environment for `flwr`, its address."""
    home = work / "flower-home"
    home.mkdir()
    appio, control, health = (f"{LOOPBACK}:{port}" for port in free_loopback_ports(3))
    (home / "config.toml").write_text(
        '[superlink]\ndefault = "local"\n\n[superlink.local]\n'
        f'address = "{control}"\ninsecure = true\n'
    )
    environment = {
        **os.environ,
        "FLWR_HOME": str(home),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    command = ["flower-superlink", "--insecure", "--simulation"]
    command += ["--serverappio-api-address", appio, "--control-api-address", control]
    command += ["--health-server-address", health]
    with (work / "superlink.log").open("wb") as log:
        process = subprocess.Popen(
            command, env=environment, cwd=work, stdout=log, stderr=log, start_new_session=True
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while not is_serving(health):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((work / "superlink.log").read_text())
            time.sleep(0.2)
        yield environment, control
    finally:
        _end(process, f"FLWR_HOME={home}".encode())


def _end(process: subprocess.Popen[bytes], mark: bytes) -> None:
    """End the SuperLink, and what it and Ray have started outside its process group."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(20)
    for pid in marked_processes({mark}):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
