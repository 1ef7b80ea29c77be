"""The posterior store: bounded, fair, and whole whenever the process ends."""

import dataclasses
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from blackthorn.recording import posterior_store
from blackthorn.recording.posterior_store import (
    FOLDER,
    PosteriorRecorder,
    PosteriorStore,
    noisier_rounds,
    read_samples,
    sample_rounds,
)
from blackthorn.settings.config import make_config
from blackthorn.strategies import durable_file
from blackthorn.strategies.reports import RoundReport
from blackthorn.tasks.problem import load_problem


def store_in(run: Path, **options: Any) -> PosteriorStore:
    given = {"capacity": 5, "keep": "last", "seed": 3, **options}
    return PosteriorStore(run / FOLDER, given["capacity"], given["keep"], given["seed"])


def state(server_round: int) -> dict[str, np.ndarray]:
    return {"weight": np.full((2, 3), server_round, dtype=np.float32)}


def assert_whole(run: Path) -> list[int]:
    """Every sample is complete and of the round that it says; returns the rounds."""
    samples = list(read_samples(run))
    for sample in samples:
        np.testing.assert_array_equal(sample.state["weight"], state(sample.server_round)["weight"])
    rounds = [sample.server_round for sample in samples]
    assert rounds == sample_rounds(run) == sorted(set(rounds))
    return rounds


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    for server_round in range(1, 13):
        assert store.offer(server_round, state(server_round))
    assert assert_whole(tmp_path) == [8, 9, 10, 11, 12]
    assert len(list((tmp_path / FOLDER).glob("*.safetensors"))) == 5


def test_the_reservoir_is_a_uniform_choice(tmp_path: Path) -> None:
    """Every one of 12 samples is among 4 with probability 1/3."""
    kept = np.zeros(12)
    trials = 600
    for seed in range(trials):
        store = store_in(tmp_path / str(seed), capacity=4, keep="reservoir", seed=seed)
        slots: dict[int, int] = {}
        for number in range(12):
            slot = store._slot(number)
            if slot is not None:
                slots[slot] = number
        kept[list(slots.values())] += 1
    error = np.sqrt(trials * (1 / 3) * (2 / 3))
    assert np.all(np.abs(kept - trials / 3) < 4 * error)


@pytest.mark.parametrize("keep", ["last", "reservoir"])
@pytest.mark.parametrize("pause", [2, 7, 11])
def test_a_store_that_is_opened_again_goes_on_as_if_never_closed(
    tmp_path: Path, keep: str, pause: int
) -> None:
    whole = store_in(tmp_path / "whole", keep=keep)
    for server_round in range(20):
        whole.offer(server_round, state(server_round))
    parts = store_in(tmp_path / "parts", keep=keep)
    for server_round in range(pause):
        parts.offer(server_round, state(server_round))
    parts = store_in(tmp_path / "parts", keep=keep)
    assert parts.offered == pause
    for server_round in range(pause - 2, 20):  # the last two once more: they are known
        parts.offer(server_round, state(server_round))
    assert assert_whole(tmp_path / "parts") == assert_whole(tmp_path / "whole")


@pytest.mark.parametrize("moment", ["before the sample", "half the sample", "before the count"])
def test_an_end_at_any_moment_leaves_whole_samples(
    tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_in(tmp_path)
    for server_round in range(7):
        store.offer(server_round, state(server_round))

    def power_cut(path: Path, data: bytes) -> None:
        if moment == "before the count" and path.name.startswith("slot"):
            durable_file.replace_file(path, data)
            return
        if moment == "half the sample":
            path.with_name(f".{path.name}.part").write_bytes(data[: len(data) // 2])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(posterior_store, "replace_file", power_cut)
        with pytest.raises(KeyboardInterrupt):
            store.offer(7, state(7))
    there = [2, 3, 4, 5, 6] if moment != "before the count" else [3, 4, 5, 6, 7]
    assert assert_whole(tmp_path) == there
    again = store_in(tmp_path)
    assert again.offered == (8 if moment == "before the count" else 7)
    again.offer(7, state(7))
    again.offer(8, state(8))
    assert assert_whole(tmp_path) == [4, 5, 6, 7, 8]


WRITER = """
import sys
from pathlib import Path
import numpy as np
from blackthorn.recording.posterior_store import PosteriorStore
store = PosteriorStore(Path(sys.argv[1]), 5, "last", 3)
for number in range(100_000):
    store.offer(number, {"weight": np.full((2, 3), number, dtype=np.float32)})
    print(number, flush=True)
"""


def test_a_killed_process_leaves_a_whole_store(tmp_path: Path, repository: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path / FOLDER)],
        stdout=subprocess.PIPE,
        cwd=repository,
    )
    assert process.stdout is not None
    last = 0
    while last < 23:
        last = int(process.stdout.readline())
    process.send_signal(signal.SIGKILL)
    process.wait()
    rounds = assert_whole(tmp_path)
    assert len(rounds) == 5
    assert rounds[-1] >= 23
    store = store_in(tmp_path)
    assert store.offered == rounds[-1] + 1


def test_other_settings_or_files_than_the_store_s_are_refused(tmp_path: Path) -> None:
    store_in(tmp_path).offer(1, state(1))
    with pytest.raises(ValueError, match="holds samples kept with capacity = 5: 6"):
        store_in(tmp_path, capacity=6)
    with pytest.raises(ValueError, match="capacity = 0"):
        store_in(tmp_path / "new", capacity=0)
    with pytest.raises(ValueError, match="keep = 'best'"):
        store_in(tmp_path / "new", keep="best")
    (tmp_path / FOLDER / "slot-00003.safetensors").write_bytes(b"not a sample")
    with pytest.raises(ValueError, match=r"slot-00003\.safetensors is not a posterior sample"):
        list(read_samples(tmp_path))


def test_only_thinned_rounds_after_burn_in_that_moved_are_kept(tmp_path: Path) -> None:
    config = make_config(
        {
            "algorithm": "fa-ld",
            "task": "bayes-linear",
            "problem-dimension": 2,
            "num-server-rounds": 20,
            "burn-in": 5,
            "thinning": 3,
        }
    )
    problem = load_problem(config)
    recorder = PosteriorRecorder(config, problem, tmp_path)
    for server_round in range(21):
        report = RoundReport(
            server_round,
            invited=[0, 1],
            accepted=[0] if server_round in (8, 20) else [0, 1],
            rejected=[],
            local_lr=0.1,
            model=torch.full((2,), float(server_round)),
            skipped="too few" if server_round == 11 else None,
        )
        recorder(report)
    samples = list(read_samples(tmp_path))
    assert [sample.server_round for sample in samples] == [8, 14, 17, 20]
    assert noisier_rounds(tmp_path) == [8, 20]
    for sample in samples:
        assert sample.state["x"].tolist() == [sample.server_round] * 2
    recorder(dataclasses.replace(report, server_round=23, confidential=True))
    with safe_open(tmp_path / FOLDER / "slot-00004.safetensors", framework="numpy") as kept:
        assert kept.metadata() == {"round": "23", "number": "4"}
