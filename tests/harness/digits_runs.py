"""Small runs on the digits in this process."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from safetensors.numpy import load_file

from blackthorn.launch.commands.simulate import simulate
from blackthorn.recording.run_folder import read_metrics, read_summary
from blackthorn.settings.config import RunConfig, make_config
from blackthorn.strategies.options import Observer

# Client-level privacy: C = 1, z = 2, a client in every second round.
PRIVATE: dict[str, Any] = {
    "algorithm": "dp-fedavg",
    "clip_norm": 1.0,
    "noise_multiplier": 2.0,
    "participation": "poisson",
    "sample_rate": 0.5,
    "instruments": False,
}
# Privacy of examples: DP-SGD in batches of 10 of 50.
SAMPLE: dict[str, Any] = {
    "local_dp_sgd": True,
    "dp_sgd_sample_rate": 0.2,
    "dp_sgd_noise_multiplier": 1.0,
    "batch_size": 10,
    "instruments": False,
}
# A private run that leaves all that a run can leave.
EVERYTHING: dict[str, Any] = {
    **PRIVATE,
    "state_every": 1,
    "checkpoint_every": 1,
    "report": True,
    "tensorboard": True,
}


def configuration(folder: Path, **options: Any) -> RunConfig:
    """Four clients of 50 examples each, logistic regression, full batches: no chance in it."""
    values = {
        "task": "digits",
        "model": "logistic",
        "partition": "two-majority",
        "examples-per-client": 50,
        "num-clients": 4,
        "num-server-rounds": 3,
        "local-steps": 4,
        "batch-size": 0,
        "instruments": True,
        "report": False,
        "tensorboard": False,
        "output-dir": str(folder),
        **{key.replace("_", "-"): value for key, value in options.items()},
    }
    return make_config(values)


def run(folder: Path, observers: Sequence[Observer] = (), **options: Any) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl from round 1 on."""
    simulate(configuration(folder, **options), Console(quiet=True), observers=observers)
    return read_metrics(folder)[1:]


def summary_of(folder: Path) -> dict[str, Any]:
    """The summary of a run that has left one."""
    summary = read_summary(folder)
    assert summary is not None
    return summary


def private_run(folder: Path, console: Console | None = None, **options: Any) -> dict[str, Any]:
    """The summary of a private run."""
    config = configuration(folder, **{**PRIVATE, **options})
    return simulate(config, console or Console(quiet=True))


def model(folder: Path, name: str = "final") -> np.ndarray:
    """A checkpoint as one vector, weights before biases."""
    state = load_file(folder / "checkpoints" / f"{name}.safetensors")
    return np.concatenate([state[key].ravel() for key in sorted(state, reverse=True)])
