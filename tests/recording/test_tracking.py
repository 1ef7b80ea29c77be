"""Trackers are told what metrics.jsonl holds, and a private run's trackers no more than that."""

import os
import struct
import sys
import time
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from digits_runs import PRIVATE, configuration
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from blackthorn.launch.commands.simulate import simulate
from blackthorn.recording import tracking
from blackthorn.recording.folder_place import EVENTS
from blackthorn.recording.mlflow_run import MlflowRun, is_a_name
from blackthorn.recording.round_entries import scalars
from blackthorn.recording.run_folder import read_metrics, read_summary
from blackthorn.recording.tensorboard_events import TensorBoardEvents
from blackthorn.recording.tracking import Guarded, check_tracking, make_trackers
from blackthorn.server_app.run import prepare
from blackthorn.settings.config import ConfigError
from blackthorn.strategies.reports import RoundReport

EXTRA = "needs the extra blackthorn[mlflow]"


def tracked_run(folder: Path, **options: Any) -> dict[str, Any]:
    values = {"tensorboard": True, **options}
    return simulate(configuration(folder, **values), Console(quiet=True))


def events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Every scalar that TensorBoard itself reads from the folder, as (step, value)."""
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    tags = accumulator.Tags()["scalars"]
    return {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in tags}


def test_tensorboard_reads_what_the_lines_say(tmp_path: Path) -> None:
    tracked_run(tmp_path, num_clients=6, attack="nan", num_byzantine=1)
    read = events(tmp_path)
    lines = read_metrics(tmp_path)
    for key in ("accuracy", "loss", "local_lr"):
        assert read[key] == [(line["round"], pytest.approx(line[key])) for line in lines]
    assert len(moments(tmp_path)) == len(lines)
    counts = [(line["round"], len(line["rejected"])) for line in lines]
    assert read["clients/rejected"] == counts
    assert counts[1] == (1, 1)
    training = [(line["round"], line["seconds"]["training"]) for line in lines[1:]]
    assert read["seconds/training"] == [(t, pytest.approx(s)) for t, s in training]
    norms = [sorted(line["instruments"]["norm_gradient"].values()) for line in lines[1:]]
    middle = [(t, pytest.approx(row[2], rel=1e-6)) for t, row in enumerate(norms, start=1)]
    assert read["instruments/norm_gradient"] == middle


def test_a_private_runs_events_hold_nothing_of_the_cohort(tmp_path: Path) -> None:
    tracked_run(tmp_path, **PRIVATE)
    read = events(tmp_path)
    # So much noise may well make the run a failure: that is read from the released models.
    spent = {"epsilon_rdp", "rounds_charged", "rounds_of_earlier_runs"}
    of_the_release = {"noise_norm", "signal_to_noise"}
    expected = {"accuracy", "loss", "local_lr", *spent, *of_the_release}
    assert set(read) - {"catastrophic_failure"} == expected
    summary = read_summary(tmp_path)
    assert summary is not None
    assert read["epsilon_rdp"][-1] == (3, pytest.approx(summary["privacy"]["epsilon"], rel=1e-6))
    said = [line["epsilon_rdp"] for line in read_metrics(tmp_path) if line.get("epsilon_rdp")]
    told = [value for _, value in read["epsilon_rdp"]]
    assert all(value >= line for value, line in zip(told, said, strict=True))
    assert len(moments(tmp_path)) == 1


def die_after_two(report: RoundReport) -> None:
    if report.server_round == 2:
        raise KeyboardInterrupt


def resumed_private_run(folder: Path, **options: Any) -> int:
    """One of which a round took half a lifetime; when it began, in seconds since 1970."""
    began = 1_000_000_000
    config = configuration(folder, **PRIVATE, state_every=1, **options)
    with pytest.raises(KeyboardInterrupt):
        simulate(config, Console(quiet=True), observers=[die_after_two])
    os.utime(folder / "config.toml", (began, began))
    resumed = configuration(folder, **PRIVATE, state_every=1, resume=str(folder), **options)
    assert simulate(resumed, Console(quiet=True))["status"] == "completed"
    return began


def test_a_resumed_private_runs_events_tell_nothing_of_when_it_was_resumed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    began = resumed_private_run(folder, tensorboard=True)
    assert len(list(folder.glob(EVENTS))) == 2
    resumed = folder / f"events.out.tfevents.{began}.000"
    told = [event.wall_time for event in EventFileLoader(str(resumed)).Load()]
    assert told == [began] * len(told)
    assert len(told) > 1
    assert sorted(step for step, _ in events(folder)["accuracy"]) == [0, 1, 2, 3]


@pytest.mark.parametrize("spent", [5.610307850488295, 0.1, 0.5, 0.0, 16_777_217, 1e-60, 3.5e38])
def test_what_was_spent_is_the_next_float32_that_is_not_below(tmp_path: Path, spent: float) -> None:
    entry = {"round": 1, "epsilon_rdp": spent, "sample_epsilon": {"0": spent}}
    tracker = TensorBoardEvents(tmp_path, lambda: 0.0)
    tracker.round({**entry, "rounds_charged": spent, "rounds_of_earlier_runs": spent})
    tracker.finish({})
    read = events(tmp_path)
    assert set(read) == {
        *("epsilon_rdp", "sample_epsilon/0", "rounds_charged", "rounds_of_earlier_runs")
    }
    for ((_, value),) in read.values():
        assert value >= spent
        # The one before it in the order of float32's bits is less than was spent.
        (bits,) = struct.unpack("<i", struct.pack("<f", value))
        assert bits == 0 or struct.unpack("<f", struct.pack("<i", bits - 1))[0] < spent


def test_a_runs_event_files_have_names_of_their_own(tmp_path: Path) -> None:
    for _ in range(2):
        TensorBoardEvents(tmp_path, lambda: 12.7).finish({})
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"events.out.tfevents.0000000013.000", "events.out.tfevents.0000000013.001"}


def moments(folder: Path) -> set[float]:
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return {event.wall_time for event in accumulator.Scalars("accuracy")}


def test_a_round_is_readable_before_the_next_begins(tmp_path: Path) -> None:
    seen: list[int] = []
    simulate(
        configuration(tmp_path, tensorboard=True),
        Console(quiet=True),
        observers=[lambda _: seen.append(len(events(tmp_path).get("accuracy", [])))],
    )
    assert seen == [1, 2, 3, 4]


def test_tensorboard_can_be_switched_off(tmp_path: Path) -> None:
    tracked_run(tmp_path, tensorboard=False)
    assert not list(tmp_path.glob("events.*"))


def test_trackers_get_a_line_s_finite_numbers_lengths_and_medians() -> None:
    line = {
        "round": 3,
        "accuracy": 0.5,
        "loss": None,
        "invited": 4,
        "rejected": [{"client": 1, "reason": "late"}],
        "filtered": [],
        "evaluated_by": "server",
        "seconds": {"training": 2.0, "evaluation": None},
        "instruments": {"norm_gradient": {"0": 1.0, "1": None, "2": 4.0, "3": 2.0}, "tail": None},
    }
    assert scalars(line) == {
        "accuracy": 0.5,
        "clients/invited": 4.0,
        "clients/rejected": 1.0,
        "clients/filtered": 0.0,
        "seconds/training": 2.0,
        "instruments/norm_gradient": 2.0,
    }


class Broken:
    """Fails at the second round, and from then on."""

    def __init__(self) -> None:
        self.calls = 0
        self.ends: list[Mapping[str, Any]] = []

    def round(self, entry: Mapping[str, Any]) -> None:
        self.calls += 1
        if entry["round"] == 2:
            raise ConnectionError("the server\nis gone")

    def finish(self, summary: Mapping[str, Any]) -> None:
        self.ends.append(summary)
        raise ConnectionError("it is gone still")


def test_a_tracker_that_fails_is_told_of_the_end_alone(caplog: pytest.LogCaptureFixture) -> None:
    broken = Broken()
    tracker = Guarded("Somebody", broken)
    for server_round in range(5):
        tracker.round({"round": server_round})
    tracker.finish({"status": "completed"})
    assert (broken.calls, broken.ends) == (3, [{"status": "completed"}])
    assert "Somebody is not told of this run: ConnectionError: the server" in caplog.text
    assert caplog.text.count("Somebody") == 1


def test_a_tracker_that_cannot_start_does_not_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = types.ModuleType("blackthorn.recording.tensorboard_events")
    monkeypatch.setitem(sys.modules, "blackthorn.recording.tensorboard_events", broken)
    assert tracked_run(tmp_path)["status"] == "completed"
    assert "TensorBoard is not told of this run: ImportError" in caplog.text


def test_mlflow_that_is_missing_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configuration(tmp_path / "run", mlflow_uri="sqlite:///somewhere.db")
    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"mlflow-uri = sqlite:///somewhere.db .*pip install"):
        prepare(config)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        *(("val/loss", True), ("F1 of class-2", True), ("a" * 250, True), ("é", True)),
        *(("acc/", False), ("../x", False), ("/x", False), ("a//b", False), ("a/./b", False)),
        *(("val:loss", False), ("50%", False), ("..", False), (".", False), ("a" * 251, False)),
    ],
)
def test_mlflow_is_sent_what_it_takes(name: str, taken: bool) -> None:
    assert is_a_name(name) is taken
    if taken:
        validation = pytest.importorskip("mlflow.utils.validation", reason=EXTRA)
        validation._validate_metric_name(name)


def test_what_mlflow_does_not_take_is_named_once_and_the_run_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("mlflow", reason=EXTRA)
    from mlflow.tracking import MlflowClient

    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    config = configuration(tmp_path / "run", mlflow_uri=uri)
    (tmp_path / "run").mkdir()
    tracker = Guarded("MLflow", MlflowRun(config, "run", time.time))
    for server_round in range(3):
        tracker.round({"round": server_round, "acc/": 0.5, "../x": 1.0, "loss": 2.0})
    tracker.finish({"status": "completed"})
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("blackthorn")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.status, set(run.data.metrics)) == ("FINISHED", {"loss"})
    told = [record.args for record in caplog.records if record.name == "blackthorn"]
    assert told == [("../x",), ("acc/",)]


def test_mlflow_holds_the_run(tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason=EXTRA)
    from mlflow.tracking import MlflowClient

    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    summary = tracked_run(tmp_path / "run", tensorboard=False, mlflow_uri=uri)
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("blackthorn")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert run.data.params["num-clients"] == "4"
    assert run.data.metrics["accuracy"] == pytest.approx(summary["final"]["accuracy"])
    history = client.get_metric_history(run.info.run_id, "loss")
    told = [(line["round"], pytest.approx(line["loss"])) for line in read_metrics(tmp_path / "run")]
    assert [(metric.step, metric.value) for metric in history] == told
    assert len({metric.timestamp for metric in history}) == len(told)


def test_mlflow_is_not_told_how_long_a_private_round_took(tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason=EXTRA)
    from mlflow.tracking import MlflowClient

    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    tracked_run(tmp_path / "run", tensorboard=False, mlflow_uri=uri, **PRIVATE)
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("blackthorn")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run.info.run_id, "loss")
    assert len(history) == 4
    assert len({metric.timestamp for metric in history}) == 1
    # Nor how long the run took: with one round that is the same.
    (epsilon,) = client.get_metric_history(run.info.run_id, "epsilon")
    assert epsilon.timestamp == run.info.end_time == history[0].timestamp


def test_mlflow_is_not_told_when_a_private_run_was_resumed(tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason=EXTRA)
    from mlflow.tracking import MlflowClient

    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    began = 1000 * resumed_private_run(tmp_path / "run", mlflow_uri=uri)
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("blackthorn")
    assert experiment is not None
    resumed, _ = client.search_runs([experiment.experiment_id], order_by=["start_time ASC"])
    assert (resumed.info.start_time, resumed.info.end_time) == (began, began)
    history = client.get_metric_history(resumed.info.run_id, "loss")
    assert {metric.timestamp for metric in history} == {began}


def test_nobody_is_told_where_nobody_asked(tmp_path: Path) -> None:
    assert make_trackers(configuration(tmp_path), tmp_path) == []
    check_tracking(configuration(tmp_path))
