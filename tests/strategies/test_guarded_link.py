"""What the guard tells the run: who a key is, and what was refused, over its real gRPC calls."""

import concurrent.futures
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from enrolling_nodes import holds, settle
from memory_grid import MemoryGrid, initial_model, quadratic_app, runs

from blackthorn.flower_port.grpc_grid import report_of_guard
from blackthorn.flower_port.guard import REPORT, service
from blackthorn.flower_port.guard.audit import FILE, AuditLog
from blackthorn.flower_port.guard.checks import Sizes
from blackthorn.flower_port.guard.records import Records
from blackthorn.launch.federation.addresses import LOOPBACK
from blackthorn.recording.round_entries import operator_entry, round_entry
from blackthorn.strategies import GFedAvg, RoundReport
from blackthorn.strategies.enrolment import ClientRegistry
from blackthorn.strategies.enrolment_messages import GuardedLink
from blackthorn.strategies.reports import Refusal

TOKEN = "the-token"
KEYS = {b"key of 11": 11, b"key of 12": 12, b"key of 13": 13}


class GuardedGrid(MemoryGrid):
    """A grid in memory that asks a SuperLink's guard over gRPC, if there is one."""

    def __init__(self, nodes: Any, channel: grpc.Channel) -> None:
        super().__init__(nodes)
        self._channel = channel

    @property
    def is_closed(self) -> bool:
        return False

    def guard_report(self) -> dict[str, Any]:
        return report_of_guard(self._channel)


class _Token(grpc.UnaryUnaryClientInterceptor):
    def __init__(self, token: str) -> None:
        self._token = token

    def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        metadata = (("flwr-task-token", self._token),)
        return continuation(details._replace(metadata=metadata), request)


@pytest.fixture
def records(tmp_path: Path) -> Records:
    return Records(tmp_path, offences=2)


@pytest.fixture
def address(records: Records, tmp_path: Path) -> Iterator[str]:
    """A server with the guard's calls for ServerApps and for operators, and nothing else."""
    state: Any = SimpleNamespace(nodes=lambda: KEYS, is_task=lambda token: token == TOKEN)
    interceptors = [
        service.ForServerApps(state, records, Sizes(), lambda: True),
        service.ForOperators(state, records, AuditLog(tmp_path / FILE)),
    ]
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(4), interceptors=interceptors)
    port = server.add_insecure_port(f"{LOOPBACK}:0")
    server.start()
    yield f"{LOOPBACK}:{port}"
    server.stop(0).wait(10)


@pytest.fixture
def channel(address: str) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(address) as plain:
        yield grpc.intercept_channel(plain, _Token(TOKEN))


def test_only_a_running_serverapp_is_told(address: str) -> None:
    with grpc.insecure_channel(address) as plain:
        wrong = grpc.intercept_channel(plain, _Token("another"))
        with pytest.raises(grpc.RpcError) as caught:
            wrong.unary_unary(REPORT)(b"", timeout=10)
        assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
        assert GuardedLink().holders(GuardedGrid({}, wrong)) == {}


def test_a_grid_without_a_guard_knows_nothing() -> None:
    link = GuardedLink()
    assert (link.holders(MemoryGrid({})), link.refusals(MemoryGrid({}), {})) == ({}, [])


def test_a_key_is_its_client_from_the_first_round_on(
    records: Records, channel: grpc.Channel
) -> None:
    """Node 12 is there first and says that it is client 0, whose key is node 11's."""
    records.register(b"key of 11", "node0", {"client_id": 0})
    records.register(b"key of 12", "node1", {"client_id": 1})
    registry = ClientRegistry("key", population=3)
    grid = GuardedGrid({12: holds(0)}, channel)
    assert settle(registry, grid) == []
    grid.nodes[13] = holds(0)  # A key that was registered for no client has none of the others'.
    assert settle(registry, grid) == []
    grid.nodes[11] = holds(0)
    assert settle(registry, grid) == [0]
    assert registry[0].node_id == 11


def test_no_more_examples_than_the_key_was_registered_for(
    records: Records, channel: grpc.Channel, caplog: pytest.LogCaptureFixture
) -> None:
    records.register(b"key of 11", "node0", {"client_id": 0, "max_examples": 500})
    records.register(b"key of 12", "node1", {"client_id": 1, "max_examples": 500})
    grid = GuardedGrid({11: holds(0, num_examples=501), 12: holds(1, num_examples=500)}, channel)
    assert settle(ClientRegistry("key", population=2), grid) == [1]
    assert "num-examples = 501, but the key node0 is registered for at most 500" in caplog.text


def test_a_client_id_is_one_keys(records: Records) -> None:
    records.register(b"key of 11", "node0", {"client_id": 0})
    with pytest.raises(ValueError, match="client 0 is node0's already"):
        records.register(b"key of 12", "node1", {"client_id": 0})
    records.forget(b"key of 11")
    assert records.register(b"key of 12", "node1", {"client_id": 0}).client_id == 0
    # What was said before stays where nothing else is said.
    assert records.register(b"key of 12", "node1", {"max_examples": 7}).client_id == 0


def test_refusals_are_a_rounds_and_counted_once(records: Records, channel: grpc.Channel) -> None:
    link, grid, key = GuardedLink(), GuardedGrid({}, channel), b"key of 11"
    records.register(key, "node0", {"client_id": 0})
    records.refuse("size", "too large", key, 11)
    assert link.refusals(grid, {11: 0}) == []  # before the run
    for _ in range(3):
        records.refuse("size", "too large\x1b[2J", key, 11)
    records.refuse("unauthenticated", "no key")
    found = link.refusals(grid, {11: 0})
    assert found[0] == Refusal("node0", 0, found[0].what, 3)
    assert "\x1b" not in found[0].what
    assert found[1] == Refusal("unknown keys", None, "no key", 1)
    assert link.refusals(grid, {11: 0}) == []


def test_a_barred_key_is_named_in_the_record(records: Records, channel: grpc.Channel) -> None:
    link, grid, key = GuardedLink(), GuardedGrid({}, channel), b"key of 11"
    link.refusals(grid, {})
    for _ in range(2):
        records.refuse("source", "not its own", key, 11, offence=True)
    assert [r.barred for r in link.refusals(grid, {})] == [True]


def test_a_rounds_record_has_the_refusals_and_a_private_run_keeps_them_to_the_operator(
    records: Records, channel: grpc.Channel
) -> None:
    reports: list[RoundReport] = []

    def refuse_then_note(report: RoundReport) -> None:
        reports.append(report)
        records.refuse("size", "too large", b"key of 11", 11)

    grid = GuardedGrid({n: runs(quadratic_app(n)) for n in (11, 12)}, channel)
    strategy = GFedAvg(num_clients=2, observers=[refuse_then_note])
    strategy.start(grid, initial_model(), num_rounds=2, timeout=60)
    first, second = reports
    assert first.refusals == []
    (refused,) = round_entry(second)["refused"]
    assert (refused["what"], refused["count"]) == ("too large", 1)
    second.confidential = True
    assert "refused" not in round_entry(second)
    assert operator_entry(second)["refused"] == [refused]


class HeldUp(MemoryGrid):
    """A SuperLink that is slow in whatever it is asked, by almost the round's time."""

    def __init__(self, nodes: Any, seconds: float) -> None:
        super().__init__(nodes)
        self._seconds = seconds
        self.held = False

    def get_node_ids(self) -> list[int]:
        if self.held:
            time.sleep(self._seconds)
        return super().get_node_ids()

    def push_messages(self, messages: Any) -> list[str]:
        if self.held:
            time.sleep(self._seconds)
        return super().push_messages(messages)


def test_a_round_ends_in_time_whatever_the_superlink_does() -> None:
    timeout = 4.0
    grid = HeldUp({n: runs(quadratic_app(n)) for n in (1, 2)}, 0.9 * timeout)
    reports: list[RoundReport] = []

    def hold_up(report: RoundReport) -> None:
        reports.append(report)
        grid.held = True

    strategy = GFedAvg(num_clients=2, observers=[hold_up])
    strategy.start(grid, initial_model(), num_rounds=3, timeout=timeout)
    assert reports[0].skipped is None
    # What is held up twice for nine tenths of a round's time would take 1.8 of them.
    assert max(report.seconds["training"] for report in reports) < 1.4 * timeout
