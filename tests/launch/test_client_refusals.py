"""A client that cannot take part says so in its own output, and as much of it as it may."""

import logging
from pathlib import Path

import grpc
import numpy as np
import pytest
from flwr.app import Context, Message, RecordDict
from flwr.supernode import start_client_internal

from blackthorn.client_app.clientapp import app
from blackthorn.flower_port import programs
from blackthorn.flower_port.programs import FAILED_CALL
from blackthorn.launch.commands.recipes import recipe_config
from blackthorn.launch.federation.addresses import Address
from blackthorn.launch.federation.client_service import AppWatch, Watch
from blackthorn.launch.federation.members import ClientSettings
from blackthorn.launch.federation.probe import Refused
from blackthorn.settings.config import to_mapping
from blackthorn.strategies.enrolment_messages import CannotTakePart, read_enrolment


def refusal(config: dict[str, bool | int | float | str], data: Path) -> CannotTakePart:
    """What client 3 answers the server under this run config."""
    node: dict[str, bool | int | float | str] = {"client-id": 3, "data-path": str(data)}
    reply = app(Message(RecordDict(), 5, "query"), Context(77, 5, node, RecordDict(), config))
    with pytest.raises(CannotTakePart) as refused:
        read_enrolment(reply)
    return refused.value


def test_examples_that_do_not_fit_the_recipe_are_refused_and_the_client_told_more(
    repository: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = to_mapping(recipe_config(repository / "recipes" / "own-data.toml", (), {}))
    data = tmp_path / "data.npz"
    np.savez(data, x=np.zeros((50, 20)), y=np.arange(50) % 10)
    refused = refusal(config, data)
    wrong = "x has shape (50, 20), allowed is (n, 64): the task's input-shape is 64"
    assert (refused.client_id, str(refused)) == (3, f"data-path 'data.npz': {wrong}")
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.getMessage() == (
        f"client 3 cannot take part in run 77: data-path '{data}': {wrong}"
    )


def test_under_a_privacy_claim_the_server_learns_nothing_of_the_examples(
    repository: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = to_mapping(recipe_config(repository / "recipes" / "dp-digits.toml", (), {}))
    data = tmp_path / "data.npz"
    np.savez(data, x=np.zeros((50, 1, 8, 8)), y=np.arange(50))
    assert str(refusal(config, data)).startswith("its examples cannot be used; under a privacy")
    assert "row 10 (from 0): y holds 10" in caplog.text


def test_the_client_s_terminal_says_it_once_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    watch = AppWatch()
    for run in (77, 77, 78):
        watch.line("INFO : something else")
        watch.line(f"client 3 cannot take part in run {run}: data-path '/a.npz': y holds 10")
    said = capsys.readouterr().err.splitlines()
    assert [line.split(" ", 2)[2] for line in said] == [
        f"client 3 cannot take part in run {run}: data-path '/a.npz': y holds 10"
        for run in (77, 78)
    ]
    watch.line("ERROR : client 3 does not train in run 78: round 2 comes after round 2")
    assert "client 3 does not train in run 78: round 2" in capsys.readouterr().err


@pytest.fixture
def watch(tmp_path: Path) -> Watch:
    """Of a client that gives up a refused key at once."""
    settings = ClientSettings(
        server=Address("fl.example.org", 9092),
        client_id=0,
        ca=None,
        key=Path("node0"),
        data=None,
        data_dir=None,
        logs=tmp_path,
        patience=0.0,
        program=None,
        warm=False,
        policy=None,
        ledger=tmp_path / "ledger.json",
    )
    return Watch(settings)


CONNECTED = "INFO :      SuperNode ID: 4711"
BARRED = "its key is barred (source) until the operator lifts it: blackthorn register --lift"


@pytest.mark.parametrize(
    ("failure", "status", "reason"),
    [
        (
            "RESOURCE_EXHAUSTED: more than 8 requests at a time",
            0,
            "fl.example.org:9092 failed in a call (RESOURCE_EXHAUSTED: more than 8 requests at a "
            "time); its operator finds more in state/logs",
        ),
        (
            f"UNAUTHENTICATED: {BARRED}",
            0,
            f"fl.example.org:9092 has sent this client away: {BARRED}",
        ),
        (
            "UNAUTHENTICATED: Invalid node ID",
            0,
            "fl.example.org:9092 has sent this client away: its key was unregistered there",
        ),
        ("CANCELLED: Channel closed!", 0, "somebody stopped the SuperNode"),
        ("UNAVAILABLE: Socket closed", 0, "somebody stopped the SuperNode"),
        ("UNAVAILABLE: Socket closed", -9, "supernode was killed by signal 9: the last line"),
    ],
)
def test_a_client_says_what_ended_its_connection(
    watch: Watch, failure: str, status: int, reason: str
) -> None:
    watch.line(CONNECTED)
    watch.line(FAILED_CALL + failure)
    # As its channel is closed then.
    watch.line(f"{FAILED_CALL}CANCELLED: Channel closed!")
    assert watch.end(status, "first\nthe last line\n") == reason


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (
            [f"{FAILED_CALL}UNAUTHENTICATED: a key that is not registered"],
            "refused the key node0: it is not registered there (blackthorn register NAME)",
        ),
        ([f"{FAILED_CALL}UNAUTHENTICATED: {BARRED}"], f"refused the key node0: {BARRED}"),
        (
            [f"{FAILED_CALL}UNAUTHENTICATED: a clock that differs from the server's"],
            "refused the key node0: a clock that differs from the server's",
        ),
        (
            [f'{FAILED_CALL}FAILED_PRECONDITION: {{"code": 2004, "message": "cannot"}}'],
            "refused the key node0: another program is connected with it",
        ),
    ],
)
def test_a_client_that_is_not_let_in_says_why(watch: Watch, lines: list[str], reason: str) -> None:
    for line in lines:
        watch.line(line)
    with pytest.raises(Refused) as refused:
        watch.end(0, "")
    assert str(refused.value).startswith(f"fl.example.org:9092 {reason}")


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (
            "UNAVAILABLE: failed to connect to all addresses; last error: UNKNOWN",
            "does not answer; trying again until it does",
        ),
        (
            "UNAVAILABLE: the server's database is busy",
            "does not answer: the server's database is busy; trying again until it does",
        ),
        (
            "PERMISSION_DENIED: PushObject: an answer of more than 1049000 bytes",
            "refused what this client sent: PushObject: an answer of more than 1049000 bytes (its "
            "operator's limits; the answer does not count)",
        ),
        # The end of a run is nobody's fault.
        ("PERMISSION_DENIED: Run is not running", ""),
    ],
)
def test_a_client_says_once_why_it_waits_and_what_was_refused(
    watch: Watch, capsys: pytest.CaptureFixture[str], failure: str, said: str
) -> None:
    watch.line(CONNECTED)
    capsys.readouterr()
    watch.line(FAILED_CALL + failure)
    if failure.startswith("UNAVAILABLE"):
        watch.line(FAILED_CALL + failure)
        watch.line("INFO :      Connection successful after 3.20 seconds and 3 tries.")
    lines = [line.split(" ", 2)[2] for line in capsys.readouterr().err.splitlines()]
    again = ["fl.example.org:9092 answers again"] if failure.startswith("UNAVAILABLE") else []
    assert lines == ([f"fl.example.org:9092 {said}"] if said else []) + again


def test_a_supernode_tells_what_the_server_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Flower logs that a call failed, and not why."""
    make = start_client_internal.make_simple_grpc_retry_invoker
    monkeypatch.setattr(start_client_internal, "make_simple_grpc_retry_invoker", make)
    programs._tell_failures()
    invoker = start_client_internal.make_simple_grpc_retry_invoker()

    class Failure(grpc.RpcError):
        def code(self) -> grpc.StatusCode:
            return grpc.StatusCode.RESOURCE_EXHAUSTED

        def details(self) -> str:
            return "more than 8 requests\nat a time"

    def call() -> None:
        raise Failure

    with pytest.raises(Failure):
        invoker.invoke(call)
    line = f"{FAILED_CALL}RESOURCE_EXHAUSTED: more than 8 requests at a time"
    assert line in capsys.readouterr().err.splitlines()
