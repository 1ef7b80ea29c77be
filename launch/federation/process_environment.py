"""Folders, environment and executables of one deployment's processes."""

import contextlib
import json
import os
import secrets
import signal
import sysconfig
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from blackthorn.flower_port import programs
from blackthorn.flower_port.versions import NotThisFlower, check_grpc
from blackthorn.launch.federation.proxies import exemptions
from blackthorn.launch.processes import fork_server
from blackthorn.launch.processes.program_files import (
    cold_program,
    python_command,
    warm_program,
)
from blackthorn.settings.config import ConfigError

CLUSTER_VARIABLE = "BLACKTHORN_CLUSTER"
# What the kernel may need to carry out a SIGKILL on a busy machine.
_KILL_SECONDS = 10.0
NODE_VARIABLE = "BLACKTHORN_NODE"
# The name under which the `flwr` command knows the SuperLink.
CONNECTION = "local"
# Flower calls nobody at home and installs nothing.
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
# For glibc: freed memory stays with the process. Models come and go in chunks of some MiB, and to
# map and clear these afresh costs more than to fill them. A process keeps the most it ever used.
KEEP_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
    "MALLOC_TOP_PAD_": str(16 * 2**20),
}
# sun_path holds 108 bytes on Linux, 104 elsewhere.
_LONGEST_SOCKET_PATH = 100
_SECRET_BYTES = 32
# So often a second all SuperNodes together look for messages, and all SuperExecs for tasks.
_LOOKS_A_SECOND = 30.0


class ProcessEnvironment:
    """A private folder for everything a deployment needs and throws away afterwards.

    `warm` and `quick_polls` decide what Flower's program names mean (`flower_port/programs.py`).
    With `fork_flower=False` only the apps are forked, and Flower's own programs are new Pythons.
    ConfigError where Flower's programs cannot be adapted.
    """

    def __init__(
        self,
        folder: Path,
        cluster_id: str,
        num_nodes: int,
        *,
        warm: bool,
        quick_polls: bool,
        env: Mapping[str, str],
        fork_flower: bool = True,
    ) -> None:
        try:
            check_grpc()
        except NotThisFlower as error:
            raise ConfigError(str(error)) from error
        self.folder = folder
        self.flower_socket = folder / "flower.sock"
        self.app_socket = folder / "app.sock"
        self._warm = warm
        self._fork_flower = fork_flower
        self._programs = folder / "bin"
        self._env = {
            **os.environ,
            **QUIET,
            # Many processes share the cores: more threads in each would only get in the way.
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            **KEEP_MEMORY,
            "PYTHONUNBUFFERED": "1",
            "no_grpc_proxy": exemptions(),
            CLUSTER_VARIABLE: cluster_id,
            programs.POLL_VARIABLE: str(polite_poll_seconds(num_nodes)),
            **env,
        }
        if warm and len(os.fsencode(self.flower_socket)) > _LONGEST_SOCKET_PATH:
            raise ValueError(
                f"temporary folder {folder}: too long a path for a Unix socket, "
                "set TMPDIR to a shorter one"
            )
        # Every message imports the app's modules again: let Python keep them compiled.
        self._env.pop("PYTHONDONTWRITEBYTECODE", None)
        self._write_programs(quick_polls)

    def variables(
        self,
        home: str,
        *,
        path: Sequence[Path] = (),
        extra: Mapping[str, str] | None = None,
    ) -> dict[str, str]:
        """The environment of a process with its own FLWR_HOME; `path` goes first in PATH."""
        flower_home = self.folder / "homes" / home
        flower_home.mkdir(parents=True, exist_ok=True)
        folders = [*path, self._programs, Path(sysconfig.get_path("scripts"))]
        search = os.pathsep.join([*map(str, folders), self._env.get("PATH", os.defpath)])
        return {**self._env, "FLWR_HOME": str(flower_home), **(extra or {}), "PATH": search}

    def client_program(self, entry: str) -> Path:
        """A folder in which `flwr-clientapp` is the function "module:function"."""
        folder = self._programs / f"clientapp-{entry.replace(':', '.')}"
        if self._warm:
            warm_program(folder, "flwr-clientapp", entry, self.app_socket)
        else:
            cold_program(folder, "flwr-clientapp", entry)
        return folder

    def write_connection(self, home: str, control_address: str) -> None:
        """Tell the `flwr` command with that FLWR_HOME where the SuperLink is."""
        write_connection(self.folder / "homes" / home, control_address, None)

    def _write_programs(self, quick_polls: bool) -> None:
        paced = programs.PACED_ENTRIES if quick_polls else {}
        guarded = programs.GUARDED_ENTRIES
        for name, entry in {**programs.STANDARD_ENTRIES, **guarded, **paced}.items():
            is_app = name in ("flwr-serverapp", "flwr-clientapp")
            if self._warm and (is_app or self._fork_flower):
                server = self.app_socket if is_app else self.flower_socket
                warm_program(self._programs, name, entry, server)
            elif name in paced or name in guarded:
                cold_program(self._programs, name, entry)


def write_secret(path: Path) -> Path:
    """A file with a secret that only this user reads, whole or not at all; kept if it is there."""
    if not path.exists():
        part = path.with_name(f".{path.name}.part")
        part.touch(mode=0o600)
        part.write_bytes(secrets.token_bytes(_SECRET_BYTES))
        part.replace(path)
    return path


def write_connection(home: Path, control_address: str, ca: Path | None) -> None:
    """Tell the `flwr` command with FLWR_HOME `home` where the SuperLink is (no `ca`: no TLS)."""
    trust = f"root-certificates = {json.dumps(str(ca))}" if ca is not None else "insecure = true"
    home.mkdir(parents=True, exist_ok=True)
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n'
        f'address = "{control_address}"\n{trust}\n'
    )


def polite_poll_seconds(num_nodes: int) -> float:
    """Seconds between two looks for work, so that many nodes do not keep the cores busy."""
    return min(1.0, max(0.1, num_nodes / _LOOKS_A_SECOND))


def fork_server_command(socket: Path, modules: Sequence[str]) -> list[str]:
    """The command line of a fork server at `socket` that has imported `modules`."""
    entry = f"{fork_server.__name__}:main"
    return [*python_command(entry), str(socket), *modules]


def app_processes(cluster_id: str, program: str, node: int | None = None) -> list[int]:
    """Process ids of the `flwr-serverapp` or `flwr-clientapp` that run in a cluster (Linux).

    With a warm cluster these are the stubs: the process behind one shares its fate.
    """
    marks = {f"{CLUSTER_VARIABLE}={cluster_id}".encode()}
    if node is not None:
        marks.add(f"{NODE_VARIABLE}={node}".encode())
    found = []
    for pid in marked_processes(marks):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        # `python flwr-clientapp ...`, or our own command lines with the bare name in them.
        if any(word.rpartition(b"/")[2] == program.encode() for word in words):
            found.append(pid)
    return found


def marked_processes(marks: set[bytes]) -> list[int]:
    """Processes that were started with all of these `NAME=value` in their environment."""
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = set(environment.read_bytes().split(b"\0"))
        except OSError:
            continue
        if marks <= variables and int(environment.parent.name) != os.getpid():
            found.append(int(environment.parent.name))
    return found


def end_marked(cluster_id: str, grace: float = 0.0) -> None:
    """End what a deployment's apps started and that left their process groups; returns then.

    SIGTERM to each, and SIGKILL to those that still run after `grace` seconds.
    """
    mark = {f"{CLUSTER_VARIABLE}={cluster_id}".encode()}
    told: set[int] = set()
    kill_from = time.monotonic() + grace
    while (left := marked_processes(mark)) and time.monotonic() < kill_from + _KILL_SECONDS:
        number = signal.SIGTERM if time.monotonic() < kill_from else signal.SIGKILL
        for pid in left if number == signal.SIGKILL else set(left) - told:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        told.update(left)
        time.sleep(0.02)
