"""A summary is released: of a failure it says nothing of clients, and no place on the machine."""

from pathlib import Path
from typing import Any

import pytest
from digits_runs import PRIVATE, configuration
from rich.console import Console

from blackthorn.launch.commands.cluster import _failure_on_record, _Ready, _summary
from blackthorn.launch.commands.simulate import simulate
from blackthorn.launch.federation.deployment import DeploymentError
from blackthorn.launch.federation.flower_cluster import RunStatus
from blackthorn.recording.failure_reason import RunFailed
from blackthorn.recording.folder_place import create_folder
from blackthorn.recording.run_folder import read_summary
from blackthorn.strategies import NotEnoughClients
from blackthorn.strategies.ledger import LedgerInUse
from blackthorn.strategies.reports import RoundReport

SECRET = "node_id=3905597651101463575"
NOTHING_OF_CLIENTS = "is the operator's to know"


def summary_after(folder: Path, error: BaseException, **options: Any) -> dict[str, Any]:
    def fail(report: RoundReport) -> None:
        if report.server_round == 1:
            raise error

    config = configuration(folder, **options)
    with pytest.raises(type(error)):
        simulate(config, Console(quiet=True), observers=[fail])
    summary = read_summary(folder)
    assert summary is not None
    return summary


ERRORS = [
    RuntimeError(f"you tried to allocate 7800 bytes: {SECRET}"),
    ValueError(f"5 clients are not allowed: {SECRET}"),
    KeyError(SECRET),
    MemoryError(SECRET),
    NotEnoughClients(f"1 of 4 clients connected; {SECRET}"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_under_a_claim_an_exception_s_text_is_the_operator_s(
    tmp_path: Path, error: BaseException
) -> None:
    reason = summary_after(tmp_path / "claim", error, **PRIVATE, report=True)["reason"]
    assert SECRET not in reason
    assert NOTHING_OF_CLIENTS in reason
    for path in [*(tmp_path / "claim").glob("*.*")]:
        assert SECRET.encode() not in path.read_bytes(), path
    told = summary_after(tmp_path / "none", error)["reason"]
    assert SECRET in told


def test_what_configuration_alone_says_is_said(tmp_path: Path) -> None:
    for number, error in enumerate([LedgerInUse("ledger x is in use"), RunFailed("disk is full")]):
        reason = summary_after(tmp_path / str(number), error, **PRIVATE)["reason"]
        assert reason == str(error)


def ready(folder: Path, **options: Any) -> _Ready:
    config = configuration(folder, **{**PRIVATE, **options})
    create_folder(folder, config)
    return _Ready(config, folder, -1)


@pytest.mark.parametrize("claim", [True, False])
def test_what_a_process_of_a_cluster_left_in_its_log_is_the_operator_s(
    tmp_path: Path, claim: bool
) -> None:
    """The end of the SuperLink's log says who answered."""
    said = f"superlink ended with status -9; the end of superlink.log:\n Push replies from {SECRET}"
    one = ready(tmp_path, claim_privacy=claim)
    with pytest.raises(RunFailed, match=SECRET), _failure_on_record(one):
        raise DeploymentError(said)
    summary = read_summary(tmp_path)
    assert summary is not None
    assert (SECRET in summary["reason"]) != claim
    assert (NOTHING_OF_CLIENTS in summary["reason"]) == claim


def test_what_flower_says_of_a_failed_run_is_the_operator_s(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=SECRET):
        _summary(ready(tmp_path), RunStatus("finished", "failed", SECRET), 1.0)
    summary = read_summary(tmp_path)
    assert summary is not None
    assert SECRET not in summary["reason"]
    assert "Flower says finished:failed" in summary["reason"]


@pytest.mark.parametrize("options", [{}, PRIVATE], ids=["no claim", "claim"])
def test_no_path_of_this_machine_is_in_a_summary(tmp_path: Path, options: dict[str, Any]) -> None:
    """Files have their names in the run folder, or their own alone."""
    where = tmp_path / "of somebody"
    ledger = where / "ledgers" / "wards.json"
    own = {**options, "ledger": str(ledger)} if options else {}
    (where / "ledgers").mkdir(parents=True)
    folder = where / "run"
    error = RunFailed(f"No space left on device: {folder}/metrics.jsonl, /srv/data/own.npz")
    summary = summary_after(folder, error, report=True, **own)
    assert summary["reason"] == "No space left on device: metrics.jsonl, own.npz"
    if options:
        [begins_anew] = [line for line in summary["warnings"] if "does not exist" in line]
        assert begins_anew.startswith("ledger wards.json does not exist")
    for name in ("summary.json", "report.html"):
        told = (folder / name).read_text()
        assert "metrics.jsonl, own.npz" in told
        assert "of somebody/run/" not in told and "/srv/" not in told


@pytest.mark.parametrize(
    "text",
    ["1/num-clients = 0.25", "finished:failed and/or", "see https://flower.ai/docs/x", "K / r"],
)
def test_what_is_no_path_stays(tmp_path: Path, text: str) -> None:
    assert summary_after(tmp_path, RunFailed(text))["reason"] == text
