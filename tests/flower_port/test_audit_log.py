"""The audit log: who told the server to do what, so that a line that is changed is found."""

import concurrent.futures
import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from flwr.proto import control_pb2 as control
from flwr.proto.control_pb2_grpc import ControlServicer, add_ControlServicer_to_server

from blackthorn.flower_port.control_api import ControlApi
from blackthorn.flower_port.guard import audit
from blackthorn.flower_port.guard.audit import FILE, AuditLog, check
from blackthorn.flower_port.guard.records import Records, fingerprint
from blackthorn.flower_port.guard.service import ForOperators
from blackthorn.launch.federation.addresses import LOOPBACK

KEY = b"-----BEGIN PUBLIC KEY-----\nnode0\n-----END PUBLIC KEY-----\n"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_that_are_changed_taken_out_or_put_in_are_found(tmp_path: Path) -> None:
    path = tmp_path / FILE
    log = AuditLog(path)
    for number in range(4):
        log.write("StopRun", run=str(number))
    assert check(path) == ""
    assert path.stat().st_mode & 0o777 == 0o600
    whole = path.read_text().splitlines(keepends=True)
    for number, changed in (
        (3, [whole[0], whole[1].replace('"1"', '"7"'), *whole[2:]]),
        (2, [whole[0], *whole[2:]]),
        (1, whole[1:]),
        (3, [*whole[:2], whole[0], *whole[2:]]),
        (4, [*whole[:3], whole[3][:20]]),
    ):
        path.write_text("".join(changed))
        assert check(path).startswith(f"line {number} ")
    command = [sys.executable, "-m", "blackthorn.flower_port.guard.audit", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (1, "")
    path.write_text("".join(whole))
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("4 events, the last with digest ")


def test_processes_that_write_at_once_make_one_chain(tmp_path: Path) -> None:
    path = tmp_path / FILE
    code = "import sys; from pathlib import Path\n"
    code += "from blackthorn.flower_port.guard.audit import AuditLog\n"
    code += "for n in range(30): AuditLog(Path(sys.argv[1])).write('e', n=n)"
    command = [sys.executable, "-c", code, str(path)]
    writers = [subprocess.Popen(command) for _ in range(3)]
    assert [writer.wait(120) for writer in writers] == [0, 0, 0]
    assert check(path) == ""
    assert len(lines(path)) == 90


def test_nobody_waits_for_ever_for_a_file_that_somebody_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "_PATIENCE_SECONDS", 0.1)
    log = AuditLog(tmp_path / FILE)
    with log.open(), pytest.raises(BlockingIOError):
        log.write("StopRun", run="1")
    log.write("StopRun", run="2")
    assert [entry["run"] for entry in lines(tmp_path / FILE)] == ["2"]


def test_what_a_crash_tore_off_stays_and_is_named(tmp_path: Path) -> None:
    path = tmp_path / FILE
    AuditLog(path).write("server started")
    with path.open("a") as file:
        file.write('{"time": "20')
    AuditLog(path).write("server started")
    assert check(path) == "line 2 is no event"
    assert lines_that_parse(path) == ["server started", "server started"]


def lines_that_parse(path: Path) -> list[str]:
    found = []
    for line in path.read_text().splitlines():
        try:
            found.append(json.loads(line)["event"])
        except ValueError:
            continue
    return found


class Flower(ControlServicer):
    """A Control API that knows one node, 11, and refuses a key twice."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.database = True

    def RegisterNode(self, _request: Any, context: grpc.ServicerContext) -> Any:
        if "RegisterNode" in self.done:
            context.abort(grpc.StatusCode.ALREADY_EXISTS, "it is there")
        self.done.append("RegisterNode")
        return control.RegisterNodeResponse(node_id=11)

    def UnregisterNode(self, _request: Any, _context: Any) -> Any:
        self.done.append("UnregisterNode")
        return control.UnregisterNodeResponse()

    def StopRun(self, _request: Any, _context: Any) -> Any:
        if not self.database:
            raise OSError("the database is gone")
        self.done.append("StopRun")
        return control.StopRunResponse(success=False)

    def ListNodes(self, _request: Any, _context: Any) -> Any:
        return control.ListNodesResponse()


@pytest.fixture
def flower() -> Flower:
    # What it leaves out answers that it is not there.
    return Flower()  # type: ignore[abstract]


@pytest.fixture
def api(tmp_path: Path, flower: Flower) -> Iterator[ControlApi]:
    """Flower's Control API over gRPC behind the guard's interceptor."""
    state: Any = SimpleNamespace(nodes=lambda: {KEY: 11})
    guard = ForOperators(state, Records(tmp_path, 20), AuditLog(tmp_path / FILE))
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(4), interceptors=[guard])
    add_ControlServicer_to_server(flower, server)
    port = server.add_insecure_port(f"{LOOPBACK}:0")
    server.start()
    known = ControlApi(f"{LOOPBACK}:{port}")
    yield known
    known.close()
    server.stop(0).wait(10)


def test_every_change_is_a_line_with_whom_it_is_about_and_how_it_ended(
    tmp_path: Path, api: ControlApi
) -> None:
    assert api.register(KEY) == 11
    api.guard("register", key=KEY.decode(), name="node0", client_id=0)
    with pytest.raises(grpc.RpcError, match="it is there"):
        api.register(KEY)
    api.unregister(11)
    assert not api.stop(2**63 + 7)
    api.guard("forget", key=KEY.decode())
    # Who only looks changes nothing.
    api.nodes()
    api.guard("list")
    found = lines(tmp_path / FILE)
    about = {"key": fingerprint(KEY), "name": "node0"}
    new_key = {"key": fingerprint(KEY), "name": ""}
    expected = [
        {"event": "RegisterNode", "outcome": "asked", **new_key},
        {"event": "RegisterNode", "outcome": "done", "node": "11", **new_key},
        {"event": "key register", "outcome": "asked", "client_id": 0, **about},
        {"event": "key register", "outcome": "done", "client_id": 0, **about},
        {"event": "RegisterNode", "outcome": "asked", **about},
        {"event": "RegisterNode", "outcome": "refused", **about},
        {"event": "UnregisterNode", "outcome": "asked", "node": "11", **about},
        {"event": "UnregisterNode", "outcome": "done", "node": "11", **about},
        {"event": "StopRun", "outcome": "asked", "run": str(2**63 + 7)},
        {"event": "StopRun", "outcome": "refused", "run": str(2**63 + 7)},
        {"event": "key forget", "outcome": "asked", "key": fingerprint(KEY)},
        {"event": "key forget", "outcome": "done", "key": fingerprint(KEY)},
    ]
    for entry, wanted in zip(found, expected, strict=True):
        assert entry["by"].startswith(f"ipv4:{LOOPBACK}:")
        assert {k: v for k, v in entry.items() if k not in ("time", "by", "before")} == wanted
    assert check(tmp_path / FILE) == ""


def test_what_cannot_be_written_down_is_not_done(
    tmp_path: Path, api: ControlApi, flower: Flower
) -> None:
    (tmp_path / FILE).mkdir()
    for ask in (lambda: api.register(KEY), lambda: api.stop(7)):
        with pytest.raises(grpc.RpcError, match="the audit log cannot be written"):
            ask()
    with pytest.raises(grpc.RpcError, match="the audit log cannot be written"):
        api.guard("register", key=KEY.decode(), name="node0", client_id=0)
    assert flower.done == []
    assert not (tmp_path / "keys.json").exists()


def test_on_a_full_disk_nothing_is_done_and_what_was_done_before_is_said_to_be(
    api: ControlApi, flower: Flower, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = [0]

    def fsync(_descriptor: int) -> None:
        room[0] -= 1
        if room[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(audit.os, "fsync", fsync)
    with pytest.raises(grpc.RpcError, match="not done: the audit log cannot be written: No space"):
        api.register(KEY)
    assert flower.done == []
    room[0] = 1
    with pytest.raises(grpc.RpcError, match="done, but the audit log cannot be written: No space"):
        api.register(KEY)
    assert flower.done == ["RegisterNode"]


def test_an_error_of_the_call_itself_is_not_put_down_to_the_log(
    tmp_path: Path, api: ControlApi, flower: Flower
) -> None:
    flower.database = False
    with pytest.raises(grpc.RpcError) as raised:
        api.stop(7)
    assert "audit log" not in str(raised.value)
    assert [entry["outcome"] for entry in lines(tmp_path / FILE)] == ["asked", "refused"]
