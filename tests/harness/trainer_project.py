"""A project of one's own as a recipe names it: data, model, loss, training and metrics."""

from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import load_file

from blackthorn.launch.commands.simulate import simulate
from blackthorn.recording.run_folder import read_metrics
from blackthorn.settings.config import RunConfig, make_config

PROJECT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def examples(seed, count=40):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=generator)
    return TensorDataset(x, (x[:, 0] + x[:, 1] > 0).long())

def load(client_id):
    return examples(client_id), examples(100 + client_id, 20)

def loader(client_id):
    generator = torch.Generator().manual_seed(client_id)
    return DataLoader(examples(client_id), 16, shuffle=True, generator=generator)

def test():
    return examples(1000, 100)

def build():
    body = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2)
    return nn.Sequential(*body, nn.Linear(8, 2))

def plain():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))

def on_digits(input_shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, num_classes))

def steps(model, data, round, optimizer):
    model.train()
    for _ in range(round.local_steps):
        rows = round.generator.choice(len(data), round.batch_size, replace=False)
        x, y = (part[torch.from_numpy(rows)] for part in data.tensors)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y, reduction="none").mean()
        loss.backward()
        optimizer.step()

def sgd(model, data, round):
    steps(model, data, round, torch.optim.SGD(model.parameters(), lr=round.local_lr))

def wrapped(model, data, round):
    steps(model, data, round, round.wrap(torch.optim.SGD(model.parameters(), lr=round.local_lr)))

def of_the_round(model, data, round):
    steps(model, data, round, round.optimizer(model))

def by_hand(model, data, round):
    # Without torch.optim, which takes seconds to import.
    for x, y in round.batches(data):
        model.zero_grad()
        round.loss(model(x), y).backward()
        with torch.no_grad():
            for one in model.parameters():
                one -= round.local_lr * one.grad

def broken(model, data, round):
    raise RuntimeError("no such thing")

def no_metrics(model, data, round):
    return {"loss": "much"}

def tensors(client_id):
    return torch.ones(3, 6), torch.ones(3)

def judge(model, data):
    assert not model.training
    return {"loss": 1.0, "rmse": 2.0 + model[4].bias[0]}
"""


def project(folder: Path) -> Path:
    """The file, written down."""
    path = folder / "project.py"
    path.write_text(PROJECT)
    return path


def configured(file: Path, folder: Path, **options: Any) -> RunConfig:
    """Three clients, two rounds of four steps; of `options` those that name the file's functions
    by ":NAME" get the file before it."""
    values = {
        "task": "own-project",
        "data": ":load",
        "model": ":build",
        "num-clients": 3,
        "num-server-rounds": 2,
        "local-steps": 4,
        "batch-size": 8,
        "local-lr": 0.25,
        "report": False,
        "tensorboard": False,
        "output-dir": str(folder),
        **{key.replace("_", "-"): value for key, value in options.items()},
    }
    named = {
        key: f"{file}{value}" if isinstance(value, str) and value.startswith(":") else value
        for key, value in values.items()
    }
    return make_config(named)


def digits(**options: Any) -> dict[str, Any]:
    """The same on the digits, whose clients the batched engine can train as well."""
    return {"task": "digits", "data": "", "model": ":on_digits", **options}


def trained(file: Path, folder: Path, **options: Any) -> dict[str, torch.Tensor]:
    """The final model of such a run."""
    simulate(configured(file, folder, **options), Console(quiet=True))
    return load_file(folder / "checkpoints" / "final.safetensors")


def entries(folder: Path) -> list[dict[str, Any]]:
    """The rounds of a run."""
    return [entry for entry in read_metrics(folder) if entry["round"]]
