"""What a project's own evaluation may give, and what is told where it gives something else."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from rich.console import Console
from trainer_project import configured, entries, project

from blackthorn.launch import cli
from blackthorn.launch.commands.simulate import simulate
from blackthorn.recording.failure_reason import RunFailed
from blackthorn.recording.run_folder import read_metrics
from blackthorn.settings.config import ConfigError, to_mapping

OWN = """
def single(client_id):
    return examples(client_id)

def the_first_holds_out(client_id):
    return load(client_id) if client_id == 0 else single(client_id)

def a_number(model, data):
    return 0.5

def a_vector(model, data):
    return {"auc": torch.ones(3)}

def broken_evaluate(model, data):
    return 1 / 0

def nothing(model, data):
    return None

def half_broken(model, data):
    return {"accuracy": float("nan"), "auc": 0.5}

def shadowing(model, data):
    return {"round": 7, "auc": 0.5}

def auc(model, data):
    return {"auc": 0.5}

later = iter(range(100))

def at_first_finite(model, data):
    return {"auc": 0.5 if next(later) == 0 else float("nan")}
"""
AT_SERVER = {"test-data": ":test"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = project(tmp_path)
    path.write_text(path.read_text() + OWN)
    return path


class Lines(Console):
    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.lines: list[str] = []

    def print(self, *objects: Any, **options: Any) -> None:
        del options
        self.lines += [line for one in objects for line in str(one).splitlines()]


def ran(file: Path, folder: Path, **options: Any) -> tuple[dict[str, Any], list[str]]:
    """The run's summary, and the terminal's warnings."""
    console = Lines()
    summary = simulate(configured(file, folder, **options), console)
    return summary, [line.strip() for line in console.lines if "warning: " in line]


@pytest.mark.parametrize(
    ("where", "output"), [(AT_SERVER, "best"), (AT_SERVER, "last"), ({}, "best")]
)
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"maximise": "acuracy"}, "maximise = acuracy .*the evaluation gives loss, accuracy"),
        ({"maximise": "accuracy", "evaluate": ":half_broken"}, "maximise = accuracy .*gives"),
    ],
)
def test_a_metric_to_judge_by_that_is_not_there_ends_the_run_at_its_first_evaluation(
    where: dict[str, Any],
    output: str,
    options: dict[str, Any],
    said: str,
    file: Path,
    tmp_path: Path,
) -> None:
    options = {**where, "output-iterate": output, **options}
    with pytest.raises(ConfigError, match=said) as failed:
        ran(file, tmp_path / "run", **options)
    assert "\n" not in str(failed.value)
    assert len(entries(tmp_path / "run")) == 0


def test_best_needs_a_metric_that_says_which_is_best(file: Path, tmp_path: Path) -> None:
    options = {**AT_SERVER, "evaluate": ":auc", "output-iterate": "best"}
    with pytest.raises(ConfigError, match=r"without maximise or minimise .*gives auc"):
        ran(file, tmp_path / "run", **options)


def test_a_metric_that_evaluate_does_not_give_is_named_where_it_gives_none(
    file: Path, tmp_path: Path
) -> None:
    options = {**AT_SERVER, "evaluate": ":nothing", "minimise": "rmse"}
    with pytest.raises(ConfigError, match=r"minimise = rmse .*gives no metrics"):
        ran(file, tmp_path / "run", **options)


def test_best_hands_out_no_round_without_a_finite_figure(file: Path, tmp_path: Path) -> None:
    options = {**AT_SERVER, "evaluate": ":at_first_finite", "maximise": "auc"}
    summary, warned = ran(file, tmp_path / "run", **options, **{"output-iterate": "best"})
    assert summary["output_round"] == 0
    assert warned == ["warning: the metric auc is nan in round 1"]
    assert summary["warnings"] == ["the metric auc is nan in round 1"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"evaluate": ":a_number"}, r"a_number gave float, not a dict of metrics"),
        ({"evaluate": ":a_vector"}, r"gave 'auc' = tensor\(.*: not a number"),
        ({"evaluate": ":broken_evaluate"}, "failed: ZeroDivisionError"),
        ({"evaluate": ":shadowing"}, "gave 'round', which metrics.jsonl has for something else"),
        ({"loss": "squared-error"}, r"gives \(100, 2\) for targets of shape \(100,\)"),
    ],
)
def test_what_is_wrong_with_the_servers_evaluation_is_one_line(
    options: dict[str, Any], said: str, file: Path, tmp_path: Path
) -> None:
    with pytest.raises(RunFailed, match=said) as failed:
        ran(file, tmp_path / "run", **AT_SERVER, **options)
    assert "\n" not in str(failed.value)


@pytest.mark.parametrize(
    ("evaluate", "reason"),
    [
        (":a_number", "not a dict of metrics"),
        (":broken_evaluate", "ZeroDivisionError: division by zero"),
        (":shadowing", "gave 'round'"),
        (":nothing", "the clients give no metrics in common"),
    ],
)
def test_an_evaluation_that_fails_at_all_clients_is_told_with_its_reason(
    evaluate: str, reason: str, file: Path, tmp_path: Path
) -> None:
    summary, warned = ran(file, tmp_path / "run", evaluate=evaluate)
    (told,) = warned
    (repeated,) = summary["warnings"]
    assert reason in told and reason in repeated
    assert all(reason in entry["unevaluated"] for entry in entries(tmp_path / "run"))
    assert summary["status"] == "completed" and summary["final"] == {}


def test_a_metric_that_is_nan_at_the_clients_takes_no_other_with_it(
    file: Path, tmp_path: Path
) -> None:
    summary, warned = ran(file, tmp_path / "run", evaluate=":half_broken")
    assert summary["final"] == {"auc": 0.5}
    assert warned == ["warning: the metric accuracy is nan in round 1"]


def test_where_nobody_holds_anything_out_that_is_told_before_the_start(
    file: Path, tmp_path: Path
) -> None:
    summary, warned = ran(file, tmp_path / "run", data=":single")
    (told,) = warned
    assert "nothing is evaluated: there is no test-data" in told
    assert [told] == [f"warning: {line}" for line in summary["warnings"]]
    assert not any("evaluated_by" in entry for entry in read_metrics(tmp_path / "run"))


CLAIM = {
    **{"algorithm": "dp-fedavg", "clip-norm": 1.0, "noise-multiplier": 5.0, "delta": 0.01},
    **{"participation": "poisson", "sample-rate": 0.5, "model": ":plain"},
}


def test_under_a_claim_nothing_tells_whether_a_client_holds_examples_out(
    file: Path, tmp_path: Path
) -> None:
    """A line before the start said it, the summary, and whether a round 0 is on record."""
    told = []
    for data in (":single", ":the_first_holds_out", ":load"):
        folder = tmp_path / data[1:]
        summary, warned = ran(file, folder, data=data, **CLAIM)
        told.append((summary["warnings"], warned, [one["round"] for one in read_metrics(folder)]))
    assert told[0] == told[1] == told[2]
    assert sum("under a claim no client is asked" in line for line in told[0][0]) == 1


def test_best_without_any_evaluation_says_that_it_is_the_last(file: Path, tmp_path: Path) -> None:
    options = {"evaluate": ":broken_evaluate", "output-iterate": "best"}
    summary, _ = ran(file, tmp_path / "run", **options)
    assert summary["output_round"] == 2
    assert any("no evaluation has a figure" in line for line in summary["warnings"])


def test_the_command_ends_with_2_and_one_line(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configured(file, tmp_path / "run", **AT_SERVER, maximise="acuracy")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(tomli_w.dumps(to_mapping(config)))
    monkeypatch.setattr(sys, "argv", ["blackthorn", "simulate", str(recipe)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: maximise = acuracy is not allowed: the evaluation gives loss")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "failed" and "maximise = acuracy" in summary["reason"]
