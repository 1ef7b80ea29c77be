"""The run folder's contract: what is in it, also when the run failed."""

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message
from safetensors.numpy import load_file

from blackthorn.recording.folder_place import choose_folder
from blackthorn.recording.run_folder import (
    RunFolder,
    read_metrics,
    read_summary,
    round_entry,
    write_failure,
)
from blackthorn.server_app.prepared_run import PreparedRun
from blackthorn.server_app.run import execute, prepare
from blackthorn.settings.config import ConfigError, RunConfig, make_config, read_recipe
from blackthorn.simulation.engine import EngineGrid
from blackthorn.strategies import NotEnoughClients, Rejection, RoundReport
from blackthorn.strategies.durable_file import replace_file


class NoExtras:
    """Nobody adds anything to the files."""

    def of_round(self, report: RoundReport) -> Mapping[str, Any]:
        del report
        return {}

    def of_run(self) -> Mapping[str, Any]:
        return {}

    def state(self) -> tuple[Mapping[str, np.ndarray], Mapping[str, Any]]:
        return {}, {}

    def restore(self, arrays: Mapping[str, np.ndarray], values: Mapping[str, Any]) -> None:
        assert not arrays
        assert not values


def configuration(folder: Path, **values: Any) -> RunConfig:
    given = {key.replace("_", "-"): value for key, value in values.items()}
    return make_config(
        {
            "num-clients": 4,
            "num-server-rounds": 3,
            "local-steps": 2,
            "batch-size": 8,
            "report": False,
            "tensorboard": False,
            "output-dir": str(folder),
            **given,
        }
    )


def prepared(folder: Path, **values: Any) -> PreparedRun:
    return prepare(configuration(folder, **values))


def engine(run: PreparedRun) -> EngineGrid:
    return EngineGrid(run.config, run.problem)


def report(server_round: int = 1, **fields: Any) -> RoundReport:
    given: dict[str, Any] = {"invited": [], "accepted": [], "rejected": [], "local_lr": 0.5}
    given |= fields
    return RoundReport(server_round=server_round, model=torch.zeros(2), **given)


def summary_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def test_a_run_that_completed_leaves_summary_lines_and_models(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "run"
    run = prepared(folder, checkpoint_every=2, report=True, tensorboard=True)
    returned = execute(run, engine(run))

    summary = summary_of(folder)
    assert summary == returned
    assert summary["algorithm"] == "gfedavg"
    assert summary["task"] == "digits"
    assert summary["rounds_completed"] == 3
    assert summary["privacy"] is None
    assert summary["clients"] == {"invited": 12, "replied": 12, "rejected": 0}
    assert summary["status"] == "completed"
    assert 0 < summary["wall_seconds"] < 600
    assert "reason" not in summary

    # Everything resolved: the file is a recipe that gives the same configuration.
    assert make_config(read_recipe(folder / "config.toml")) == run.config

    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [entry["round"] for entry in entries] == [0, 1, 2, 3]
    assert read_metrics(folder) == entries
    for entry in entries[1:]:
        assert entry["invited"] == entry["replied"] == 4
        assert entry["rejected"] == []
        assert entry["local_lr"] == 0.1
        assert 0 <= entry["accuracy"] <= 1
        assert entry["loss"] > 0
        phases = {"training", "screening", "aggregation", "server-step", "evaluation"}
        assert entry["seconds"].keys() == phases
        assert all(seconds >= 0 for seconds in entry["seconds"].values())

    # The model that the summary speaks of is the one in the folder.
    state = load_file(folder / "checkpoints" / "final.safetensors")
    model = run.problem.model
    params = model.flatten({name: torch.from_numpy(value) for name, value in state.items()})
    metrics = run.problem.task.evaluate(model, params)
    assert summary["final"]["accuracy"] == pytest.approx(metrics["accuracy"])
    assert summary["final"]["loss"] == pytest.approx(metrics["loss"])
    assert entries[-1]["accuracy"] == pytest.approx(metrics["accuracy"])

    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    events = {name for name in files if name.startswith("events.out.tfevents.")}
    assert len(events) == 1
    assert {name for name in files - events if not name.startswith("plots/")} == {
        "clients.jsonl",
        "config.toml",
        "metrics.jsonl",
        "report.html",
        "summary.json",
        "checkpoints/final.safetensors",
        "checkpoints/round-00002.safetensors",
    }
    assert (folder / "plots" / "accuracy.png").read_bytes().startswith(b"\x89PNG")


def test_a_checkpoint_is_the_model_after_its_round(tmp_path: Path) -> None:
    shorter = prepared(tmp_path / "two", num_server_rounds=2)
    execute(shorter, engine(shorter))
    longer = prepared(tmp_path / "three", num_server_rounds=3, checkpoint_every=2)
    execute(longer, engine(longer))
    expected = load_file(tmp_path / "two" / "checkpoints" / "final.safetensors")
    found = load_file(tmp_path / "three" / "checkpoints" / "round-00002.safetensors")
    final = load_file(tmp_path / "three" / "checkpoints" / "final.safetensors")
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-6)
    assert any(not np.allclose(found[name], final[name]) for name in final)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("the link is down"), "RuntimeError: the link is down"),
        (NotEnoughClients("2 of 4 clients connected"), "2 of 4 clients connected"),
        (KeyboardInterrupt(), "interrupted"),
    ],
)
def test_a_run_that_failed_says_so(tmp_path: Path, error: BaseException, reason: str) -> None:
    class Failing(EngineGrid):
        def send_and_receive(
            self, messages: Iterable[Message], *, timeout: float | None = None
        ) -> Iterable[Message]:
            sent = list(messages)
            if sent[0].metadata.group_id == "2":
                raise error
            return super().send_and_receive(sent, timeout=timeout)

    run = prepared(tmp_path / "run")
    with pytest.raises(type(error)):
        execute(run, Failing(run.config, run.problem))
    summary = summary_of(tmp_path / "run")
    assert summary["status"] == "failed"
    assert summary["reason"] == reason
    assert summary["rounds_completed"] == 1
    assert summary["clients"] == {"invited": 4, "replied": 4, "rejected": 0}
    assert [entry["round"] for entry in read_metrics(tmp_path / "run")] == [0, 1]
    assert summary["final"]["accuracy"] == read_metrics(tmp_path / "run")[-1]["accuracy"]


def test_a_round_is_on_disk_before_the_next_one_begins(tmp_path: Path) -> None:
    run = prepared(tmp_path / "run")
    seen: list[int] = []
    execute(
        run,
        engine(run),
        [lambda _: seen.append(len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()))],
    )
    assert seen == [1, 2, 3, 4]


def test_numbers_that_json_does_not_have_become_null(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", configuration(tmp_path / "run"), NoExtras())
    folder(report(metrics={"accuracy": 0.5, "loss": math.nan}, seconds={"training": math.inf}))
    folder.finish("completed")
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    entry = json.loads(text)
    assert (entry["accuracy"], entry["loss"], entry["seconds"]["training"]) == (0.5, None, None)
    assert summary_of(tmp_path / "run")["final"] == {"accuracy": 0.5, "loss": None}


def test_counts_add_up_over_the_rounds(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", configuration(tmp_path / "run"), NoExtras())
    rejected = [Rejection(2, "late"), Rejection(3, "late")]
    folder(report(1, invited=[1, 2, 3], accepted=[1], rejected=rejected))
    folder(report(2, invited=[1, 2], accepted=[1, 2]))
    assert folder.finish("completed")["clients"] == {"invited": 5, "replied": 3, "rejected": 2}


def test_a_line_names_clients_and_reasons() -> None:
    entry = round_entry(
        report(
            7,
            invited=[4, 5, 6],
            accepted=[5, 6],
            rejected=[Rejection(4, "error 2: no data")],
            filtered=[6],
            skipped="the rule refused",
            evaluated_by="clients",
            metrics={"loss": 1.5},
        )
    )
    assert entry["round"] == 7
    assert entry["rejected"] == [{"client": 4, "reason": "error 2: no data"}]
    assert entry["filtered"] == [6]
    assert entry["skipped"] == "the rule refused"
    assert entry["evaluated_by"] == "clients"
    assert (entry["invited"], entry["replied"]) == (3, 2)


def test_metrics_of_clients_cannot_hide_the_server_s_own() -> None:
    lies = {"round": 99.0, "rejected": 0.0, "skipped": 1.0, "evaluated_by": 3.0, "loss": 2.0}
    entry = round_entry(report(7, invited=[4], rejected=[Rejection(4, "late")], metrics=lies))
    assert entry["round"] == 7
    assert entry["rejected"] == [{"client": 4, "reason": "late"}]
    assert entry["loss"] == 2.0
    assert "skipped" not in entry
    assert "evaluated_by" not in entry


def test_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == []
    (tmp_path / "metrics.jsonl").write_text('{"round": 0}\n{"round": 1}\n{"rou')
    assert read_metrics(tmp_path) == [{"round": 0}, {"round": 1}]


def test_writing_is_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new" / "file.bin"
    replace_file(path, b"first")
    replace_file(path, b"second")
    assert path.read_bytes() == b"second"
    assert [p.name for p in path.parent.iterdir()] == ["file.bin"]

    def full_disk(descriptor: int) -> None:
        raise OSError(28, f"no space left for {descriptor}")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="no space left"):
        replace_file(path, b"third, which is cut short")
    assert path.read_bytes() == b"second"


def test_a_server_that_died_leaves_a_summary_all_the_same(tmp_path: Path) -> None:
    config = configuration(tmp_path)
    folder = RunFolder(tmp_path, config, NoExtras())
    folder(report(0, metrics={"accuracy": 0.1}, evaluated_by="server"))
    folder(report(1, invited=[1, 2], accepted=[1], rejected=[Rejection(2, "late")]))
    assert read_summary(tmp_path) is None
    write_failure(tmp_path, config, "the server was killed")
    summary = summary_of(tmp_path)
    assert read_summary(tmp_path) == summary
    assert summary["status"] == "failed"
    assert summary["reason"] == "the server was killed"
    assert summary["rounds_completed"] == 1
    assert summary["final"] == {"accuracy": 0.1}
    assert summary["clients"] == {"invited": 2, "replied": 1, "rejected": 1}
    # It does not write over what the server itself said.
    folder.finish("completed")
    write_failure(tmp_path, config, "too late")
    assert summary_of(tmp_path)["status"] == "completed"


def test_a_failed_summary_has_the_fields_of_a_completed_one(tmp_path: Path) -> None:
    run = prepared(tmp_path / "run", num_server_rounds=1)
    completed = execute(run, engine(run))
    (tmp_path / "dead").mkdir()
    write_failure(tmp_path / "dead", run.config, "killed")
    assert summary_of(tmp_path / "dead").keys() - {"reason"} == completed.keys()


def test_a_run_without_output_dir_gets_a_folder_named_by_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = choose_folder(make_config({}))
    assert folder.parent == Path("runs")
    assert folder.name.endswith("-gfedavg-digits")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json"])
def test_a_folder_that_holds_a_run_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("{}\n")
    with pytest.raises(ConfigError, match="already holds a run"):
        choose_folder(configuration(tmp_path))


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="cannot be written"):
            choose_folder(configuration(folder))
    assert choose_folder(configuration(tmp_path / "new" / "run")) == tmp_path / "new" / "run"
    assert not (tmp_path / "new").exists()
