"""One node's client: its stable id and its examples.

The node's own config decides: `data-path` (its own .npz or image folder) or a share of the task's
data set (`partition-id`); `client-id` where the id is not the partition's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from server_app.config import RunConfig
from tasks.datasets import Examples
from tasks.own_data import load_own_data
from tasks.problem import Problem, load_problem, partition_indices
from tasks.shards import ExampleShard, split_held_out
from tasks.task import OWN_DATA

from .training import client_generator

HELD_OUT_FRACTION = 0.2


@dataclass(frozen=True)
class NodeClient:
    """The client a node holds. `held_out` is what it evaluates on, never trained on."""

    client_id: int
    problem: Problem
    shard: ExampleShard
    held_out: Examples | None


def load_node_client(
    config: RunConfig, node_config: Mapping[str, bool | int | float | str]
) -> NodeClient:
    """The node's client. Raises ValueError with one line that says what the node lacks."""
    client_id = _client_id(node_config)
    data_dir = str(node_config.get("data-dir", config.data_dir))
    path = str(node_config.get("data-path", ""))
    poison = str(node_config.get("poison", ""))
    return _load(config.model_copy(update={"data_dir": data_dir}), client_id, path, poison)


def _client_id(node_config: Mapping[str, bool | int | float | str]) -> int:
    for key in ("client-id", "partition-id"):
        value = node_config.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"node config {key} = {value!r} is not allowed: an integer from 0")
        return value
    raise ValueError("the node config names no client: give --node-config 'client-id=0 ...'")


@lru_cache(maxsize=4)
def _load(config: RunConfig, client_id: int, path: str, poison: str) -> NodeClient:
    problem = load_problem(config)
    examples = _own_examples(problem, path) if path else _share(config, problem, client_id)
    if poison == "label-flip":
        # A test node may be told by its own operator to lie about its labels.
        flipped = problem.task.num_classes - 1 - examples.y
        examples = Examples(examples.x, flipped)
    if problem.task.test is not None:
        return NodeClient(client_id, problem, ExampleShard(examples), None)
    generator = client_generator(config.seed, 0, client_id)
    training, held_out = split_held_out(examples, HELD_OUT_FRACTION, generator)
    return NodeClient(client_id, problem, ExampleShard(training), held_out)


def _own_examples(problem: Problem, path: str) -> Examples:
    return load_own_data(path, problem.task.input_shape, problem.task.num_classes)


def _share(config: RunConfig, problem: Problem, client_id: int) -> Examples:
    if problem.task.name == OWN_DATA or problem.task.train is None:
        raise ValueError(
            "task own-data needs the node's own examples: give --node-config 'data-path=\"...\"'"
        )
    if client_id >= config.num_clients:
        raise ValueError(
            f"client {client_id} has no share of the data: num-clients = {config.num_clients}"
        )
    indices = partition_indices(config, problem.task.train)[client_id]
    return problem.task.train.select(indices)
