"""The processes of a Flower deployment on loopback: started in order, watched, stopped in order."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from blackthorn.flower_port import programs
from blackthorn.flower_port.control_api import ControlApi, is_serving
from blackthorn.launch.federation.addresses import LOOPBACK, free_loopback_ports
from blackthorn.launch.processes.process_groups import ProcessGroup, ProcessKeeper
from blackthorn.launch.processes.program_files import python_command
from blackthorn.launch.processes.supervisor import describe_exit

from .app_bundle import Scalar, write_config
from .process_environment import (
    NODE_VARIABLE,
    ProcessEnvironment,
    end_marked,
    fork_server_command,
    write_secret,
)

SUPERLINK = "superlink"
_APIS = ("serverappio", "fleet", "control", "health")
_PORT_DRAWS = 5
_GRACE_SECONDS = 5.0


class DeploymentError(RuntimeError):
    """A process of the deployment did not do its part; the message says which, and why."""


@dataclass(frozen=True)
class Node:
    """One SuperNode.

    `config` adds to its node config (`partition-id` and `num-partitions` are always there).
    `program` ("module:function") runs in place of Flower's `flwr-clientapp`, with the same
    command line. `path_prefix` is a folder of executables put first in the node's PATH.
    `rogue`: no SuperNode at all, but a program ("module:function") that speaks the Fleet protocol
    itself; it is told `--superlink ADDRESS --client INDEX` and `rogue_arguments`.
    """

    config: Mapping[str, Scalar] = field(default_factory=dict)
    program: str | None = None
    path_prefix: Path | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    rogue: str | None = None
    rogue_arguments: Sequence[str] = ()


class Deployment:
    """SuperLink, the SuperExec of its ServerApps, SuperNodes, and the fork servers they run on.

    `preload` names the modules for the apps' fork server; None: every program starts by itself.
    Call `stop` whatever happens, also when `start` has failed.
    """

    def __init__(
        self,
        cluster_id: str,
        nodes: Sequence[Node],
        environment: ProcessEnvironment,
        output_dir: Path,
        preload: Sequence[str] | None,
    ) -> None:
        self.supernodes: list[ProcessGroup] = []
        self.logs = output_dir / "logs"
        self._id = cluster_id
        self._nodes = nodes
        self._environment = environment
        self._output_dir = output_dir
        self._preload = preload
        with _had("no process can be started on this machine"):
            self._keeper = ProcessKeeper(environment.folder)
        self._fork_servers: list[ProcessGroup] = []
        self._server_side: list[ProcessGroup] = []
        self._fleet_address = ""
        self._patience = 0.0

    def start(self, seconds: float) -> ControlApi:
        """Start everything; returns when all nodes are online. DeploymentError after `seconds`."""
        self._patience = seconds
        deadline = time.monotonic() + seconds
        # They name who answered, and when.
        self.logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.logs.chmod(0o700)
        for old in self.logs.glob("*.log"):
            old.unlink()
        if self._preload is not None:
            sockets = self._environment.flower_socket, self._environment.app_socket
            self._start_fork_server("fork-server-flower", sockets[0], programs.FLOWER_MODULES)
            self._start_fork_server("fork-server-apps", sockets[1], self._preload)
            self._until(sockets[0].exists, deadline, "Flower is not imported")
        addresses = self._start_superlink(deadline)
        self._environment.write_connection(SUPERLINK, addresses["control"])
        self._start_serverapp_executor(addresses["serverappio"])
        self._fleet_address = addresses["fleet"]
        for index in range(len(self._nodes)):
            self.supernodes.append(self._start_supernode(index))
        control = ControlApi(addresses["control"])
        self._until(lambda: self._all_online(control), deadline, "not all SuperNodes are online")
        if self._preload is not None:
            self._until(
                self._environment.app_socket.exists, deadline, "the apps' modules are not imported"
            )
        return control

    def restart_supernode(self, index: int) -> None:
        """Start a node again whose SuperNode has ended; DeploymentError if it has not."""
        if self.supernodes[index].alive:
            raise DeploymentError(f"{self.supernodes[index].name} runs: it cannot be started again")
        self.supernodes[index] = self._start_supernode(index)

    def check(self) -> None:
        """DeploymentError if a process without which no run can finish has ended."""
        for group in [*self._fork_servers, *self._server_side]:
            if not group.alive:
                raise DeploymentError(_describe_exit(group))
        deaths = self.deaths()
        if deaths and len(deaths) == len(self._nodes):
            raise DeploymentError(f"no client is left: {'; '.join(deaths.values())}")
        self._keeper.forget_ended()

    def deaths(self) -> dict[int, str]:
        """How each node that runs no more has ended, by its index."""
        return {
            index: describe_exit(group.name, group.returncode, group.tail())
            for index, group in enumerate(self.supernodes)
            if not group.alive
        }

    def stop(self, at_once: Callable[[], bool]) -> None:
        """End everything: politely, or at once when `at_once()`; a few seconds at most."""
        # Nodes sign off at the SuperLink, so it goes after them; the fork servers go last.
        superlink = [group for group in self._server_side if group.name == SUPERLINK]
        others = [group for group in self._server_side if group.name != SUPERLINK]
        self._keeper.stop([*self.supernodes, *others], _GRACE_SECONDS, at_once)
        self._keeper.stop(superlink, _GRACE_SECONDS, at_once)
        self._keeper.close(at_once)
        end_marked(self._id)

    def _launch(self, name: str, command: Sequence[str], env: Mapping[str, str]) -> ProcessGroup:
        with _had(f"{name} cannot be started on this machine"):
            return self._keeper.start(
                name, command, env=env, cwd=self._output_dir, log=self.logs / f"{name}.log"
            )

    def _until(self, condition: Callable[[], bool], deadline: float, otherwise: str) -> None:
        while not condition():
            self.check()
            if time.monotonic() > deadline:
                raise DeploymentError(
                    f"{otherwise} within {self._patience:g} s (start-timeout); see {self.logs}"
                )
            time.sleep(0.03)

    def _start_fork_server(self, name: str, socket: Path, modules: Sequence[str]) -> None:
        command = fork_server_command(socket, modules)
        self._fork_servers.append(self._launch(name, command, self._environment.variables(name)))

    def _start_superlink(self, deadline: float) -> dict[str, str]:
        """Start it on free ports and wait until it serves; its addresses by API."""
        env = self._environment.variables(SUPERLINK)
        for _ in range(_PORT_DRAWS):
            with _had(f"no ports are to be had at {LOOPBACK}"):
                ports = free_loopback_ports(len(_APIS))
            addresses = {api: f"{LOOPBACK}:{port}" for api, port in zip(_APIS, ports, strict=True)}
            superlink = self._launch(SUPERLINK, self._superlink_command(addresses), env)
            self._until(
                lambda group=superlink, health=addresses["health"]: (  # type: ignore[misc]
                    not group.alive or is_serving(health)
                ),
                deadline,
                "the SuperLink does not serve",
            )
            if superlink.alive:
                self._server_side.append(superlink)
                return addresses
            # Somebody else may have bound a port between our draw and its start.
            if "in use" not in superlink.tail():
                break
        raise DeploymentError(_describe_exit(superlink))

    def _superlink_command(self, addresses: Mapping[str, str]) -> list[str]:
        command = ["flower-superlink", "--insecure", "--isolation", "process"]
        command += ["--superexec-auth-secret-file", str(self._secret_file())]
        command += ["--serverappio-api-address", addresses["serverappio"]]
        command += ["--fleet-api-address", addresses["fleet"]]
        command += ["--control-api-address", addresses["control"]]
        command += ["--guard", str(self._environment.folder / "guard")]
        # All nodes come at once, from one address.
        command += ["--limit", f"stranger-connections={32 + 2 * len(self._nodes)}"]
        return [*command, "--health-server-address", addresses["health"]]

    def _secret_file(self) -> Path:
        """The key with which our SuperExec, and nobody else on this machine, claims ServerApps."""
        return write_secret(self._environment.folder / "superexec-secret")

    def _start_serverapp_executor(self, address: str) -> None:
        command = ["flower-superexec", "--insecure", "--plugin-type", "serverapp"]
        command += ["--appio-api-address", address]
        command += ["--superexec-auth-secret-file", str(self._secret_file())]
        env = self._environment.variables(SUPERLINK)
        self._server_side.append(self._launch("superexec-serverapp", command, env))

    def _start_supernode(self, index: int) -> ProcessGroup:
        name, node = f"supernode-{index}", self._nodes[index]
        config = {"partition-id": index, "num-partitions": len(self._nodes), **node.config}
        config_file = write_config(config, self._environment.folder / f"{name}.toml")
        path = [] if node.path_prefix is None else [node.path_prefix.resolve()]
        if node.program is not None:
            path.append(self._environment.client_program(node.program))
        env = self._environment.variables(
            name, path=path, extra={**node.env, NODE_VARIABLE: str(index)}
        )
        if node.rogue is not None:
            command = [*python_command(node.rogue), "--superlink", self._fleet_address]
            command += ["--client", str(index), *node.rogue_arguments]
            return self._launch(name, command, env)
        command = ["flower-supernode", "--insecure", "--superlink", self._fleet_address]
        command += ["--clientappio-api-address", f"{LOOPBACK}:0", "--node-config", str(config_file)]
        return self._launch(name, command, env)

    def _all_online(self, control: ControlApi) -> bool:
        for group in self.supernodes:
            if not group.alive:
                raise DeploymentError(_describe_exit(group))
        return control.online_nodes() >= len(self._nodes)


@contextlib.contextmanager
def _had(otherwise: str) -> Iterator[None]:
    """DeploymentError, one line, where the system refuses a process or a port."""
    try:
        yield
    except OSError as error:
        raise DeploymentError(f"{otherwise}: {error.strerror or error}") from error


def _describe_exit(group: ProcessGroup) -> str:
    output = group.tail() or "no output"
    return f"{group.name} ended with status {group.returncode}; the end of {group.log}:\n{output}"
