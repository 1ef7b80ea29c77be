"""`blackthorn demo`: the table, then the recipe as real processes, and what it says."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from network import require_namespaces
from process_watch import until, working_in
from rich.console import Console
from safetensors.numpy import load_file, save_file

from blackthorn.launch.cli import main
from blackthorn.launch.commands import cluster as cluster_command
from blackthorn.launch.commands.demo import CLIENTS, RULES, compare_rules
from blackthorn.launch.commands.recipes import recipe_config
from blackthorn.launch.federation.flower_cluster import DeploymentError
from blackthorn.launch.processes import process_groups
from blackthorn.recording.folder_place import set_aside
from blackthorn.recording.run_folder import read_metrics
from blackthorn.reporting.comparison import apart

COMMAND = (sys.executable, "-m", "blackthorn", "demo")


def final(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "checkpoints" / "final.safetensors")


def test_the_demo_shows_rage_alive_and_the_mean_dead(repository: Path, tmp_path: Path) -> None:
    recipe = repository / "recipes" / "demo.toml"
    rules = {rule: recipe_config(recipe, (), {"aggregator": rule}) for rule in RULES}
    console = Console(record=True, quiet=False, file=(tmp_path / "said").open("w"))
    summaries = compare_rules(rules, tmp_path, console)
    assert "clients filtered by rage" in console.export_text()
    assert summaries["rage"]["final"]["accuracy"] > 0.85
    assert summaries["mean"]["final"]["accuracy"] < 0.5
    assert (tmp_path / "accuracy.png").stat().st_size > 1000
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "completed"
    attackers = {16, 17, 18, 19}
    assert all(attackers <= set(entry["filtered"]) for entry in read_metrics(tmp_path / "rage")[1:])


def test_a_second_demo_keeps_the_first(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "mine.txt").write_text("precious")
    set_aside(tmp_path / "demo")
    kept = list(tmp_path.glob("demo-until-*/mine.txt"))
    assert [path.read_text() for path in kept] == ["precious"]
    assert not (tmp_path / "demo").exists()
    set_aside(tmp_path / "demo")


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ('algorithm = "nonsense"', "algorithm = 'nonsense' is not allowed"),
        # What no cluster can do is known before the table, which takes none, is made.
        ('num-byzantine = 2\nattack = "nan"\nbyzantine-set = "redrawn"', "byzantine-set = redrawn"),
    ],
)
def test_what_is_wrong_is_one_line_before_anything_begins(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    recipe: str,
    expected: str,
) -> None:
    (tmp_path / "r.toml").write_text(recipe)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["blackthorn", "demo", "--recipe", "r.toml"])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    assert (ended.value.code, said.out) == (2, "")
    (line,) = said.err.strip().splitlines()
    assert line.startswith(f"error: {expected}")
    assert not (tmp_path / "runs").exists()


def test_a_machine_without_processes_is_told_in_one_line(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(process_groups.subprocess, "Popen", refuse)
    options = {"num-clients": CLIENTS, "num-byzantine": 1, "output-dir": str(tmp_path / "run")}
    config = recipe_config(repository / "recipes" / "demo.toml", (), options)
    expected = r"no process can be started on this machine: Resource temporarily unavailable"
    with pytest.raises(cluster_command.RunFailed, match=f"^{expected}$"):
        cluster_command.cluster(config, Console(quiet=True))


def test_where_programs_cannot_be_forked_it_says_so_and_starts_them_anew(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*_: Any, warm: bool, **__: Any) -> None:
        raise DeploymentError(f"warm = {warm}")

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(cluster_command, "FlowerCluster", started)
    config = recipe_config(
        repository / "recipes" / "demo.toml", (), {"output-dir": str(tmp_path / "run")}
    )
    console = Console(record=True, file=(tmp_path / "said").open("w"))
    with pytest.raises(cluster_command.RunFailed, match="warm = False"):
        cluster_command.cluster(config, console)
    assert "on darwin every message starts a new Python" in console.export_text()


def test_models_are_apart_by_their_largest_difference(tmp_path: Path) -> None:
    def model(name: str, **entries: np.ndarray) -> Path:
        (tmp_path / name / "checkpoints").mkdir(parents=True)
        save_file(entries, tmp_path / name / "checkpoints" / "final.safetensors")
        return tmp_path / name

    w, b = np.array([[1.0, -4.0]], np.float32), np.array([2.0], np.float32)
    one = model("one", w=w, b=b)
    assert apart(one, model("same", w=w.copy(), b=b.copy())) == 0.0
    assert apart(model("other", w=w, b=b + 0.5), one) == 0.125
    assert apart(model("nan", w=w, b=b * np.nan), one) == float("inf")
    assert apart(model("transposed", w=w.T.copy(), b=b), one) == float("inf")
    assert apart(model("double", w=w.astype(np.float64), b=b), one) == float("inf")
    assert apart(model("fewer", w=w), one) == float("inf")


@pytest.mark.deployment
def test_real_processes_end_with_the_model_of_the_simulation(tmp_path: Path) -> None:
    done = subprocess.run(COMMAND, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs" / "demo"
    federation, simulation = folder / "federation", folder / "simulation"
    rounds = re.findall(r"^round +(\d+)/15 .* replies 5/5  filtered 1", done.stdout, re.MULTILINE)
    assert [int(number) for number in rounds] == list(range(1, 16))
    assert {(e["replied"], *e["filtered"]) for e in read_metrics(federation)[1:]} == {(5, 4)}
    for run in (federation, simulation):
        assert f"{run.relative_to(tmp_path)}/report.html" in done.stdout
        assert (run / "report.html").stat().st_size > 1000
    one, other = final(federation), final(simulation)
    distance = max(np.abs(one[name] - other[name]).max() for name in one)
    relative = distance / max(np.abs(array).max() for array in other.values())
    assert relative < 1e-4
    said = re.search(r"final models are the same.*?(bit for bit|\d\.\de-\d+)", done.stdout)
    assert said is not None, done.stdout
    assert said[1] == ("bit for bit" if distance == 0 else f"{relative:.1e}")
    assert not working_in(federation)


@pytest.mark.deployment
def test_ctrl_c_leaves_no_process(tmp_path: Path) -> None:
    demo = subprocess.Popen(
        COMMAND, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    federation = tmp_path / "runs" / "demo" / "federation"
    until(lambda: len(working_in(federation)) > 8 or demo.poll() is not None, 300.0)
    assert demo.poll() is None
    demo.send_signal(signal.SIGINT)
    _, errors = demo.communicate(timeout=120)
    assert (demo.returncode, errors.strip()) == (130, "interrupted")
    assert not working_in(federation)
    assert json.loads((federation / "summary.json").read_text())["status"] == "failed"


@pytest.mark.deployment
def test_without_a_loopback_interface_one_line_says_so(tmp_path: Path) -> None:
    require_namespaces()
    alone = ["unshare", "--net", *COMMAND, "--quiet"]
    done = subprocess.run(alone, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("failed: no ports are to be had at 127.0.0.1: ")
    assert not working_in(tmp_path / "runs" / "demo" / "federation")
