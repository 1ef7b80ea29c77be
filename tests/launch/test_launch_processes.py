"""Processes, ports, interrupts and app folders, without Flower."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from process_watch import running, until

from blackthorn.launch.federation.addresses import free_loopback_ports
from blackthorn.launch.federation.app_bundle import stage_app, write_config
from blackthorn.launch.federation.process_environment import ProcessEnvironment, polite_poll_seconds
from blackthorn.launch.processes import interrupts, orphan_reaper
from blackthorn.launch.processes.process_groups import ProcessGroup, ProcessKeeper

# A program with a child of its own, neither of which cares about SIGTERM.
STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = os.fork()
if child:
    os.write(1, f"{os.getpid()} {child}\\n".encode())  # both at once, whoever reads
time.sleep(60)
"""


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[ProcessKeeper]:
    keeper = ProcessKeeper(tmp_path / "scratch")
    yield keeper
    keeper.close()


def start(keeper: ProcessKeeper, folder: Path, program: str) -> ProcessGroup:
    command = [sys.executable, "-c", program]
    return keeper.start("p", command, env=dict(os.environ), cwd=folder, log=folder / "p.log")


def pids(group: ProcessGroup) -> list[int]:
    until(lambda: group.tail().count(" ") == 1)
    return [int(word) for word in group.tail().split()]


def test_ports_are_free_and_different() -> None:
    ports = free_loopback_ports(20)
    assert len(set(ports)) == 20
    for port in ports:
        with socket.socket() as one:
            one.bind(("127.0.0.1", port))


def test_stopping_ends_the_whole_group_within_the_grace(
    keeper: ProcessKeeper, tmp_path: Path
) -> None:
    group = start(keeper, tmp_path, STUBBORN)
    leader, child = pids(group)
    assert leader == group.pid
    started = time.monotonic()
    keeper.stop([group], grace=0.5)
    assert 0.4 < time.monotonic() - started < 5.0
    assert group.returncode == -signal.SIGKILL
    assert not running(leader)
    assert not running(child)


def test_a_second_interrupt_cuts_the_grace_short(keeper: ProcessKeeper, tmp_path: Path) -> None:
    group = start(keeper, tmp_path, STUBBORN)
    pids(group)
    started = time.monotonic()
    keeper.stop([group], grace=30.0, at_once=lambda: True)
    assert time.monotonic() - started < 5.0


def test_members_of_the_group_get_the_grace_too(keeper: ProcessKeeper, tmp_path: Path) -> None:
    program = """
import os, signal, sys, time
if os.fork():
    time.sleep(60)
signal.signal(signal.SIGTERM, lambda number, frame: (time.sleep(0.5), print("saved"), sys.exit()))
print(os.getppid(), os.getpid(), flush=True)
time.sleep(60)
"""
    group = start(keeper, tmp_path, program)
    pids(group)
    keeper.stop([group], grace=10.0)
    assert group.tail().endswith("saved")


def test_a_leader_that_dies_takes_its_group_along(keeper: ProcessKeeper, tmp_path: Path) -> None:
    group = start(keeper, tmp_path, STUBBORN)
    leader, child = pids(group)
    os.kill(leader, signal.SIGKILL)
    until(lambda: not group.alive)
    until(lambda: not running(child))
    assert group.returncode == -signal.SIGKILL


def test_the_reaper_ends_what_a_killed_launcher_leaves(tmp_path: Path) -> None:
    launcher = f"""
import os, sys, time
from pathlib import Path
from blackthorn.launch.processes.process_groups import ProcessKeeper
Path("scratch").mkdir()
Path("scratch/file").write_text("")
keeper = ProcessKeeper(Path("scratch"))
keeper.start("p", [sys.executable, "-c", {STUBBORN!r}], env=dict(os.environ), cwd=Path("."),
             log=Path("p.log"))
print("started", flush=True)
time.sleep(60)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", launcher], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    log = tmp_path / "p.log"
    until(lambda: log.read_text().endswith("\n"))
    leader, child = (int(word) for word in log.read_text().split())
    process.kill()
    process.wait(10)
    until(lambda: not running(leader) and not running(child))
    until(lambda: not (tmp_path / "scratch").exists())


def test_the_reaper_spares_what_has_ended() -> None:
    assert orphan_reaper.watch(["+12\n", "+13\n", "-12\n", "+14\n"]) == {13, 14}


def test_interrupts_wait_for_the_end_of_the_block() -> None:
    steps = []
    with pytest.raises(KeyboardInterrupt), interrupts.deferred() as held:
        signal.raise_signal(signal.SIGINT)
        steps.append(list(held))
    assert steps == [[signal.SIGINT]]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_sigterm_unwinds_and_keeps_its_exit_status() -> None:
    program = textwrap.dedent(
        """
        import sys, time
        from blackthorn.launch.processes import interrupts
        with interrupts.termination_unwinds():
            try:
                print("ready", flush=True)
                time.sleep(60)
            finally:
                print("unwound", flush=True)
        """
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    process.terminate()
    assert process.communicate(timeout=20)[0] == "unwound\n"
    assert process.returncode == 128 + signal.SIGTERM


def test_a_folder_too_deep_for_a_socket_is_refused(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100)
    with pytest.raises(ValueError, match="too long a path for a Unix socket"):
        ProcessEnvironment(deep, "id", 2, warm=True, quick_polls=True, env={})
    assert not deep.exists()


def test_polls_are_quick_for_few_nodes_and_sparing_for_many() -> None:
    assert polite_poll_seconds(1) == 0.1
    # 30 looks a second in all.
    assert polite_poll_seconds(15) == 0.5
    assert polite_poll_seconds(1000) == 1.0


def test_a_staged_app_holds_only_what_the_nodes_need(tmp_path: Path) -> None:
    app = tmp_path / "app"
    for file in ("pyproject.toml", "one/a.py", "one/deep/b.py", "one/data.npz", "two/c.py"):
        (app / file).parent.mkdir(parents=True, exist_ok=True)
        (app / file).write_text("")
    (app / "one" / "__pycache__").mkdir()
    (app / "one" / "__pycache__" / "a.py").write_text("")
    staged = stage_app(app, ["one", "two/c.py"], tmp_path / "staged")
    files = {str(path.relative_to(staged)) for path in staged.rglob("*") if path.is_file()}
    assert files == {"pyproject.toml", "one/a.py", "one/deep/b.py", "two/c.py"}
    with pytest.raises(ValueError, match="there is no three in it"):
        stage_app(app, ["three"], tmp_path / "other")
    with pytest.raises(ValueError, match=r"no pyproject\.toml"):
        stage_app(app / "one", ["deep"], tmp_path / "another")


def test_any_value_survives_the_config_file(tmp_path: Path) -> None:
    values: dict[str, str | int | float | bool] = {
        "a-b": "a \"quoted\" = 'value' \\ ü\n",
        "n": -3,
        "x": 1e-9,
        "on": True,
    }
    path = write_config(values, tmp_path / "c.toml")
    assert tomllib.loads(path.read_text(encoding="utf-8")) == values
    with pytest.raises(ValueError, match="config key 'a': None is not"):
        write_config({"a": None}, tmp_path / "c.toml")  # type: ignore[dict-item]
