"""What `blackthorn server` changes in Flower's processes: the store, and how ServerApps live."""

import os
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from flwr.common.constant import Status, SubStatus
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.supercore.constant import NOOP_FEDERATION_ID, TaskType
from flwr.supercore.corestate import sql_corestate
from flwr.supercore.corestate.sql_corestate import SqlCoreState
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.retry import grpc_retry
from flwr.supercore.superexec import run_superexec
from flwr.superlink.federation import NoOpFederationManager

from blackthorn.flower_port import programs, serverapp_process, superlink_store
from blackthorn.flower_port.serverapp_process import is_alive
from blackthorn.launch.federation.addresses import Address
from blackthorn.launch.federation.members import ServerSettings
from blackthorn.launch.federation.server_programs import serverapp_environment
from blackthorn.recording.run_notes import NOTES_VARIABLE

LIVES = "import sys, pathlib; from blackthorn.flower_port.serverapp_process import live; "
LIVES += "live(pathlib.Path(sys.argv[1]), sys.argv[2]); print('lives', flush=True); input()"
# A ServerApp of ours as far as Flower's handlers, which waits for replies. Arguments: whether it
# lets go when it is to end, how long it has for that, and whose end it shares.
WAITS = """
import importlib, sys, time
run_serverapp = importlib.import_module("flwr.superlink.runtime.run_serverapp")
from blackthorn.flower_port import serverapp_process
sys.argv[1:1] = ["--token", "token"]
serverapp_process.GRACE_SECONDS = float(sys.argv[4])
serverapp_process.adapt_serverapp()
if sys.argv[5:]:
    run_serverapp.start_parent_process_monitor(int(sys.argv[5]))
tell = lambda: print("told the SuperLink", flush=True)
run_serverapp.register_signal_handlers("leave", exit_handlers=[tell])
try:
    print("lives", flush=True)
    time.sleep(600)
finally:
    print("last state", flush=True)
    time.sleep(600 * (sys.argv[3] == "holds-on"))
"""
# Many runs are made in a store that has no room for them.
FILLS = """
import pathlib, resource, sys
from blackthorn.flower_port import superlink_store
superlink_store.adapt_superlink()
from flwr.supercore import sql_mixin
if sys.argv[2] == "SQLITE_FULL":
    sql_mixin.SQLITE_PRAGMAS = (*sql_mixin.SQLITE_PRAGMAS, ("max_page_count", "1"))
from test_server_processes import new_state, running_task
state = new_state(pathlib.Path(sys.argv[1]))
if sys.argv[2] == "SQLITE_IOERR":
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
for _ in range(1000):
    running_task(state)
"""


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A SuperLink's state on disk, as in a SuperLink of ours that goes on with its runs."""
    return adapted_state(tmp_path, monkeypatch, "1")


def adapted_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, go_on: str) -> Any:
    original = SqlCoreState._cleanup_expired_task_tokens
    monkeypatch.setattr(SqlCoreState, "_cleanup_expired_task_tokens", original)
    sql = sys.modules["flwr.supercore.sql_mixin"]
    for name in ("SQLITE_PRAGMAS", "create_engine"):
        monkeypatch.setattr(sql, name, getattr(sql, name))
    monkeypatch.setenv(serverapp_process.FOLDER_VARIABLE, str(tmp_path / "serverapps"))
    monkeypatch.setenv(superlink_store.GO_ON_VARIABLE, go_on)
    superlink_store.adapt_superlink()
    return new_state(tmp_path)


def new_state(folder: Path) -> Any:
    database = str(folder / "superlink.db")
    objects = ObjectStoreFactory(database)
    return LinkStateFactory(database, NoOpFederationManager(), objects).state()


def running_task(state: Any) -> tuple[int, str]:
    """The number of a run whose ServerApp has begun, and its token."""
    run = new_run(state)
    return run, begin(state, run)


def new_run(state: Any) -> int:
    run = state.create_run(
        None, None, None, {}, NOOP_FEDERATION_ID, None, "owner", TaskType.SERVER_APP
    )
    return int(run)


def begin(state: Any, run: int) -> str:
    (task,) = [task for task in state.get_tasks() if task.run_id == run]
    token = state.claim_task(task.task_id)
    assert state.activate_task(task.task_id)
    return str(token)


def status_of(state: Any, run: int) -> str:
    return str(state.get_run_info(run_ids=[run])[0].status.status)


def integrity(state: Any) -> str:
    [row] = state.query("PRAGMA integrity_check")
    return str(row["integrity_check"])


class ServerApp:
    """A process that lives under a token."""

    def __init__(self, folder: Path, token: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", LIVES, str(folder), token],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"lives\n"

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


def test_a_serverapp_is_alive_until_it_ends_however_it_does(tmp_path: Path) -> None:
    assert not is_alive(tmp_path, "token")
    one = ServerApp(tmp_path, "token")
    assert is_alive(tmp_path, "token")
    assert not is_alive(tmp_path, "another")
    one.kill()
    assert not is_alive(tmp_path, "token")
    other = ServerApp(tmp_path, "token")
    assert is_alive(tmp_path, "token")
    other.process.communicate(b"\n")
    assert not is_alive(tmp_path, "token")
    # Who reads the folder must not be able to speak for the run.
    assert not [path for path in tmp_path.iterdir() if "token" in path.name]


def test_a_dead_serverapp_is_queued_again_and_a_living_one_is_left_alone(
    state: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, token = running_task(state)
    one = ServerApp(tmp_path / "serverapps", token)
    assert status_of(state, run) == Status.RUNNING
    # Also after hours in which no heartbeat could be stored.
    later = sql_corestate.now() + timedelta(hours=3)
    with monkeypatch.context() as patch:
        patch.setattr(sql_corestate, "now", lambda: later)
        assert status_of(state, run) == Status.RUNNING
    one.kill()
    assert status_of(state, run) == Status.PENDING
    again = begin(state, run)
    assert again != token
    # A SuperLink that is started again finds it dead as well.
    assert status_of(new_state(tmp_path), run) == Status.PENDING


def test_a_serverapp_that_is_slow_to_start_is_not_started_twice(
    state: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine it takes longer than the half minute that Flower gives it."""
    run = new_run(state)
    (task,) = [task for task in state.get_tasks() if task.run_id == run]
    one = ServerApp(tmp_path / "serverapps", state.claim_task(task.task_id))
    for late in range(1, 6):
        moment = sql_corestate.now() + late * timedelta(seconds=25)
        with monkeypatch.context() as patch:
            patch.setattr(sql_corestate, "now", lambda then=moment: then)
            assert status_of(state, run) == Status.STARTING
    assert state.activate_task(task.task_id)
    assert status_of(state, run) == Status.RUNNING
    one.kill()


def test_a_claim_whose_serverapp_never_came_is_flower_s_to_give_again(
    state: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(state)
    (task,) = [task for task in state.get_tasks() if task.run_id == run]
    assert state.claim_task(task.task_id)
    assert status_of(state, run) == Status.STARTING
    later = sql_corestate.now() + timedelta(minutes=1)
    monkeypatch.setattr(sql_corestate, "now", lambda: later)
    assert status_of(state, run) == Status.PENDING


def test_a_serverapp_that_dies_again_and_again_fails_its_run(state: Any) -> None:
    run, _ = running_task(state)
    for _ in range(superlink_store.DEATHS - 1):
        assert status_of(state, run) == Status.PENDING
        begin(state, run)
    info = state.get_run_info(run_ids=[run])[0].status
    assert (info.status, info.sub_status) == (Status.FINISHED, SubStatus.FAILED)
    assert info.details == "the ServerApp has died"


def test_without_going_on_a_dead_serverapp_fails_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = adapted_state(tmp_path, monkeypatch, "0")
    run, _ = running_task(state)
    info = state.get_run_info(run_ids=[run])[0].status
    assert (info.sub_status, info.details) == (SubStatus.FAILED, "the ServerApp has died")


def test_the_store_waits_minutes_for_a_lock(state: Any) -> None:
    [row] = state.query("PRAGMA busy_timeout")
    assert list(row.values()) == [300_000]
    assert state._engine.pool._timeout == 300


@pytest.mark.parametrize(("sign", "status"), superlink_store.UNWRITABLE.items())
def test_a_store_that_cannot_be_written_ends_the_superlink_and_keeps_what_it_has(
    tmp_path: Path, sign: str, status: int
) -> None:
    """Of SQLite's own limit (full), and of the kernel's (an I/O error)."""
    kept, _ = running_task(new_state(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", FILLS, str(tmp_path), sign],
        cwd=Path(__file__).parent,
        env={**os.environ, "PYTHONPATH": f"{Path(__file__).parent}:{Path(__file__).parents[2]}"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == status, done.stderr
    again = new_state(tmp_path)
    assert integrity(again) == "ok"
    assert status_of(again, kept) == Status.RUNNING


def test_the_server_itself_needs_no_torch() -> None:
    """It only looks after other programs, and holds no half a gigabyte for that."""
    loads = (
        "import sys; from blackthorn.launch.federation import server, server_programs, service; "
        "from blackthorn.flower_port import control_api; "
        "import blackthorn.launch.federation.process_environment; sys.exit('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", loads]
    assert subprocess.run(command, cwd=Path(__file__).parents[2], timeout=120).returncode == 0


def waiting(folder: Path, *arguments: object, holds_on: bool = False) -> subprocess.Popen[str]:
    how = "holds-on" if holds_on else "lets-go"
    process = subprocess.Popen(
        [sys.executable, "-c", WAITS, how, *map(str, arguments)],
        env={**os.environ, serverapp_process.FOLDER_VARIABLE: str(folder)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "lives\n"
    return process


def ended(process: subprocess.Popen[str]) -> tuple[str, int]:
    """What it said, and its exit status."""
    return process.communicate(timeout=60)[0], process.returncode


def test_a_serverapp_that_is_terminated_leaves_its_state_and_tells_nobody(tmp_path: Path) -> None:
    """Flower's own way tells the SuperLink that the run has failed: it could not go on."""
    process = waiting(tmp_path, 30)
    process.terminate()
    # Whoever is impatient does not cut it short.
    process.terminate()
    assert ended(process) == ("last state\n", 128 + signal.SIGTERM)
    assert not is_alive(tmp_path, "token")


def test_the_end_of_a_run_is_told_to_the_superlink(tmp_path: Path) -> None:
    """`blackthorn stop` reaches a ServerApp as SIGINT, which Flower sends it."""
    process = waiting(tmp_path, 30)
    process.send_signal(signal.SIGINT)
    assert ended(process) == ("told the SuperLink\nlast state\n", 0)


def test_a_serverapp_that_does_not_end_is_killed(tmp_path: Path) -> None:
    process = waiting(tmp_path, 0.5, holds_on=True)
    process.terminate()
    assert ended(process) == ("last state\n", -signal.SIGKILL)


def test_a_serverapp_ends_with_its_server(tmp_path: Path) -> None:
    server = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = waiting(tmp_path, 30, server.pid)
    server.kill()
    server.communicate()
    assert ended(process) == ("last state\n", 128 + signal.SIGTERM)


def test_all_serverapps_that_live_are_ended(tmp_path: Path) -> None:
    dead = ServerApp(tmp_path, "dead")
    dead.kill()
    polite = waiting(tmp_path, 30)
    serverapp_process.end_all(tmp_path)
    assert ended(polite) == ("last state\n", 128 + signal.SIGTERM)
    stubborn = waiting(tmp_path, 30, holds_on=True)
    serverapp_process.end_all(tmp_path, grace=0.5)
    assert ended(stubborn)[1] == -signal.SIGKILL
    assert not is_alive(tmp_path, "token")


def test_a_superexec_waits_out_what_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        run_superexec,
        "make_simple_grpc_retry_invoker",
        run_superexec.make_simple_grpc_retry_invoker,
    )
    monkeypatch.delenv(serverapp_process.SERVER_VARIABLE, raising=False)
    serverapp_process.adapt_superexec()
    invoker = run_superexec.make_simple_grpc_retry_invoker()
    waits: list[float] = []
    invoker.wait_function = waits.append

    class Failure(grpc.RpcError):
        def __init__(self, code: grpc.StatusCode) -> None:
            self.code = lambda: code

    def call() -> str:
        if codes:
            raise Failure(codes.pop())
        return "tasks"

    codes = [grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL]
    assert invoker.invoke(call) == "tasks"
    assert len(waits) == 3
    codes = [grpc.StatusCode.INVALID_ARGUMENT]
    with pytest.raises(Failure):
        invoker.invoke(call)


def test_a_server_that_is_back_is_found_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_retry, "MAX_RETRY_DELAY", grpc_retry.MAX_RETRY_DELAY)
    programs._retry_soon()
    waits = grpc_retry.make_simple_grpc_retry_invoker().wait_gen_factory()
    assert max(next(waits) for _ in range(20)) == 5


@pytest.mark.parametrize("resume", [True, False])
def test_the_server_tells_its_processes_whether_runs_go_on(tmp_path: Path, resume: bool) -> None:
    address = Address("127.0.0.1", 9092)
    settings = ServerSettings("localhost", address, address, None, tmp_path, resume)
    told = serverapp_environment(settings)
    assert told[superlink_store.GO_ON_VARIABLE] == str(int(resume))
    # ServerApps leave their notes and their locks in the state folder, which outlives the machine.
    for variable in (serverapp_process.FOLDER_VARIABLE, NOTES_VARIABLE):
        assert Path(told[variable]).parent == tmp_path
