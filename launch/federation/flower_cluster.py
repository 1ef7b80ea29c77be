"""A real Flower deployment on this machine: SuperLink, SuperNodes and their apps over gRPC.

    nodes = [Node()] * 4 + [Node(program="blackthorn.attacks.flwr_clientapp:main")]
    with FlowerCluster(nodes, output_dir=Path("runs/cluster")) as cluster:
        run_id = cluster.submit(app_dir, {"num-server-rounds": 5})
        status = cluster.wait(run_id, deadline=600.0, on_tick=lambda status: print(status))
        print(status.completed, status.details)

Everything listens on 127.0.0.1 only, keeps its state in a private temporary folder, writes its
output to `output_dir`/logs, and has ended when the `with` block is left, whatever the reason:
normally, by an exception, Ctrl-C, SIGTERM, or (within seconds) SIGKILL of this process.

Flower starts a new Python for every message. `warm=True` (Linux) keeps a process for every
message but forks it from a server that has imported Flower and torch (`processes/fork_server.py`);
`warm=False` starts Flower's programs as they are. `quick_polls=True` shortens the fixed waits of
SuperNode and SuperExec (`flower_port/programs.py`); False leaves Flower's 3 and 1 seconds.
"""

import contextlib
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc

from blackthorn.flower_port.control_api import RunStatus
from blackthorn.flower_port.programs import MODULES_OF_APPS
from blackthorn.launch.processes import interrupts

from .app_bundle import Scalar
from .deployment import SUPERLINK, Deployment, DeploymentError, Node
from .process_environment import ProcessEnvironment, app_processes
from .submission import submit

__all__ = ["APP_MODULES", "DeploymentError", "FlowerCluster", "Node", "RunStatus"]

APP_MODULES = (
    *MODULES_OF_APPS,
    "torch",
    # torch.optim and torch.func import it at their first call, which costs as much as torch.
    "torch._dynamo",
    "sklearn.datasets",
    "torchvision.datasets",
    # Who goes on with what he has loaded trains by the same code from the first round to the last.
    "blackthorn.client_app.clientapp",
    "blackthorn.server_app.serverapp",
)
# The time between two looks whether the ServerApp's process is there.
_LOOK_SECONDS = 2.0


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
        self._preload = preload if warm else None
        self._env = env or {}
        self._start_timeout = start_timeout
        self._num_runs = 0
        self._signals = contextlib.ExitStack()
        self._context = contextlib.ExitStack()
        self._deployment: Deployment | None = None

    def __enter__(self) -> Self:
        self._signals.enter_context(interrupts.termination_unwinds())
        try:
            self._start()
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
        parts: Sequence[str] | None = None,
    ) -> int:
        """Start a run with `flwr run` and return its id.

        With `parts` only these folders and files of the app (and its pyproject.toml) are bundled.
        DeploymentError with Flower's own words if it refuses; ValueError for a bad folder or value.
        """
        self._num_runs += 1
        return submit(
            app_dir,
            run_config,
            parts=parts,
            work=self._environment.folder / f"run-{self._num_runs}",
            env=self._environment.variables(SUPERLINK),
            cwd=self.output_dir,
        )

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
        next_look = 0.0
        try:
            while True:
                self._running().check()
                status = self._status_if_answered(run_id)
                if status is not None and on_tick is not None:
                    on_tick(status)
                if status is not None and status.finished:
                    return status
                if status is not None and time.monotonic() > next_look:
                    self._check_server_app(run_id, status)
                    next_look = time.monotonic() + _LOOK_SECONDS
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

    def deaths(self) -> dict[int, str]:
        """How the SuperNodes that have ended did, in one line each, by index of the node."""
        return self._running().deaths()

    def kill_node(self, index: int) -> None:
        """SIGKILL a SuperNode, as a power cut would."""
        self._running().supernodes[index].kill()

    def restart_node(self, index: int) -> None:
        """Start a SuperNode that has ended once more: to Flower it is a new node."""
        self._running().restart_supernode(index)

    def client_processes(self, index: int) -> list[int]:
        """Process ids of the ClientApp that a node runs at the moment (none or one; Linux)."""
        return app_processes(self.id, "flwr-clientapp", index)

    def _start(self) -> None:
        self.output_dir.mkdir(parents=True, exist_ok=True)
        folder = self._context.enter_context(
            tempfile.TemporaryDirectory(prefix="blackthorn-", ignore_cleanup_errors=True)
        )
        self._environment = ProcessEnvironment(
            Path(folder),
            self.id,
            len(self.nodes),
            warm=self._warm,
            quick_polls=self._quick_polls,
            env=self._env,
        )
        self._deployment = Deployment(
            self.id, self.nodes, self._environment, self.output_dir, self._preload
        )
        self._control = self._deployment.start(self._start_timeout)
        self._context.callback(self._control.close)

    def _running(self) -> Deployment:
        if self._deployment is None:
            raise DeploymentError("the cluster is not running: use it in a `with` block")
        return self._deployment

    def _end(self) -> None:
        try:
            # A second Ctrl-C does not interrupt the stopping, but makes it quick.
            with interrupts.deferred() as held:
                try:
                    if self._deployment is not None:
                        self._deployment.stop(at_once=lambda: bool(held))
                        self._deployment = None
                finally:
                    self._context.close()
        finally:
            self._signals.close()

    def _status_if_answered(self, run_id: int) -> RunStatus | None:
        try:
            return self.status(run_id)
        except grpc.RpcError:
            # A busy SuperLink may miss one call; a dead one is found by `Deployment.check`.
            return None

    def _check_server_app(self, run_id: int, status: RunStatus) -> None:
        """DeploymentError if the ServerApp of a run is dead. Flower would say so a minute later."""
        if sys.platform != "linux" or not status.running:
            return
        if app_processes(self.id, "flwr-serverapp"):
            return
        # One that ends in good order has told the SuperLink before.
        now = self._status_if_answered(run_id)
        if now is not None and not now.finished:
            with contextlib.suppress(grpc.RpcError):
                self.stop(run_id)
            raise DeploymentError(
                f"the ServerApp's process has died; the run's output is in {self.logs}"
            )

    def _save_log(self, run_id: int) -> None:
        with contextlib.suppress(grpc.RpcError), (self.logs / "serverapp.log").open("a") as output:
            output.write(self.log(run_id))
