"""What is said of a function of the user's own that raises: which, where, what, and for whom."""

from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from trainer_project import configured, entries, project, trained

from blackthorn.recording.failure_reason import RunFailed
from blackthorn.reporting.prediction import predict
from blackthorn.server_app.run import prepare
from blackthorn.settings.config import ConfigError
from blackthorn.settings.own_code import OwnCodeFailed, guarded_function, in_one_line, place_of

RAISING = """
import sys

def bad_load(client_id):
    return float("n/a" if client_id == 1 else 0), examples(client_id)

def two_lines(client_id):
    raise ValueError("column 'age' is missing\\nrow 3")

def words(client_id):
    return [(x, "yes") for x, y in examples(client_id)]

def dicts(client_id):
    return [{"x": x, "y": y} for x, y in examples(client_id)]

def floats(client_id):
    return TensorDataset(torch.randn(20, 6), torch.randn(20))

def bad_train(model, data, round):
    raise ValueError("bad thing")

def typo(model, data, round):
    nn.functional.cros_entropy(model(data.tensors[0]), data.tensors[1])

def one_fails(model, data, round):
    if round.client_id == 1:
        raise ValueError("only this one")

def leaves(model, data, round):
    sys.exit(3)

def bad_judge(model, data):
    raise ValueError("only one class in y_true")

def bad_build():
    raise ValueError("width must be even")

class Net(nn.Module):
    def __init__(self):
        raise ValueError("no such width")

def bad_loss(outputs, y):
    raise UnicodeDecodeError("utf-8", b"x", 0, 1, "not text")
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = project(tmp_path)
    path.write_text(path.read_text() + RAISING)
    return path


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"data": ":two_lines"},
            r"data = .*\.py:two_lines failed for client 0: ValueError: column 'age' is missing "
            r"row 3 \(line \d+\)",
        ),
        (
            {"data": ":bad_load"},
            r"data = .*\.py:bad_load gives for client 0 float",
        ),
        (
            {"trainer": ":bad_train"},
            r"all 3 clients: .*trainer = .*\.py:bad_train failed: ValueError: bad thing \(line",
        ),
        (
            {"trainer": ":leaves"},
            r"all 3 clients: .*trainer = .*\.py:leaves failed: SystemExit: 3 \(line \d+\)",
        ),
        (
            {"evaluate": ":bad_judge", "test-data": ":test"},
            r"\.py:bad_judge failed: ValueError: only one class in y_true \(line \d+\)",
        ),
        (
            {"model": ":bad_build"},
            r"model = .*\.py:bad_build failed: ValueError: width must be even \(line \d+\)",
        ),
        (
            {"model": ":Net"},
            r"model = .*\.py:Net failed: ValueError: no such width \(line \d+\)",
        ),
        (
            {"loss": ":bad_loss"},
            r"all 3 clients: .*\.py:bad_loss failed: UnicodeDecodeError: .*not text \(line \d+\)",
        ),
        (
            {"data": ":floats"},
            r"model = .*:build on data = .*:floats by loss = cross-entropy failed: RuntimeError",
        ),
        ({"data": ":words"}, "inputs of kind Tensor and targets of kind tuple of 8"),
        ({"data": ":dicts"}, "a batch of what data gives is dict, not a pair"),
    ],
)
def test_what_a_function_raises_is_told_in_one_line_with_its_place(
    options: dict[str, Any], said: str, file: Path, tmp_path: Path
) -> None:
    with pytest.raises((RunFailed, ConfigError, OwnCodeFailed), match=said) as failed:
        trained(file, tmp_path / "run", **options)
    assert "\n" not in str(failed.value)


def test_a_run_ends_after_the_round_in_which_all_clients_fail_alike(
    file: Path, tmp_path: Path
) -> None:
    with pytest.raises(RunFailed, match=r"round 1, all 3 clients: .*AttributeError.*cros_entropy"):
        trained(file, tmp_path / "run", trainer=":typo", num_server_rounds=5)
    assert [entry["round"] for entry in entries(tmp_path / "run")] == [1]


def test_a_run_goes_on_where_one_client_s_code_fails(file: Path, tmp_path: Path) -> None:
    trained(file, tmp_path / "run", trainer=":one_fails")
    assert [len(entry["rejected"]) for entry in entries(tmp_path / "run")] == [1, 1]


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_under_a_claim_a_simulation_shows_nothing_of_what_a_client_s_code_raises(
    file: Path,
    tmp_path: Path,
    processes: int,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    trained(
        file,
        tmp_path / "run",
        trainer=":one_fails",
        algorithm="dp-fedavg",
        clip_norm=1.0,
        noise_multiplier=1.0,
        statistics="local",
        client_processes=processes,
    )
    shown = caplog.text + "".join(capfd.readouterr())
    assert "only this one" not in shown


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ("a.py:f failed: KeyError: 'x' (line 3)", "a.py:f failed: KeyError: 'y' (line 3)", True),
        ("a.py:f failed: KeyError: 'x' (line 3)", "a.py:f failed: KeyError: 'x' (line 4)", False),
        ("a.py:f failed: OSError: x", "a.py:f failed: OSError: y", False),
        (
            "data = a.py:f failed for client 0: OSError: /a (line 2)",
            "data = a.py:f failed for client 1: OSError: /b (line 2)",
            True,
        ),
        ("trainer = a.py:f gave 'w' = tensor([1.])", "trainer = a.py:f gave 'w' = [2.]", True),
        ("trainer = a.py:f gave 'w' = 'x'", "trainer = a.py:f gave 'v' = 'x'", False),
    ],
)
def test_failures_are_alike_that_come_from_the_same_line(one: str, other: str, alike: bool) -> None:
    assert (place_of(one) == place_of(other)) is alike


def test_what_is_none_of_own_code_s_has_no_place() -> None:
    assert place_of("error 2: its examples cannot be used") is None


def test_a_signal_that_comes_while_own_code_runs_ends_the_program() -> None:
    def leave() -> None:
        raise SystemExit(143)

    handler = FunctionType(
        leave.__code__, {"__name__": "blackthorn.launch", "SystemExit": SystemExit}
    )
    with pytest.raises(SystemExit), in_one_line("a.py:f"):
        handler()


@pytest.mark.parametrize("line", ["from beside import width", "from .beside import width"])
def test_a_file_beside_is_told_to_go_into_the_one_that_a_run_takes_along(
    line: str, file: Path, tmp_path: Path
) -> None:
    (tmp_path / "beside.py").write_text("width = 8\n")
    file.write_text(f"{line}\n{file.read_text()}")
    with pytest.raises(ConfigError, match="put what it imports of yours into it, or install") as no:
        prepare(configured(file, tmp_path / "run"))
    assert "(line 1)" in str(no.value) and "\n" not in str(no.value)


def test_an_import_inside_of_a_function_is_told_the_same(file: Path) -> None:
    file.write_text("def late():\n    import beside\n")
    with pytest.raises(OwnCodeFailed, match=r"late failed: ModuleNotFoundError: .*: own code is"):
        guarded_function(f"{file}:late")()


def test_predict_says_how_an_own_model_is_had(file: Path, tmp_path: Path) -> None:
    trained(file, tmp_path / "run", num_server_rounds=1)
    with pytest.raises(ConfigError, match=r"takes the state_dict of safetensors.torch.load_file"):
        predict(tmp_path / "run", torch.ones(2, 6))
