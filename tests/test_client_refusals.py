"""A client that cannot take part says so in its own output, and as much of it as it may."""

import logging
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Context, Message, RecordDict

from client_app.app import app
from launch.addresses import Address
from launch.client import ClientSettings
from launch.client_service import AppWatch, Watch
from launch.recipes import recipe_config
from server_app.config import to_mapping
from strategies.enrolment import CannotTakePart, read_enrolment


def refusal(config: dict[str, bool | int | float | str], data: Path) -> CannotTakePart:
    """What client 3 answers the server under this run config."""
    node = {"client-id": 3, "data-path": str(data)}
    reply = app(Message(RecordDict(), 5, "query"), Context(77, 5, node, RecordDict(), config))
    with pytest.raises(CannotTakePart) as refused:
        read_enrolment(reply)
    return refused.value


def test_examples_that_do_not_fit_the_recipe(
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
    assert "y holds 49" in caplog.text


def test_the_client_s_terminal_says_it_once_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    watch = AppWatch()
    for run in (77, 77, 78):
        watch.line("INFO : something else")
        watch.line(f"client 3 cannot take part in run {run}: data-path '/a.npz': y holds 10")
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(" ")[2] for line in said] == [
        f"client 3 cannot take part in run {run}: data-path '/a.npz': y holds 10"
        for run in (77, 78)
    ]
    watch.line("ERROR : client 3 does not train in run 78: round 2 comes after round 2")
    assert "client 3 does not train in run 78: round 2" in capsys.readouterr().err


# The ends of SuperNodes' logs: of one whose call failed, and of one that was sent away.
FAILED_CALL = """INFO :      Sent successfully
ERROR :     <_InactiveRpcError of RPC that terminated with:
\tstatus = StatusCode.INTERNAL
\tdetails = "Internal server error."
\tdebug_error_string = "INTERNAL:Internal server error."
>"""
SENT_AWAY = """ERROR :     Failed to receive message 17: <_InactiveRpcError:
\tstatus = StatusCode.INTERNAL
>
INFO :      Sent successfully
INFO :      SuperNode terminated gracefully."""


@pytest.mark.parametrize(
    ("tail", "reason"),
    [
        (FAILED_CALL, "failed in a call (INTERNAL): it is overloaded, or its database locked"),
        (SENT_AWAY, "has sent this client away: its key was unregistered there"),
    ],
)
def test_a_client_says_what_ended_its_connection(tmp_path: Path, tail: str, reason: str) -> None:
    settings = ClientSettings(
        server=Address("fl.example.org", 9092),
        client_id=0,
        ca=None,
        key=None,
        data=None,
        data_dir=None,
        logs=tmp_path,
        patience=90.0,
        program=None,
        warm=False,
        policy=None,
        ledger=tmp_path / "ledger.json",
    )
    watch = Watch(settings)
    watch.line("INFO :      SuperNode ID: 4711")
    said = watch.end(0, tail)
    assert said.startswith(f"fl.example.org:9092 {reason}")
