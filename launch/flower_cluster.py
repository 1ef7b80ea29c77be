"""A real Flower deployment on this machine: SuperLink, SuperNodes and their apps over gRPC.

    nodes = [Node()] * 4 + [Node(program="attacks.flwr_clientapp:main")]
    with FlowerCluster(nodes, output_dir=Path("runs/cluster")) as cluster:
        run_id = cluster.submit(app_dir, {"num-server-rounds": 5})
        status = cluster.wait(run_id, deadline=600.0, on_tick=lambda status: print(status))
        print(status.completed, status.details)

Everything listens on 127.0.0.1 only, keeps its state in a private temporary folder, writes its
output to `output_dir`/logs, and has ended when the `with` block is left, whatever the reason:
normally, by an exception, Ctrl-C, SIGTERM, or (within seconds) SIGKILL of this process.

Flower starts a new Python for every message. `warm=True` (Linux) keeps a process for every
message but forks it from a server that has imported Flower and torch (`fork_server.py`);
`warm=False` starts Flower's programs as they are. `quick_polls=True` shortens the fixed waits of
SuperNode and SuperExec (`flower_programs.py`); False leaves Flower's 3 and 1 seconds.
"""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc

from . import interrupts
from .app_bundle import Scalar, stage_app, write_config
from .control_api import ControlApi, RunStatus, is_serving
from .ports import LOOPBACK, free_loopback_ports
from .processes import ProcessGroup, ProcessKeeper
from .workplace import (
    CLUSTER_VARIABLE,
    NODE_VARIABLE,
    Workplace,
    client_processes,
    fork_server_command,
    marked_processes,
)

FLOWER_MODULES = (
    "flwr.superlink.cli",
    "flwr.supernode.cli",
    "flwr.supercore.cli",
    "flwr.cli.app",
)
APP_MODULES = (
    "flwr.superlink.cli",
    "flwr.supernode.cli",
    "flwr.clientapp",
    "flwr.serverapp.strategy",
    "torch",
    "torch._dynamo",
    "sklearn.datasets",
    "torchvision.datasets",
)
_PORT_DRAWS = 5
_GRACE_SECONDS = 5.0
_SUBMIT_SECONDS = 120.0
_SUPERLINK = "superlink"


class DeploymentError(RuntimeError):
    """A process of the deployment did not do its part; the message says which, and why."""


@dataclass(frozen=True)
class Node:
    """One SuperNode.

    `config` adds to its node config (`partition-id` and `num-partitions` are always there).
    `program` ("module:function") runs in place of Flower's `flwr-clientapp`, with the same
    command line. `path_prefix` is a folder of executables put first in the node's PATH.
    """

    config: Mapping[str, Scalar] = field(default_factory=dict)
    program: str | None = None
    path_prefix: Path | None = None
    env: Mapping[str, str] = field(default_factory=dict)


class FlowerCluster:
    """Starts on entering the context, ends everything on leaving it.

    `nodes`: how many honest nodes, or one Node each. `env` adds to every process's environment.
    `preload`: what a warm cluster imports before the apps are forked.
    `start_timeout`: seconds until every node must be online (DeploymentError after that).
    """

    def __init__(
        self,
        nodes: int | Sequence[Node],
        output_dir: Path,
        *,
        warm: bool = sys.platform == "linux",
        quick_polls: bool = True,
        preload: Sequence[str] = APP_MODULES,
        env: Mapping[str, str] | None = None,
        start_timeout: float = 120.0,
    ) -> None:
        self.nodes = [Node()] * nodes if isinstance(nodes, int) else list(nodes)
        if not self.nodes:
            raise ValueError("nodes: 0, but a cluster needs at least one")
        if warm and sys.platform != "linux":
            raise ValueError(f"warm: True, but on {sys.platform} only False works")
        self.id = uuid.uuid4().hex
        self.output_dir = output_dir.resolve()
        self.logs = self.output_dir / "logs"
        self._warm = warm
        self._quick_polls = quick_polls
        self._preload = preload
        self._env = env or {}
        self._start_timeout = start_timeout
        self._num_runs = 0
        self._context = contextlib.ExitStack()
        self._supernodes: list[ProcessGroup] = []
        self._vital: list[ProcessGroup] = []

    def __enter__(self) -> Self:
        self._context.enter_context(interrupts.termination_unwinds())
        try:
            self._start(time.monotonic() + self._start_timeout)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self._end()

    def submit(
        self,
        app_dir: Path,
        run_config: Mapping[str, Scalar],
        *,
        packages: Sequence[str] | None = None,
    ) -> int:
        """Start a run with `flwr run` and return its id.

        With `packages` only these folders of the app (and its pyproject.toml) are bundled.
        DeploymentError with Flower's own words if it refuses; ValueError for a bad folder or value.
        """
        self._num_runs += 1
        work = self._workplace.folder / f"run-{self._num_runs}"
        work.mkdir()
        app = app_dir.resolve()
        if packages is not None:
            app = stage_app(app, packages, work / "app")
        config = write_config(run_config, work / "run-config.toml")
        # Flower takes an empty file for a missing one.
        overrides = ["--run-config", str(config)] if run_config else []
        try:
            done = subprocess.run(
                ["flwr", "run", str(app), "local", "--format", "json", *overrides],
                env=self._workplace.environment(_SUPERLINK),
                cwd=self.output_dir,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_SUBMIT_SECONDS,
            )
        except subprocess.TimeoutExpired as error:
            raise DeploymentError(
                f"flwr run: no answer within {_SUBMIT_SECONDS:.0f} seconds"
            ) from error
        return _run_id(done.stdout, done.stderr)

    def status(self, run_id: int) -> RunStatus:
        """KeyError for an unknown run, grpc.RpcError if the SuperLink does not answer."""
        return self._control.status(run_id)

    def wait(
        self,
        run_id: int,
        deadline: float,
        on_tick: Callable[[RunStatus], None] | None = None,
        interval: float = 0.2,
    ) -> RunStatus:
        """Wait until the run has finished and return how.

        `on_tick` is called with every status, each `interval` seconds. After `deadline` seconds
        the run is stopped and TimeoutError raised; DeploymentError if it cannot finish any more.
        The ServerApp's output is then in logs/serverapp.log.
        """
        end = time.monotonic() + deadline
        try:
            while True:
                self._check_vital()
                status = self._status_if_answered(run_id)
                if status is not None and on_tick is not None:
                    on_tick(status)
                if status is not None and status.finished:
                    return status
                if time.monotonic() > end:
                    self.stop(run_id)
                    raise TimeoutError(f"run {run_id}: not finished within {deadline:g} seconds")
                time.sleep(interval)
        finally:
            self._save_log(run_id)

    def stop(self, run_id: int) -> bool:
        """Stop a run; whether it was stopped by this call."""
        return self._control.stop(run_id)

    def log(self, run_id: int) -> str:
        """The ServerApp's output so far."""
        return self._control.log(run_id)

    def dead_nodes(self) -> list[int]:
        """Indices of the nodes whose SuperNode has ended."""
        return [index for index, node in enumerate(self._supernodes) if not node.alive]

    def kill_node(self, index: int) -> None:
        """SIGKILL a SuperNode, as a power cut would."""
        self._supernodes[index].kill()

    def client_processes(self, index: int) -> list[int]:
        """Process ids of the ClientApp that a node runs at the moment (none or one; Linux)."""
        return client_processes(self.id, index)

    def _start(self, deadline: float) -> None:
        self.logs.mkdir(parents=True, exist_ok=True)
        folder = self._context.enter_context(
            tempfile.TemporaryDirectory(prefix="blackthorn-", ignore_cleanup_errors=True)
        )
        self._workplace = Workplace(
            Path(folder),
            self.id,
            len(self.nodes),
            warm=self._warm,
            quick_polls=self._quick_polls,
            env=self._env,
        )
        self._keeper = ProcessKeeper()
        flower_socket, app_socket = self._workplace.flower_socket, self._workplace.app_socket
        if self._warm:
            self._start_fork_server("fork-server-flower", flower_socket, FLOWER_MODULES)
            self._start_fork_server("fork-server-apps", app_socket, self._preload)
            self._wait_for_fork_server(flower_socket, deadline)
        addresses = self._start_superlink(deadline)
        self._control = ControlApi(addresses["control"])
        self._context.callback(self._control.close)
        self._workplace.write_connection(_SUPERLINK, addresses["control"])
        self._start_serverapp_executor(addresses["serverappio"])
        for index, node in enumerate(self.nodes):
            self._supernodes.append(self._start_supernode(index, node, addresses["fleet"]))
        self._wait_for_nodes(deadline)
        if self._warm:
            self._wait_for_fork_server(app_socket, deadline)

    def _launch(self, name: str, command: Sequence[str], env: Mapping[str, str]) -> ProcessGroup:
        return self._keeper.start(
            name, command, env=env, cwd=self.output_dir, log=self.logs / f"{name}.log"
        )

    def _start_fork_server(self, name: str, socket: Path, modules: Sequence[str]) -> None:
        command = fork_server_command(socket, modules)
        self._vital.append(self._launch(name, command, self._workplace.environment(name)))

    def _wait_for_fork_server(self, socket: Path, deadline: float) -> None:
        while not socket.exists():
            self._check_vital()
            if time.monotonic() > deadline:
                raise DeploymentError(self._late("the fork server's imports are not done"))
            time.sleep(0.02)

    def _start_superlink(self, deadline: float) -> dict[str, str]:
        """Start it on free ports and wait until it serves; its addresses by API."""
        for _ in range(_PORT_DRAWS):
            names = ("serverappio", "fleet", "control", "health")
            ports = free_loopback_ports(len(names))
            addresses = {
                name: f"{LOOPBACK}:{port}" for name, port in zip(names, ports, strict=True)
            }
            superlink = self._launch(
                _SUPERLINK,
                _superlink_command(addresses, self._secret_file()),
                self._workplace.environment(_SUPERLINK),
            )
            while superlink.alive and not is_serving(addresses["health"]):
                self._check_vital()
                if time.monotonic() > deadline:
                    raise DeploymentError(self._late("the SuperLink is not ready"))
                time.sleep(0.05)
            if superlink.alive:
                self._vital.append(superlink)
                return addresses
            if "in use" not in superlink.tail():
                break
        raise DeploymentError(_died(superlink))

    def _secret_file(self) -> Path:
        """The key with which our SuperExec, and nobody else on this machine, claims ServerApps."""
        path = self._workplace.folder / "superexec-secret"
        if not path.exists():
            path.touch(mode=0o600)
            path.write_bytes(secrets.token_bytes(32))
        return path

    def _start_serverapp_executor(self, address: str) -> None:
        command = ["flower-superexec", "--insecure", "--plugin-type", "serverapp"]
        command += ["--appio-api-address", address]
        command += ["--superexec-auth-secret-file", str(self._secret_file())]
        env = self._workplace.environment(_SUPERLINK)
        self._vital.append(self._launch("superexec-serverapp", command, env))

    def _start_supernode(self, index: int, node: Node, fleet_address: str) -> ProcessGroup:
        name = f"supernode-{index}"
        config = {"partition-id": index, "num-partitions": len(self.nodes), **node.config}
        config_file = write_config(config, self._workplace.folder / f"{name}.toml")
        path = [] if node.path_prefix is None else [node.path_prefix.resolve()]
        if node.program is not None:
            path.append(self._workplace.client_program(node.program))
        command = ["flower-supernode", "--insecure", "--superlink", fleet_address]
        command += ["--clientappio-api-address", f"{LOOPBACK}:0", "--node-config", str(config_file)]
        extra = {**node.env, NODE_VARIABLE: str(index)}
        return self._launch(
            name, command, self._workplace.environment(name, path=path, extra=extra)
        )

    def _wait_for_nodes(self, deadline: float) -> None:
        while True:
            self._check_vital()
            for index in self.dead_nodes():
                raise DeploymentError(_died(self._supernodes[index]))
            online = self._control.online_nodes()
            if online >= len(self.nodes):
                return
            if time.monotonic() > deadline:
                raise DeploymentError(
                    self._late(f"only {online} of {len(self.nodes)} SuperNodes are online")
                )
            time.sleep(0.05)

    def _check_vital(self) -> None:
        """DeploymentError if a process without which no run can finish has ended."""
        for group in self._vital:
            if not group.alive:
                raise DeploymentError(_died(group))
        self._keeper.forget_ended()

    def _late(self, state: str) -> str:
        return f"{state} after {self._start_timeout:g} seconds; see {self.logs}"

    def _status_if_answered(self, run_id: int) -> RunStatus | None:
        try:
            return self.status(run_id)
        except grpc.RpcError:
            # A busy SuperLink may miss one call; a dead one is noticed by `_check_vital`.
            return None

    def _save_log(self, run_id: int) -> None:
        with contextlib.suppress(grpc.RpcError), (self.logs / "serverapp.log").open("a") as output:
            output.write(self.log(run_id))

    def _end(self) -> None:
        with interrupts.deferred() as held:
            try:
                self._stop_processes(lambda: bool(held))
            finally:
                self._context.close()

    def _stop_processes(self, hurry: Callable[[], bool]) -> None:
        keeper = getattr(self, "_keeper", None)
        if keeper is None:
            return
        # Nodes sign off at the SuperLink, which therefore goes after them; the fork servers last.
        superlink = [group for group in self._vital if group.name == _SUPERLINK]
        executors = [group for group in self._vital if group.name == "superexec-serverapp"]
        keeper.stop([*self._supernodes, *executors], _GRACE_SECONDS, hurry)
        keeper.stop(superlink, _GRACE_SECONDS, hurry)
        keeper.close(hurry)
        # A ClientApp may have started processes outside its group.
        for pid in marked_processes({f"{CLUSTER_VARIABLE}={self.id}".encode()}):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _superlink_command(addresses: Mapping[str, str], secret_file: Path) -> list[str]:
    command = ["flower-superlink", "--insecure", "--isolation", "process"]
    command += ["--superexec-auth-secret-file", str(secret_file)]
    command += ["--serverappio-api-address", addresses["serverappio"]]
    command += ["--fleet-api-address", addresses["fleet"]]
    command += ["--control-api-address", addresses["control"]]
    return [*command, "--health-server-address", addresses["health"]]


def _died(group: ProcessGroup) -> str:
    output = group.tail() or "no output"
    return f"{group.name} ended with status {group.returncode}; the end of {group.log}:\n{output}"


def _run_id(output: str, errors: str) -> int:
    """The id in the JSON that `flwr run --format json` prints; DeploymentError without one."""
    try:
        reply, _ = json.JSONDecoder().raw_decode(output, output.index("{"))
        return int(reply["run-id"])
    except (ValueError, KeyError, TypeError) as error:
        words = " ".join(f"{output} {errors}".split()) or "no output"
        raise DeploymentError(f"flwr run did not start the run: {words}") from error
