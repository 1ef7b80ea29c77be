"""A ServerApp that is started a second time finds its run, and goes on with it."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, RecordDict
from killed_runs import Killed
from safetensors.numpy import load_file

from blackthorn.launch.federation.run_log import RunLog
from blackthorn.recording.interrupted import (
    CannotGoOn,
    going_on,
)
from blackthorn.recording.run_folder import METRICS, read_metrics, read_summary
from blackthorn.recording.run_notes import NOTES_VARIABLE, note_folder, noted_folder
from blackthorn.server_app.run import execute, prepare
from blackthorn.server_app.serverapp import main
from blackthorn.settings.config import RunConfig, make_config, to_mapping
from blackthorn.simulation.engine import EngineGrid
from blackthorn.strategies.base import FederatedStrategy

RUN = 2**63 + 7


@pytest.fixture(autouse=True)
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NOTES_VARIABLE, str(tmp_path / "notes"))


def configuration(folder: Path, **options: Any) -> RunConfig:
    values = {"task": "digits", "model": "mlp-32", "num_clients": 3, "num_server_rounds": 4}
    values |= {"state_every": 1, "report": False, "output_dir": str(folder), **options}
    return make_config({key.replace("_", "-"): value for key, value in values.items()})


def interrupted_after(config: RunConfig, last: int, copy: Path) -> None:
    """Copy the run's folder as it is when round `last` is on record: what a SIGKILL leaves."""
    prepared = prepare(config)

    def kill(report: Any) -> None:
        if report.server_round == last:
            shutil.copytree(prepared.folder, copy)
            raise Killed

    with pytest.raises(Killed):
        execute(prepared, EngineGrid(config, prepared.problem), [kill])


def start_again(config: RunConfig, capsys: pytest.CaptureFixture[str]) -> str:
    """The ServerApp as Flower starts it, with the run's first configuration; its output."""
    capsys.readouterr()
    context = Context(RUN, 0, {}, RecordDict(), to_mapping(config))
    grid = EngineGrid(config, prepare(config.model_copy(update={"output_dir": ""})).problem)
    main(grid, context)
    return capsys.readouterr().out


def test_the_same_run_goes_on_in_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, dead = configuration(tmp_path / "whole"), configuration(tmp_path / "dead")
    prepared = prepare(whole)
    execute(prepared, EngineGrid(whole, prepared.problem))
    interrupted_after(configuration(tmp_path / "killed"), 2, tmp_path / "dead")
    note_folder(RUN, tmp_path / "dead")
    said = start_again(dead, capsys)
    summary = read_summary(tmp_path / "dead")
    assert summary is not None
    assert (summary["status"], summary["resumed_after"]) == ("completed", [2])
    finals = [load_file(tmp_path / f / "checkpoints/final.safetensors") for f in ("whole", "dead")]
    for name, value in finals[0].items():
        np.testing.assert_array_equal(value, finals[1][name], strict=True)
    # Who follows it has every round once, also those whose lines were lost with the process.
    log = RunLog()
    assert [entry["round"] for entry in log.read(said)] == [0, 1, 2, 3, 4]
    # It was done when it died once more.
    assert [entry["round"] for entry in log.read(start_again(dead, capsys))] == []
    assert log.summary == summary
    assert [entry["round"] for entry in read_metrics(tmp_path / "dead")] == [0, 1, 2, 3, 4]


def test_a_run_that_had_only_just_begun_begins_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configuration(tmp_path / "run")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / METRICS).touch()
    (tmp_path / "run" / "config.toml").touch()
    note_folder(RUN, tmp_path / "run")
    start_again(config, capsys)
    assert [entry["round"] for entry in read_metrics(tmp_path / "run")] == [0, 1, 2, 3, 4]


def test_without_states_it_cannot_go_on_and_says_so(tmp_path: Path) -> None:
    config = configuration(tmp_path / "killed", state_every=0)
    interrupted_after(config, 2, tmp_path / "dead")
    with pytest.raises(CannotGoOn, match=r"no whole state \(state-every = 0\)"):
        going_on(config, tmp_path / "dead")
    assert len(read_metrics(tmp_path / "dead")) == 3


CLAIMS: dict[str, dict[str, Any]] = {
    "noise at the clients": {
        "algorithm": "dp-fedavg",
        "clip_norm": 1.0,
        "noise_multiplier": 60.0,
        "noise_location": "client",
    },
    "examples": {
        "local_dp_sgd": True,
        "dp_sgd_noise_multiplier": 2.0,
        "dp_sgd_sample_rate": 0.1,
        "dp_sgd_clip_norm": 1.0,
    },
}


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=CLAIMS.keys())
@pytest.mark.parametrize("states", ["none", "damaged"])
def test_under_a_claim_what_clients_have_sent_is_never_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, claim: dict[str, Any], states: str
) -> None:
    """The server evaluates nothing and dies in round 1, when all clients have sent: no round is on
    record. Begun anew, and again, the run would count none of what they sent."""
    every = 0 if states == "none" else 1
    config = configuration(tmp_path, state_every=every, delta=1e-5, **claim)
    prepared = prepare(config)

    def die(*_: Any) -> None:
        raise Killed

    monkeypatch.setattr("blackthorn.server_app.run.evaluation_of", lambda *_: None)
    monkeypatch.setattr(FederatedStrategy, "_evaluate_initial", lambda *_: {})
    monkeypatch.setattr(FederatedStrategy, "_close_round", die)
    with pytest.raises(Killed):
        execute(prepared, EngineGrid(config, prepared.problem))
    (tmp_path / "summary.json").unlink()
    for state in tmp_path.glob("state/*"):
        state.write_bytes(b"torn")
    assert not read_metrics(tmp_path)
    with pytest.raises(CannotGoOn, match="no whole state"):
        going_on(config, tmp_path)


def test_a_folder_is_noted_for_one_run_and_only_at_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert noted_folder(RUN) is None
    note_folder(RUN, tmp_path / "run")
    assert noted_folder(RUN) == tmp_path / "run"
    assert noted_folder(RUN + 1) is None
    monkeypatch.delenv(NOTES_VARIABLE)
    assert noted_folder(RUN) is None
    note_folder(RUN + 1, tmp_path / "run")
    assert [path.name for path in (tmp_path / "notes").iterdir()] == [f"run-{RUN}.json"]
