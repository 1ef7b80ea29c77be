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


def test_a_simulation_leaves_the_global_generators_as_they_were(tmp_path: Path) -> None:
    config = configured(tmp_path, KINDS["dropout"])
    grid = EngineGrid(config, load_problem(config))
    before = torch.random.get_rng_state()
    replies(grid, config, [0, 1])
    assert torch.equal(torch.random.get_rng_state(), before)
