"""One node's client: its stable id and its examples.

The node's own config decides: `data-path` (its own .npz or image folder) or a share of the task's
data set (`partition-id`); `client-id` where the id is not the partition's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from blackthorn.randomness import Stream, generator_of
from blackthorn.settings.config import RunConfig
from blackthorn.tasks.datasets import Examples
from blackthorn.tasks.labelled import LabelledTask
from blackthorn.tasks.own_data import load_own_data
from blackthorn.tasks.problem import Problem, load_problem
from blackthorn.tasks.shards import ExampleShard, Shard, split_held_out

from .disclosure import may_say

HELD_OUT_FRACTION = 0.2
# The node config's key of the client's policy; see permitting.py.
POLICY = "policy"


@dataclass(frozen=True)
class NodeClient:
    """The client a node holds. `held_out` is what it evaluates on, never trained on."""

    client_id: int
    problem: Problem
    shard: Shard
    held_out: Examples | None


def load_node_client(
    config: RunConfig, node_config: Mapping[str, bool | int | float | str]
) -> NodeClient:
    """The node's client. Raises ValueError with one line that says what the node lacks."""
    client_id = node_client_id(node_config)
    # Under a policy a server names no folder of this machine's.
    named = "" if POLICY in node_config else config.data_dir
    data_dir = str(node_config.get("data-dir", named))
    path = str(node_config.get("data-path", ""))
    poison = str(node_config.get("poison", ""))
    return _load(config.model_copy(update={"data_dir": data_dir}), client_id, path, poison)


def node_client_id(node_config: Mapping[str, bool | int | float | str]) -> int:
    """The stable id of the node's client. Raises ValueError where the node has none."""
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
    shard, held_out = (
        _own_data(config, problem, client_id, path) if path else (_share(problem, client_id), None)
    )
    # A test node may be told by its own operator to lie about its labels.
    return NodeClient(client_id, problem, problem.poisoned(shard, poison), held_out)


def _own_data(
    config: RunConfig, problem: Problem, client_id: int, path: str
) -> tuple[Shard, Examples | None]:
    """The node's own examples; part of them are held out where the server cannot evaluate, and
    the client may say how it did: a split by chance would move with every example besides."""
    task = problem.task
    if not isinstance(task, LabelledTask):
        raise ValueError(f"task {task.name!r} takes no examples of a node's own: omit data-path")
    examples = load_own_data(path, task.input_shape, task.num_classes)
    if task.server_evaluates or not may_say(config, "evaluation"):
        return ExampleShard(examples), None
    drawn = generator_of(Stream.HELD_OUT, config.seed, client_id)
    training, held_out = split_held_out(examples, HELD_OUT_FRACTION, drawn)
    return ExampleShard(training), held_out


def _share(problem: Problem, client_id: int) -> Shard:
    if problem.task.on_nodes:
        raise ValueError(
            f"task {problem.task.name} needs the node's own examples: "
            "give --node-config 'data-path=\"...\"'"
        )
    return problem.shard(client_id)
