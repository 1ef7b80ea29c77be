"""What `blackthorn server` changes in Flower's processes: the store, and how ServerApps live."""

import importlib.metadata
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

from launch import flower_programs, serverapp_process, superlink_store
from launch.addresses import Address
from launch.server import ServerSettings
from launch.server_programs import serverapp_environment
from launch.serverapp_process import is_alive
from server_app.interrupted import NOTES_VARIABLE

LIVES = "import sys, pathlib; from launch.serverapp_process import live; "
LIVES += "live(pathlib.Path(sys.argv[1]), sys.argv[2]); print('lives', flush=True); input()"


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
    run = state.create_run(
        None, None, None, {}, NOOP_FEDERATION_ID, None, "owner", TaskType.SERVER_APP
    )
    return run, begin(state, run)


def begin(state: Any, run: int) -> str:
    (task,) = [task for task in state.get_tasks() if task.run_id == run]
    token = state.claim_task(task.task_id)
    assert state.activate_task(task.task_id)
    return str(token)


def status(state: Any, run: int) -> str:
    return str(state.get_run_info(run_ids=[run])[0].status.status)


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
    assert status(state, run) == Status.RUNNING
    # Also after hours in which no heartbeat could be stored.
    later = sql_corestate.now() + timedelta(hours=3)
    with monkeypatch.context() as patch:
        patch.setattr(sql_corestate, "now", lambda: later)
        assert status(state, run) == Status.RUNNING
    one.kill()
    assert status(state, run) == Status.PENDING
    again = begin(state, run)
    assert again != token
    # A SuperLink that is started again finds it dead as well.
    assert status(new_state(tmp_path), run) == Status.PENDING


def test_a_serverapp_that_dies_again_and_again_fails_its_run(state: Any) -> None:
    run, _ = running_task(state)
    for _ in range(superlink_store.DEATHS - 1):
        assert status(state, run) == Status.PENDING
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
    flower_programs._retry_soon()
    waits = grpc_retry.make_simple_grpc_retry_invoker().wait_gen_factory()
    assert max(next(waits) for _ in range(20)) == 5


@pytest.mark.parametrize("version", ["1.33.0", "1.34.2"])
def test_the_versions_whose_inside_is_known(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _name: version)
    flower_programs.check_flower()


@pytest.mark.parametrize("version", ["1.32.1", "1.35.0", "2.0.0"])
def test_in_another_version_nothing_is_changed(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _name: version)
    with pytest.raises(RuntimeError, match=rf"flwr {version} is installed.*flwr>=1.33,<1.35"):
        flower_programs.check_flower()


@pytest.mark.parametrize("resume", [True, False])
def test_the_server_tells_its_processes_whether_runs_go_on(tmp_path: Path, resume: bool) -> None:
    address = Address("127.0.0.1", 9092)
    settings = ServerSettings("localhost", address, address, None, tmp_path, resume)
    told = serverapp_environment(settings)
    assert told[superlink_store.GO_ON_VARIABLE] == str(int(resume))
    # ServerApps leave their notes and their locks in the state folder, which outlives the machine.
    for variable in (serverapp_process.FOLDER_VARIABLE, NOTES_VARIABLE):
        assert Path(told[variable]).parent == tmp_path
