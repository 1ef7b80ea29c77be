"""Under a central claim an own model that draws, or remembers, in `forward` moves by one client's
being there no other client's update."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict

from blackthorn.client_app.clientapp import app
from blackthorn.server_app.build import build_strategy
from blackthorn.settings.config import RunConfig, make_config, to_mapping
from blackthorn.simulation.engine import EngineGrid
from blackthorn.strategies import RoundContext
from blackthorn.tasks.problem import load_problem

CLIENTS = 4
# What `forward` does to its input before a linear layer.
KINDS = {
    "dropout": "torch.nn.functional.dropout(x, 0.5)",
    "NumPy": "x * float(np.random.random())",
    "random": "x * random.random()",
    "a buffer": "x * self.calls.add_(1)",
    "an attribute": "x * self.count()",
    "a generator of its own": "x * torch.rand(x.shape, generator=self.generator)",
}
CODE = """
import random
import numpy as np
import torch

class Own(torch.nn.Module):
    {batching}

    def __init__(self):
        super().__init__()
        self.output = torch.nn.Linear(64, 10)
        self.register_buffer("calls", torch.ones(1))
        self.seen = []
        self.generator = torch.Generator().manual_seed(4)

    def count(self):
        self.seen.append(1)
        return len(self.seen)

    def forward(self, x):
        x = x.flatten(1)
        return self.output({between})

def own(input_shape, num_classes):
    return Own()
"""


def configured(folder: Path, between: str, batching: str = "", **options: Any) -> RunConfig:
    path = folder / "own.py"
    path.write_text(CODE.format(between=between, batching=batching))
    private = {"algorithm": "dp-fedavg", "clip-norm": 1.0, "noise-multiplier": 1.0}
    common = {"model": f"{path}:own", "num-clients": CLIENTS, "local-steps": 3, "batch-size": 8}
    return make_config({**private, **common, **options})


def updates(config: RunConfig, who: list[int]) -> dict[int, np.ndarray]:
    """What each of the clients `who` of one round sends, each a vector."""
    grid = EngineGrid(config, load_problem(config))
    return {client: vector(reply) for client, reply in replies(grid, config, who)}


def replies(grid: EngineGrid, config: RunConfig, who: list[int]) -> list[tuple[int, Message]]:
    nodes = list(grid.get_node_ids())
    sent = [order(grid, config, client, nodes[client]) for client in who]
    return list(zip(who, grid.send_and_receive(sent), strict=True))


def order(grid: EngineGrid, config: RunConfig, client: int, node: int) -> Message:
    context = RoundContext(2, 0.5, torch.zeros(1))
    rule = build_strategy(config).local_rule(context).sent.record()
    about = ConfigRecord({"server-round": 2, "local-lr": 0.5, "client-id": client})
    arrays = ArrayRecord(grid.problem.state())
    content = RecordDict({"arrays": arrays, "config": about, "rule": rule})
    content["layout"] = ConfigRecord({"parameters": [*arrays]})
    return Message(content, node, "train", group_id="2")


def vector(reply: Message) -> np.ndarray:
    arrays = reply.content.array_records["arrays"]
    return np.concatenate([array.numpy().ravel() for array in arrays.values()])


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_more_in_front_moves_no_other_clients_update(tmp_path: Path, kind: str) -> None:
    config = configured(tmp_path, KINDS[kind])
    everybody = updates(config, list(range(CLIENTS)))
    without = updates(config, list(range(1, CLIENTS)))
    for client, update in without.items():
        np.testing.assert_array_equal(update, everybody[client])
    # It does draw, or remember, within a client's training.
    plain = tmp_path / "plain"
    plain.mkdir()
    assert not np.allclose(updates(configured(plain, "x"), [1])[1], everybody[1])


def test_the_same_holds_where_the_module_lets_its_clients_be_computed_together(
    tmp_path: Path,
) -> None:
    config = configured(tmp_path, KINDS["NumPy"], 'batching = "vmap"')
    everybody, without = updates(config, [0, 1, 2]), updates(config, [1, 2])
    for client, update in without.items():
        np.testing.assert_array_equal(update, everybody[client])


@pytest.mark.parametrize("kind", KINDS)
def test_a_deployed_client_sends_what_the_simulated_one_does(tmp_path: Path, kind: str) -> None:
    """In a process, too, that has served other clients before."""
    config = configured(tmp_path, KINDS[kind])
    grid = EngineGrid(config, load_problem(config))
    simulated = dict(replies(grid, config, [0, 1, 2]))
    for client in (2, 1):
        message = order(grid, config, client, 1000 + client)
        node: dict[str, Any] = {"partition-id": client, "num-partitions": CLIENTS}
        answer = app(message, Context(1, 1000 + client, node, RecordDict(), to_mapping(config)))
        np.testing.assert_allclose(vector(answer), vector(simulated[client]), rtol=0, atol=1e-6)


DATA = """
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, WeightedRandomSampler

class Augmented(Dataset):
    def __init__(self, client_id):
        self.own = np.random.default_rng(client_id)
        self.x = torch.arange(20.0)[:, None].expand(20, 4) / 20 + client_id

    def __len__(self):
        return 20

    def __getitem__(self, row):
        return self.x[row] + float(self.own.normal()), torch.tensor(row % 2)

def augmented(client_id):
    return Augmented(client_id)

def sampled(client_id):
    x = torch.arange(20.0)[:, None].expand(20, 4) / 20
    own = torch.Generator().manual_seed(client_id)
    sampler = WeightedRandomSampler([1.0] * 20, 20, generator=own)
    return DataLoader(TensorDataset(x, torch.arange(20) % 2), batch_size=4, sampler=sampler)

def plain(client_id):
    return TensorDataset(torch.arange(80.0).view(20, 4) / 80, torch.arange(20) % 2)

def linear():
    return nn.Linear(4, 2)

def of_digits(input_shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

def spoils(model, data, round):
    optimizer = round.optimizer(model)
    for x, y in round.batches(data):
        optimizer.zero_grad()
        round.loss(model(x), y).backward()
        optimizer.step()
    data.tensors[0].mul_(-2)
"""
REMEMBERS: dict[str, dict[str, Any]] = {
    "a data set": {"task": "own-project", "data": ":augmented", "model": ":linear"},
    "a sampler": {"task": "own-project", "data": ":sampled", "model": ":linear"},
    "a trainer's doing": {"task": "own-project", "data": ":plain", "model": ":linear"},
    "a trainer's doing to all": {"task": "digits", "partition": "full", "model": ":of_digits"},
}


@pytest.mark.parametrize("kind", REMEMBERS)
def test_what_the_data_remember_hangs_on_nobody_else(tmp_path: Path, kind: str) -> None:
    """The examples of eight stayed loaded, so that a tenth client moved the updates of others."""
    path = tmp_path / "own.py"
    path.write_text(DATA)
    trainer = {"trainer": ":spoils"} if "doing" in kind else {}
    named = {
        key: value.replace(":", f"{path}:") for key, value in (REMEMBERS[kind] | trainer).items()
    }
    private = {"algorithm": "dp-fedavg", "clip-norm": 1.0, "noise-multiplier": 1.0, "delta": 0.01}
    common = {"num-clients": 12, "local-steps": 3, "batch-size": 8}
    config = make_config({**private, **common, **named})
    grid = EngineGrid(config, load_problem(config))
    first, again = (vector(replies(grid, config, [3])[0][1]) for _ in range(2))
    replies(grid, config, [0, 1, 2, *range(4, 12)])
    last = vector(replies(grid, config, [3])[0][1])
    np.testing.assert_array_equal(first, again)
    np.testing.assert_array_equal(first, last)
    if config.task == "own-project":
        node: dict[str, Any] = {"partition-id": 3, "num-partitions": 12}
        for _ in range(2):
            context = Context(1, 1003, node, RecordDict(), to_mapping(config))
            np.testing.assert_allclose(
                vector(app(order(grid, config, 3, 1003), context)), first, rtol=0, atol=1e-6
            )


def test_a_simulation_leaves_the_global_generators_as_they_were(tmp_path: Path) -> None:
    config = configured(tmp_path, KINDS["dropout"])
    grid = EngineGrid(config, load_problem(config))
    before = torch.random.get_rng_state()
    replies(grid, config, [0, 1])
    assert torch.equal(torch.random.get_rng_state(), before)
