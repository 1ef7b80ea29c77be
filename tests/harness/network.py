"""A network of namespaces: one router, and hosts with links and addresses of their own.

The addresses are from the ranges that are reserved for documentation; nothing leaves the
machine. Needs root and iproute2.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from open_ports import OPEN_PORTS

_SYSCTL = "/proc/sys/net/ipv4/ip_forward"


def require_namespaces() -> None:
    """Skip with the reason where no network namespace can be made."""
    if sys.platform != "linux" or shutil.which("ip") is None:
        pytest.skip("needs Linux and the command ip (Debian: iproute2)")
    if os.geteuid() != 0:
        pytest.skip("needs root, to make network namespaces")
    name = f"bt-{uuid.uuid4().hex[:6]}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no network namespace can be made here: {made.stderr.strip()}")
    subprocess.run(["ip", "netns", "delete", name], check=True)


@dataclass(frozen=True)
class Host:
    """A namespace with one link to the router, whose end there is `router_end`."""

    namespace: str
    address: str
    router: str
    router_end: str

    @property
    def prefix(self) -> list[str]:
        """What goes in front of a command that runs there."""
        return ["ip", "netns", "exec", self.namespace]

    def link(self, state: str) -> None:
        """`down` cuts the host off, `up` brings it back."""
        _run("ip", "-n", self.router, "link", "set", self.router_end, state)

    def throttle(self, rate: str) -> None:
        """What the host sends and receives, limited to `rate`, for example 1mbit."""
        for namespace, device in ((self.namespace, "eth0"), (self.router, self.router_end)):
            bucket = ["tbf", "rate", rate, "burst", "16kb", "latency", "500ms"]
            _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *bucket)

    def has_netem(self) -> bool:
        """Whether the kernel can add delay and loss to a link; if so it adds none yet."""
        command = ["tc", "-n", self.namespace, "qdisc", "add", "dev", "lo", "root", "netem"]
        return subprocess.run(command, capture_output=True).returncode == 0

    def add_loss_and_delay(self, percent: int, milliseconds: int) -> None:
        """Both ways, with netem."""
        for namespace, device in ((self.namespace, "eth0"), (self.router, self.router_end)):
            netem = ["netem", "loss", f"{percent}%", "delay", f"{milliseconds}ms"]
            _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *netem)

    def add_loss(self, percent: int) -> bool:
        """Both ways, with the packet filter; whether there is one that can."""
        rule = ["-m", "statistic", "--mode", "random", "--probability", str(percent / 100)]
        command = [*self.prefix, "iptables", "-A", "INPUT", *rule, "-j", "DROP"]
        if shutil.which("iptables") is None or subprocess.run(command).returncode:
            return False
        _run(*self.prefix, "iptables", "-A", "OUTPUT", *rule, "-j", "DROP")
        return True

    def listening_ports(self) -> set[int]:
        """TCP ports on which anything on the host takes connections."""
        ports = set()
        for table in ("tcp", "tcp6"):
            for line in _run(*self.prefix, "cat", f"/proc/net/{table}").splitlines()[1:]:
                columns = line.split()
                if columns[3] == "0A":
                    ports.add(int(columns[1].rpartition(":")[2], 16))
        return ports

    def reachable_ports(self, other: "Host", ports: set[int]) -> set[int]:
        """Those of the ports to which this host can connect at the other."""
        arguments = [sys.executable, "-c", OPEN_PORTS, other.address, *map(str, sorted(ports))]
        return set(map(int, _run(*self.prefix, *arguments).split()))


@contextlib.contextmanager
def network(names: Sequence[str], server_name: str) -> Iterator[list[Host]]:
    """Hosts in the order of `names`; the first is the server, which all know as `server_name`.

    Everything is removed when the block is left.
    """
    mark = f"bt-{uuid.uuid4().hex[:6]}"
    router = f"{mark}-router"
    hosts = [
        Host(f"{mark}-{name}", f"198.51.100.{4 * number + 2}", router, f"to{number}")
        for number, name in enumerate(names)
    ]
    namespaces = [router, *(host.namespace for host in hosts)]
    folders = [Path("/etc/netns") / namespace for namespace in namespaces]
    had_folder = folders[0].parent.exists()
    try:
        for namespace in namespaces:
            _run("ip", "netns", "add", namespace)
            _run("ip", "-n", namespace, "link", "set", "lo", "up")
        _run("ip", "netns", "exec", router, "sh", "-c", f"echo 1 > {_SYSCTL}")
        for number, host in enumerate(hosts):
            _connect(host, 4 * number + 1)
            _name_the_server(host, hosts[0].address, server_name)
        yield hosts
    finally:
        for namespace in namespaces:
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True)
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        if not had_folder:
            with contextlib.suppress(OSError):
                folders[0].parent.rmdir()


def _connect(host: Host, gateway: int) -> None:
    ends = ["peer", "name", "eth0", "netns", host.namespace]
    _run("ip", "-n", host.router, "link", "add", host.router_end, "type", "veth", *ends)
    near, far = f"198.51.100.{gateway}", host.address
    _run("ip", "-n", host.router, "address", "add", f"{near}/30", "dev", host.router_end)
    _run("ip", "-n", host.router, "link", "set", host.router_end, "up")
    _run("ip", "-n", host.namespace, "address", "add", f"{far}/30", "dev", "eth0")
    _run("ip", "-n", host.namespace, "link", "set", "eth0", "up")
    _run("ip", "-n", host.namespace, "route", "add", "default", "via", near)


def _name_the_server(host: Host, address: str, name: str) -> None:
    # `ip netns exec` shows these files in place of those of the same name in /etc.
    folder = Path("/etc/netns") / host.namespace
    folder.mkdir(parents=True)
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n::1 localhost\n{address} {name}\n")


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout
