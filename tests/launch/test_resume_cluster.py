"""`blackthorn cluster` killed with SIGKILL in mid-run, and the same run resumed."""

import os
import signal
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from charged_ledgers import rounds_in
from process_watch import having_open, running, until
from real_deployment import Bench, bench
from rich.console import Console
from safetensors.numpy import load_file
from shared_cluster import Run, on_every_look, shared_cluster

from blackthorn.launch.commands.cluster import cluster
from blackthorn.launch.commands.recipes import recipe_config
from blackthorn.recording.failure_reason import RunFailed
from blackthorn.recording.run_folder import METRICS, read_metrics, read_summary
from blackthorn.settings.config import RunConfig

pytestmark = pytest.mark.deployment

CLIENTS, ROUNDS, KILLED = 3, 6, 2

PLAIN = {
    "algorithm": "rage",
    "num-corrupt": 0,
    "corrupt-fraction": 0.0,
    "server-momentum": 0.9,
    "output-iterate": "best",
}
NOISED = {
    "algorithm": "dp-fedavg",
    "corrupt-fraction": 0.0,
    "clip-norm": 2.0,
    "noise-multiplier": 0.5,
    "participation": "poisson",
    "sample-rate": 0.7,
    "server-momentum": 0.5,
}


@pytest.fixture(scope="module")
def run_in_the_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    with shared_cluster(CLIENTS, tmp_path_factory.mktemp("cluster")) as run:
        yield run


def configuration(repository: Path, folder: Path, options: dict[str, Any]) -> RunConfig:
    values = {
        "num-clients": CLIENTS,
        "num-byzantine": 0,
        "attack": "none",
        "num-server-rounds": ROUNDS,
        "local-steps": 200,
        "round-timeout": 60.0,
        "output-dir": str(folder),
        "report": False,
        **options,
    }
    return recipe_config(repository / "recipes" / "demo.toml", (), values)


def has_finished(folder: Path, server_round: int) -> bool:
    entries = read_metrics(folder)
    return bool(entries) and entries[-1]["round"] >= server_round


def kill_the_server_app(
    monkeypatch: pytest.MonkeyPatch, run: Run, config: RunConfig, folder: Path
) -> None:
    """Run until round KILLED is on record, then SIGKILL whoever writes it down."""
    killed: list[int] = []

    def act(flower: object) -> None:
        del flower
        if not killed and has_finished(folder, KILLED):
            killed.extend(pid for pid in having_open(folder / METRICS) if pid != os.getpid())
            for pid in killed:
                os.kill(pid, signal.SIGKILL)

    with monkeypatch.context() as patch:
        on_every_look(patch, act)
        with pytest.raises(RunFailed, match="the ServerApp's process has died"):
            run(config)
    assert killed
    summary = read_summary(folder)
    assert summary is not None
    assert summary["status"] == "failed"
    assert KILLED <= summary["rounds_completed"] < ROUNDS


def resume(run: Run, config: RunConfig, folder: Path) -> dict[str, Any]:
    return run(config.model_copy(update={"resume": str(folder)}))


def same_model(one: Path, other: Path) -> None:
    states = [load_file(f / "checkpoints" / "final.safetensors") for f in (one, other)]
    assert states[0].keys() == states[1].keys()
    for key, value in states[0].items():
        np.testing.assert_array_equal(value, states[1][key], strict=True)


def numbers(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in e.items() if k != "seconds"} for e in read_metrics(folder)]


def test_a_killed_server_app_ends_bit_for_bit_where_it_would_have(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_in_the_cluster: Run
) -> None:
    options = {**NOISED, "insecure-seeded-noise": True}
    whole, dead = tmp_path / "whole", tmp_path / "dead"
    run_in_the_cluster(configuration(repository, whole, options))
    config = configuration(repository, dead, options)
    kill_the_server_app(monkeypatch, run_in_the_cluster, config, dead)
    summary = resume(run_in_the_cluster, config, dead)
    assert summary["status"] == "completed"
    assert summary["resumed_after"][0] >= KILLED
    same_model(whole, dead)
    assert numbers(whole) == numbers(dead)


def test_a_private_run_goes_on_spending_in_its_ledger(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_in_the_cluster: Run
) -> None:
    """A round that was charged and lost is charged once more: never less than was released."""
    config = configuration(repository, tmp_path, NOISED)
    kill_the_server_app(monkeypatch, run_in_the_cluster, config, tmp_path)
    before = rounds_in(tmp_path / "ledger.json")
    finished = read_metrics(tmp_path)[-1]["round"]
    assert before in (finished, finished + 1)
    summary = resume(run_in_the_cluster, config, tmp_path)
    [after] = summary["resumed_after"]
    assert rounds_in(tmp_path / "ledger.json") == before + ROUNDS - after >= ROUNDS
    assert summary["privacy"]["rounds_charged"] == rounds_in(tmp_path / "ledger.json")
    assert summary["privacy"]["rounds_of_earlier_runs"] == 0
    assert [entry["round"] for entry in read_metrics(tmp_path)] == list(range(ROUNDS + 1))


def test_after_everything_was_killed_the_command_goes_on_to_the_same_end(
    repository: Path, tmp_path: Path, run_in_the_cluster: Run
) -> None:
    whole, dead = tmp_path / "whole", tmp_path / "dead"
    run_in_the_cluster(configuration(repository, whole, PLAIN))
    settings = [
        f"--set={key}={value}"
        for key, value in {
            **{"num-clients": CLIENTS, "num-byzantine": 0, "attack": "none"},
            **{"num-server-rounds": ROUNDS, "local-steps": 200, "report": "false", **PLAIN},
        }.items()
    ]
    command = ["cluster", repository / "recipes" / "demo.toml", *settings]
    with bench(tmp_path) as commands:
        kill_the_command(commands, command, dead)
        done = commands.call(*command, "--set", f"resume={dead}")
        assert done.returncode == 0, done.stderr
        assert "the run goes on after round" in done.stdout
        done_again = commands.call(*command, "--set", f"resume={dead}")
        assert done_again.returncode == 2
        assert done_again.stderr.count("\n") == 1
        assert f"the run is completed ({ROUNDS} rounds)" in done_again.stderr
    assert (dead / "logs-1" / "superlink.log").exists()
    assert (dead / "logs" / "superlink.log").exists()
    # They tell who answered, and when.
    assert {stat.S_IMODE((dead / name).stat().st_mode) for name in ("logs", "logs-1")} == {0o700}
    same_model(whole, dead)
    assert numbers(whole) == numbers(dead)


def kill_the_command(commands: Bench, command: list[Any], folder: Path) -> None:
    """SIGKILL to the command and to the ServerApp, once round KILLED is on record."""
    started = commands.start("killed", *command, "--output-dir", folder)
    until(lambda: has_finished(folder, KILLED) or started.process.poll() is not None, 120.0)
    pids = having_open(folder / METRICS)
    started.process.kill()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    started.process.wait(30)
    until(lambda: not any(running(pid) for pid in pids), 30.0)
    assert not has_finished(folder, ROUNDS)


def test_over_grpc_the_slowest_is_surplus(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One client never answers in time: the rounds end when the others have, and name it."""
    monkeypatch.setenv("BLACKTHORN_ATTACK_SECONDS", "600")
    slowest = CLIENTS - 1
    options = {
        "algorithm": "gfedavg",
        "corrupt-fraction": 0.0,
        "num-byzantine": 1,
        "attack": "slow",
        "participation": "fixed",
        "clients-per-round": CLIENTS - 1,
        "oversample": CLIENTS / (CLIENTS - 1),
        "num-server-rounds": 2,
        "round-timeout": 120.0,
    }
    began = time.monotonic()
    summary = cluster(configuration(repository, tmp_path, options), Console(quiet=True))
    assert time.monotonic() - began < 120.0
    for entry in read_metrics(tmp_path)[1:]:
        assert entry["surplus"] == [slowest]
        assert (entry["invited"], entry["replied"], entry["rejected"]) == (3, 2, [])
    assert summary["clients"]["surplus"] == 2
