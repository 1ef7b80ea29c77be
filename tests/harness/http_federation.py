"""Flower's own programs of the releases that speak HTTP: a SuperLink, SuperNodes, and a run."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blackthorn.flower_port.control_api import is_serving
from blackthorn.launch.federation.addresses import LOOPBACK, free_loopback_ports
from blackthorn.launch.federation.process_environment import marked_processes

START_SECONDS = 60.0
RUN_SECONDS = 180.0
_CALL_SECONDS = 60.0
_GRACE_SECONDS = 20.0


@dataclass
class Federation:
    """A SuperLink; `log` has what all programs say."""

    work: Path
    address: str
    environment: dict[str, str]
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def log(self) -> str:
        """Everything that was said."""
        return "".join(path.read_text() for path in sorted(self.work.glob("*.log")))

    def start(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        """Start a program in a process group of its own."""
        with (self.work / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                env=self.environment,
                cwd=self.work,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def start_supernode(self, partition: int, num_partitions: int) -> None:
        """Start one SuperNode."""
        (port,) = free_loopback_ports(1)
        self.start(
            f"supernode-{partition}",
            *("flower-supernode", "--insecure", "--superlink", self.address),
            *("--host", LOOPBACK, "--port", str(port)),
            *("--node-config", f"partition-id={partition} num-partitions={num_partitions}"),
        )

    def run(self, app: Path, *options: str) -> None:
        """Run an app to its end; AssertionError, with everything that was said, if it fails."""
        said = self._flwr("run", str(app), "local", *options)
        run_id = str(said["run-id"])
        deadline = time.monotonic() + RUN_SECONDS
        while time.monotonic() < deadline:
            (run,) = self._flwr("list", "local", "--run-id", run_id)["runs"]
            if run["status"].startswith("finished"):
                assert run["status"] == "finished:completed", f"{run}\n{self.log}"
                return
            time.sleep(0.5)
        raise TimeoutError(f"run {run_id} is not over after {RUN_SECONDS:g} s\n{self.log}")

    def _flwr(self, *words: str) -> Any:
        done = subprocess.run(
            ["flwr", *words, "--format", "json"],
            env=self.environment,
            cwd=self.work,
            capture_output=True,
            text=True,
            timeout=_CALL_SECONDS,
        )
        start = done.stdout.find("{")
        assert start >= 0, f"{done.stdout}\n{done.stderr}\n{self.log}"
        return json.loads(done.stdout[start:])

    def end(self) -> None:
        """End what was started, and what that has started."""
        for process in reversed(self.processes):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in self.processes:
            try:
                process.wait(_GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(_GRACE_SECONDS)
        for pid in marked_processes({f"FLWR_HOME={self.environment['FLWR_HOME']}".encode()}):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextmanager
def http_federation(work: Path, *options: str, num_nodes: int = 0) -> Iterator[Federation]:
    """A SuperLink on free loopback ports, with `num_nodes` SuperNodes."""
    home = work / "flower-home"
    home.mkdir(parents=True)
    port, health = free_loopback_ports(2)
    address = f"{LOOPBACK}:{port}"
    (home / "config.toml").write_text(
        '[superlink]\ndefault = "local"\n\n[superlink.local]\n'
        f'address = "{address}"\ninsecure = true\n'
    )
    environment = {
        **os.environ,
        "FLWR_HOME": str(home),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    federation = Federation(work, address, environment)
    try:
        superlink = federation.start(
            "superlink",
            *("flower-superlink", "--insecure", "--host", LOOPBACK, "--port", str(port)),
            *("--health-server-address", f"{LOOPBACK}:{health}", *options),
        )
        deadline = time.monotonic() + START_SECONDS
        while not is_serving(f"{LOOPBACK}:{health}"):
            assert superlink.poll() is None, federation.log
            assert time.monotonic() < deadline, federation.log
            time.sleep(0.2)
        for partition in range(num_nodes):
            federation.start_supernode(partition, num_nodes)
        yield federation
    finally:
        federation.end()
