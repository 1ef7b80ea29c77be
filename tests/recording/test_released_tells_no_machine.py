"""What may be released of a run with a claim says nothing of the machine that ran it, and is still
a recipe by which the run goes on."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from digits_runs import PRIVATE, SAMPLE, configuration, summary_of
from rich.console import Console

from blackthorn.launch.commands.recipes import recipe_config
from blackthorn.launch.commands.simulate import simulate
from blackthorn.launch.federation.app_bundle import bundle_own_code
from blackthorn.recording.folder_place import RELEASED
from blackthorn.recording.mlflow_run import MlflowRun
from blackthorn.recording.state_files import read_saved
from blackthorn.settings.config import (
    ConfigError,
    make_config,
    read_recipe,
    to_mapping,
)
from blackthorn.settings.key_facts import place_keys
from blackthorn.settings.own_code import OWN_CODE_KEYS
from blackthorn.strategies.reports import RoundReport

ROUNDS = 4
_MODEL = """
import torch
def affine(input_shape, num_classes):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
"""


def _private(folder: Path, **options: Any) -> Any:
    own = folder.parent / "my_model.py"
    own.write_text(_MODEL)
    return configuration(
        folder,
        model=f"{own}:affine",
        data_dir=str(folder.parent / "data"),
        num_server_rounds=ROUNDS,
        state_every=1,
        **options,
    )


def _interrupt_after_two(report: RoundReport) -> None:
    if report.server_round == 2:
        raise KeyboardInterrupt


def _released(folder: Path) -> list[Path]:
    paths = [path for pattern in RELEASED for path in folder.glob(pattern)]
    return [file for path in paths for file in (path, *path.glob("*")) if file.is_file()]


@pytest.mark.parametrize("claim", [PRIVATE, SAMPLE], ids=["clients", "examples"])
@pytest.mark.parametrize("failed", [False, True])
def test_no_released_file_names_a_folder_of_the_machine(
    tmp_path: Path, claim: dict[str, Any], failed: bool
) -> None:
    ledger = {"ledger": str(tmp_path / "kept" / "ledger.json")} if claim is PRIVATE else {}
    config = _private(tmp_path / "run", **claim, **ledger, report=True, tensorboard=True)
    if failed:
        with pytest.raises(KeyboardInterrupt):
            simulate(config, Console(quiet=True), observers=[_interrupt_after_two])
    else:
        simulate(config, Console(quiet=True))
    names = {path.name for path in _released(tmp_path / "run")}
    assert {"config.toml", "summary.json", "report.html", "metrics.jsonl"} <= names
    for path in _released(tmp_path / "run"):
        assert str(tmp_path).encode() not in path.read_bytes(), path
    assert not set(place_keys()) & set(read_recipe(tmp_path / "run" / "config.toml"))


def test_the_released_recipe_resumes_the_run_in_its_own_ledger(tmp_path: Path) -> None:
    ledger = tmp_path / "kept" / "ledger.json"
    config = _private(tmp_path / "run", **PRIVATE, ledger=str(ledger))
    with pytest.raises(KeyboardInterrupt):
        simulate(config, Console(quiet=True), observers=[_interrupt_after_two])
    (tmp_path / "my_model.py").unlink()
    resume = [f"resume={tmp_path / 'run'}"]
    simulate(recipe_config(tmp_path / "run" / "config.toml", resume), Console(quiet=True))
    privacy = summary_of(tmp_path / "run")["privacy"]
    assert privacy["rounds_charged"] == ROUNDS
    assert privacy["rounds_of_earlier_runs"] == 0
    assert not (tmp_path / "run" / "ledger.json").exists()
    again = recipe_config(tmp_path / "run" / "config.toml", [f"output-dir={tmp_path / 'again'}"])
    simulate(again, Console(quiet=True))
    assert summary_of(tmp_path / "again")["privacy"]["rounds_charged"] == ROUNDS


def test_a_run_is_not_resumed_with_other_code_under_the_same_name(tmp_path: Path) -> None:
    config = _private(tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        simulate(config, Console(quiet=True), observers=[_interrupt_after_two])
    other = tmp_path / "elsewhere"
    other.mkdir()
    again = {"resume": str(tmp_path / "run")}
    for place in (tmp_path, other):
        (place / "my_model.py").write_text(_MODEL.replace("64, 10", "64, 10, bias=False"))
        own = config.model_copy(update={"model": f"{place / 'my_model.py'}:affine", **again})
        with pytest.raises(ConfigError, match="with the code of which the folder has a copy"):
            simulate(own, Console(quiet=True))
    third = tmp_path / "third"
    third.mkdir()
    shutil.copy(tmp_path / "run" / "own_code" / "model_my_model.py", third / "my_model.py")
    moved = config.model_copy(update={"model": f"{third / 'my_model.py'}:affine", **again})
    simulate(moved, Console(quiet=True))
    assert summary_of(tmp_path / "run")["status"] == "completed"
    assert read_saved(tmp_path / "run") is None


def test_a_cluster_with_own_code_goes_on_though_its_bundle_named_the_file_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ServerApp had the bundle's name; who resumes names the file itself."""
    config, bundle = _private(tmp_path / "run"), tmp_path / "bundle"
    bundle.mkdir()
    bundled = make_config(bundle_own_code(bundle, to_mapping(config), OWN_CODE_KEYS))
    assert bundled.model == "own_code/model_my_model.py:affine"
    with monkeypatch.context() as on_the_server, pytest.raises(KeyboardInterrupt):
        on_the_server.syspath_prepend(bundle)
        simulate(bundled, Console(quiet=True), observers=[_interrupt_after_two])
    shutil.rmtree(bundle)
    simulate(config.model_copy(update={"resume": str(tmp_path / "run")}), Console(quiet=True))
    assert summary_of(tmp_path / "run")["status"] == "completed"


def test_mlflow_is_told_no_place_under_a_claim(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow.tracking")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    MlflowRun(_private(tmp_path / "run", **PRIVATE, mlflow_uri=uri), "run", lambda: 1.0)
    client = mlflow.MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("blackthorn").experiment_id])
    assert run.data.params["model"] == "own_code/model_my_model.py:affine"
    assert not any(str(tmp_path) in value for value in run.data.params.values())
