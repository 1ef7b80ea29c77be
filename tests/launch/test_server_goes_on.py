"""`blackthorn server` whose database is locked or full, or of whose processes one is ended, in
mid-run.

The run completes without a hand, and no finished round is lost or repeated.
"""

import os
import re
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from process_watch import having_open, running, until
from real_deployment import Started, bench
from test_real_deployment import Federation, children_named, last_round

from blackthorn.launch.federation.addresses import free_loopback_ports
from blackthorn.launch.federation.certs import make
from blackthorn.recording.run_folder import METRICS, read_metrics, read_summary

pytestmark = [
    pytest.mark.deployment,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc to see what runs"),
]

CLIENTS = 4
ROUNDS = 20  # more than FAULTS: some pass while a fault waits for the process it ends
SERVERAPP = "flwr-serverapp"
LOCKED_SECONDS = 8.0
# Far more than a round, and the return of what a fault ended, take on a machine that is busy.
DEADLINE, SECONDS = 120, 400.0


class Server:
    """A federation of CLIENTS clients whose server can be started again, on the same ports."""

    def __init__(self, federation: Federation, arguments: tuple[object, ...]) -> None:
        self.federation = federation
        self._arguments = arguments

    def start(self) -> None:
        self.federation.server = self.federation.bench.start("server", *self._arguments)

    def processes(self, name: str) -> list[int]:
        return children_named(self.federation.server.process.pid, name)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("federation")
    keys = [f"node{i}" for i in range(CLIENTS)]
    make(folder / "certs", ["localhost"], keys)
    fleet, control = free_loopback_ports(2)
    arguments = (
        *("server", "--host", "localhost", "--certs", "certs", "--state", "state"),
        *("--port", fleet, "--control", f"127.0.0.1:{control}"),
    )
    with small_disk(folder / "state"), bench(folder) as programs:
        first = programs.start("server", *arguments)
        first.says("ready:")
        federation = Federation(programs, first, f"localhost:{fleet}", f"localhost:{control}")
        federation.operate("register", *keys, "--certs", "certs")
        for i in range(CLIENTS):
            federation.client(f"client{i}", "--key", f"certs/clients/node{i}")
        for client in programs.started[1:]:
            client.says("connected to localhost")
        yield Server(federation, arguments)


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A disk of its own where we may mount one; elsewhere no fault can fill it."""
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128m", "tmpfs", folder])
    try:
        yield
    finally:
        if mounted.returncode == 0 and folder.is_mount():
            subprocess.run(["umount", "--lazy", folder], check=True)


def lock_the_database(server: Server, folder: Path) -> None:
    del folder
    database = state_of(server) / "superlink.db"
    connection = sqlite3.connect(database, isolation_level=None, timeout=60)
    connection.execute("BEGIN IMMEDIATE")
    time.sleep(LOCKED_SECONDS)
    connection.execute("ROLLBACK")
    connection.close()


def fill_the_store(server: Server, folder: Path) -> None:
    """The kernel lets the SuperLink write no more: its next write is what a full disk refuses."""
    del folder
    before = server.federation.server.text()
    pid = only_one(lambda: server.processes("flower-superlink"))
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (4096, 4096))
    until(lambda: not running(pid), SECONDS)
    says_again(server, "superlink.db cannot be written", before)


def fill_the_disk(server: Server, folder: Path) -> None:
    """Until the server, which is left some room, has stopped everything; then make room again."""
    disk, before = state_of(server), server.federation.server.text()
    superlink = only_one(lambda: server.processes("flower-superlink"))
    pids = [superlink, only_one(lambda: having_open(folder / METRICS))]
    ballast = disk / "ballast"
    with ballast.open("wb") as stream:
        os.posix_fallocate(stream.fileno(), 0, shutil.disk_usage(disk).free - 8 * 2**20)
    says_again(server, "32 are needed; the server waits for them", before)
    until(lambda: not any(running(pid) for pid in pids), SECONDS)
    ballast.unlink()
    says_again(server, "there is room again", before)


def says_again(server: Server, words: str, before: str) -> None:
    """Wait until the server says so once more than `before`."""
    said = server.federation.server.text
    until(lambda: said().count(words) > before.count(words), SECONDS)


def only_one(found: Callable[[], list[int]]) -> int:
    """The process, once it is there: what an earlier fault ended may still be starting anew."""
    pids: list[int] = []

    def alone() -> bool:
        pids[:] = found()
        return len(pids) == 1

    until(alone, SECONDS)
    return pids[0]


def strike(name: str, number: signal.Signals) -> Callable[[Server, Path], None]:
    def act(server: Server, folder: Path) -> None:
        pid = only_one(
            lambda: having_open(folder / METRICS) if name == SERVERAPP else server.processes(name)
        )
        os.kill(pid, number)
        until(lambda: not running(pid), SECONDS)

    return act


def restart(number: signal.Signals) -> Callable[[Server, Path], None]:
    def act(server: Server, folder: Path) -> None:
        pids = [only_one(lambda: having_open(folder / METRICS))]
        server.federation.server.process.send_signal(number)
        server.federation.server.process.wait(SECONDS)
        until(lambda: not any(running(pid) for pid in pids), SECONDS)
        server.start()

    return act


FAULTS = {
    "locked": lock_the_database,
    "full-store": fill_the_store,
    "full-disk": fill_the_disk,
    **{
        f"{number.name}-{name}": strike(name, number)
        for name in ("flower-superlink", "flower-superexec", SERVERAPP)
        for number in (signal.SIGTERM, signal.SIGKILL)
    },
    **{f"{n.name}-server": restart(n) for n in (signal.SIGTERM, signal.SIGKILL)},
}


def test_one_run_survives_the_death_of_every_process(server: Server, repository: Path) -> None:
    survives_all(server, repository, "all")


@pytest.mark.slow
@pytest.mark.parametrize("time", range(5))
def test_a_run_survives_the_death_of_every_process_every_time(
    server: Server, repository: Path, time: int
) -> None:
    survives_all(server, repository, f"all-{time}")


def survives_all(server: Server, repository: Path, name: str) -> None:
    """A run that meets one of FAULTS after each of its rounds ends as if it had met none."""
    folder, run = start_run(server, repository, name)
    faults = [name for name in FAULTS if name != "full-disk" or state_of(server).is_mount()]

    def reached(finished: int) -> bool:
        return last_round(folder) >= finished or ended(run)

    try:
        for finished, fault in enumerate(faults, start=1):
            until(partial(reached, finished), SECONDS)
            assert last_round(folder) < ROUNDS, f"{fault}\n{told(server, run)}"
            FAULTS[fault](server, folder)
        check_whole(server, folder, run)
    finally:
        if not ended(run):
            # The clients are the next run's.
            stop(server, run)
    assert "superlink was killed by signal 9" in server.federation.server.text()
    assert "has died; the run goes on" in server.federation.server.text()


def stop(server: Server, run: Started) -> None:
    number = re.match(r"run (\d+) has started\n", run.text())
    if number is not None:
        server.federation.operate("stop", number[1], "--ca", "certs/ca.crt")


def start_run(server: Server, repository: Path, name: str) -> tuple[Path, Started]:
    federation = server.federation
    run = federation.bench.start(
        f"run-{name}",
        *("run", repository / "recipes" / "demo.toml", "--server", federation.control),
        *("--ca", "certs/ca.crt", "--follow", "--clients", CLIENTS, "--output-dir", f"runs/{name}"),
        *("--set", f"num-server-rounds={ROUNDS}", "--set", f"round-timeout={DEADLINE}"),
    )
    return state_of(server) / "runs" / name, run


def state_of(server: Server) -> Path:
    return server.federation.bench.folder / "state"


def check_whole(server: Server, folder: Path, run: Started) -> None:
    """It has completed, and every round is on record once."""
    assert run.process.wait(3 * SECONDS) == 0, told(server, run)
    assert f"completed: {ROUNDS} rounds" in run.text()
    assert [entry["round"] for entry in read_metrics(folder)] == list(range(ROUNDS + 1))
    summary = read_summary(folder)
    assert summary is not None
    assert (summary["status"], summary["rounds_completed"]) == ("completed", ROUNDS)
    # Not with a skeleton crew: the last round had everybody.
    assert read_metrics(folder)[-1]["replied"] == CLIENTS


def ended(run: Started) -> bool:
    return run.process.poll() is not None


def told(server: Server, run: Started) -> str:
    return run.text() + server.federation.server.text()
