"""The fork server and its stub: a forked program behaves as one started by itself."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from process_watch import running, until

from blackthorn.launch.federation.process_environment import fork_server_command
from blackthorn.launch.processes.program_files import warm_program

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="fork servers need Linux")

PROGRAM = """
import json, os, random, signal, sys, time
import numpy as np
import torch

def tell():
    print(json.dumps({
        "argv": sys.argv, "cwd": os.getcwd(), "mark": os.environ.get("MARK"),
        "server_only": os.environ.get("SERVER_ONLY"), "group": os.getpgid(0) == os.getpid(),
        "draws": [random.random(), float(np.random.random()), float(torch.rand(()))],
        "preloaded": LOADED_IN == os.getppid(),
    }))
    print("to stderr", file=sys.stderr)
    sys.exit(7)

def fail():
    raise LookupError("nothing there")

def complain():
    sys.exit("a complaint")

def sleep():
    print(os.getpid(), flush=True)
    time.sleep(60)

def count_signals():
    seen = []
    signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    print(os.getpid(), flush=True)
    end = time.monotonic() + 30
    while not seen and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(0.3)
    sys.exit(10 + len(seen))

LOADED_IN = os.getpid()
"""


Server = tuple[subprocess.Popen[bytes], Path]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "forked_program.py").write_text(PROGRAM)
    # The paths of sockets are short: pytest's own folders can be too deep for them.
    folder = tempfile.TemporaryDirectory(prefix="fork-")
    socket = Path(folder.name) / "server.sock"
    command = fork_server_command(socket, ["forked_program", "a_module_that_is_not_there"])
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1", "SERVER_ONLY": "1"}
    with (tmp_path / "server.log").open("wb") as log:
        process = subprocess.Popen(command, env=env, stderr=log, process_group=0)
    try:
        until(socket.exists)
        yield process, socket
    finally:
        process.terminate()
        process.wait(10)
        folder.cleanup()


def start(server: Path, function: str, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    program = f"program-{function}"
    warm_program(folder, program, f"forked_program:{function}", server)
    environment = {name: value for name, value in os.environ.items() if name != "SERVER_ONLY"}
    return subprocess.Popen(
        [str(folder / program), *arguments],
        env={**environment, "MARK": "ü=1\n2"},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def first_line(stub: subprocess.Popen[str]) -> str:
    assert stub.stdout is not None
    return stub.stdout.readline()


def test_a_forked_program_gets_everything_that_its_caller_gave(
    server: Server, tmp_path: Path
) -> None:
    told = []
    for _ in range(2):
        stub = start(server[1], "tell", tmp_path, "one", "two words", '"')
        output, errors = stub.communicate(timeout=20)
        assert stub.returncode == 7
        assert errors == "to stderr\n"
        told.append(json.loads(output))
    for one in told:
        assert one["argv"] == ["program-tell", "one", "two words", '"']
        assert one["cwd"] == str(tmp_path)
        assert one["mark"] == "ü=1\n2"
        assert one["server_only"] is None
        assert one["group"]
        assert one["preloaded"]
    for one, other in zip(told[0]["draws"], told[1]["draws"], strict=True):
        assert one != other


def test_failures_look_as_they_do_without_a_server(server: Server, tmp_path: Path) -> None:
    stub = start(server[1], "fail", tmp_path)
    _, errors = stub.communicate(timeout=20)
    assert stub.returncode == 1
    assert errors.splitlines()[0].startswith("Traceback")
    assert errors.splitlines()[-1] == "LookupError: nothing there"
    stub = start(server[1], "complain", tmp_path)
    _, errors = stub.communicate(timeout=20)
    assert (stub.returncode, errors) == (1, "a complaint\n")


def test_a_killed_program_and_its_stub_die_together(server: Server, tmp_path: Path) -> None:
    stub = start(server[1], "sleep", tmp_path)
    child = int(first_line(stub))
    os.kill(child, signal.SIGKILL)
    assert stub.wait(10) == -signal.SIGKILL

    stub = start(server[1], "sleep", tmp_path)
    child = int(first_line(stub))
    assert running(child)
    stub.kill()
    stub.wait(10)
    until(lambda: not running(child))

    # A stub that was there for neither changes nothing for the next one.
    stub = start(server[1], "tell", tmp_path)
    stub.communicate(timeout=20)
    assert stub.returncode == 7


def test_a_signal_arrives_once(server: Server, tmp_path: Path) -> None:
    stub = start(server[1], "count_signals", tmp_path)
    first_line(stub)
    stub.send_signal(signal.SIGTERM)
    assert stub.wait(20) == 11

    # Without a handler the program dies of the signal, and its stub says so.
    stub = start(server[1], "sleep", tmp_path)
    first_line(stub)
    stub.send_signal(signal.SIGTERM)
    assert stub.wait(20) == -signal.SIGTERM


def test_nothing_outlives_a_killed_server(server: Server, tmp_path: Path) -> None:
    process, _ = server
    stub = start(server[1], "sleep", tmp_path)
    child = int(first_line(stub))
    process.kill()
    process.wait(10)
    until(lambda: not running(child))
    assert stub.wait(10) == -signal.SIGKILL
    late = start(server[1], "tell", tmp_path)
    _, errors = late.communicate(timeout=20)
    assert late.returncode == 1
    assert errors.startswith("program-tell: the fork server at ")
    assert errors.count("\n") == 1


def test_a_terminated_server_lets_its_programs_end_then_ends_them(
    server: Server, tmp_path: Path
) -> None:
    process, _ = server
    stub = start(server[1], "sleep", tmp_path)
    child = int(first_line(stub))
    started = time.monotonic()
    process.terminate()
    assert process.wait(10) == 0
    assert 1.5 < time.monotonic() - started < 8.0
    until(lambda: not running(child))
    assert stub.wait(10) == -signal.SIGKILL
    log = (tmp_path / "server.log").read_text()
    assert log == (
        "fork server: a_module_that_is_not_there is not preloaded: "
        "No module named 'a_module_that_is_not_there'\n"
    )
