"""One node's client: its stable id, its examples, and what it keeps from round to round.

The node's own config decides: `data-path` (its own .npz or image folder) or a share of the task's
data set (`partition-id`); `client-id` where the id is not the partition's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context
from torch import Tensor

from blackthorn.randomness import Stream, generator_of
from blackthorn.settings.config import ConfigError, RunConfig
from blackthorn.strategies.array_codec import decode, encode
from blackthorn.tasks.datasets import Examples
from blackthorn.tasks.labelled import LabelledTask
from blackthorn.tasks.own_data import load_own_data
from blackthorn.tasks.own_project import OwnProject, ProjectShard
from blackthorn.tasks.problem import Problem, load_problem
from blackthorn.tasks.shards import ExampleShard, Shard, split_held_out
from blackthorn.tasks.torch_data import Data

from .disclosure import may_say

HELD_OUT_FRACTION = 0.2
# The node config's keys of the client's policy and of its own ledger; see permitting.py.
POLICY, LEDGER, LEDGER_ID = "policy", "ledger", "ledger-id"
# Flower's state of the run on the node: before the name of the rounds, the update that is kept.
_KEPT = "blackthorn-update-"


def named_file(node_config: Mapping[str, bool | int | float | str], key: str) -> Path | None:
    """The file that the node's config names under `key`; None where it names none.

    Raises ConfigError for a relative one: from another folder it would be another file.
    """
    path = Path(str(node_config.get(key, ""))).expanduser()
    if path == Path():
        return None
    if not path.is_absolute():
        raise ConfigError(f"{key} = {path} is not allowed in a node's config: name its whole path")
    return path


@dataclass(frozen=True)
class NodeClient:
    """The client a node holds. `examples_held_out`: of examples that are no project's own."""

    client_id: int
    problem: Problem
    shard: Shard
    examples_held_out: Examples | None

    @property
    def held_out(self) -> Examples | Data | None:
        """What it evaluates on, never trained on."""
        of_project = held_out_of(self.shard)
        return self.examples_held_out if of_project is None else of_project


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


def held_out_of(shard: Shard) -> Data | None:
    """What a client of a project of one's own holds out, as it was loaded."""
    if not isinstance(shard, ProjectShard) or not shard.holds_out:
        return None
    return shard.data.held_out


@lru_cache(maxsize=4)
def _load(config: RunConfig, client_id: int, path: str, poison: str) -> NodeClient:
    problem = load_problem(config, at_client=True)
    shard, held_out = _data_of(config, problem, client_id, path)
    # A test node may be told by its own operator to lie about its labels.
    return NodeClient(client_id, problem, problem.poisoned(shard, poison), held_out)


def _data_of(
    config: RunConfig, problem: Problem, client_id: int, path: str
) -> tuple[Shard, Examples | None]:
    if isinstance(problem.task, OwnProject):
        load = partial(problem.task.of_client, client_id, path)
        return ProjectShard(load, first=load()), None
    if path:
        return _own_data(config, problem, client_id, path)
    return _share(problem, client_id), None


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


def kept_update(context: Context, series: str) -> Tensor | None:
    """The update [d] that this node's client has kept of its last round of the `series`, if any."""
    record = context.state.array_records.get(_KEPT + series)
    return None if record is None else torch.from_numpy(decode(record[_KEPT]))


def keep_update(context: Context, series: str, updates: Sequence[Tensor]) -> None:
    """Keep a client's update for its next round of the `series`, in what Flower keeps of the run on
    the node.

    `updates` has it alone, or is empty where the round's rule keeps nothing.
    """
    for update in updates:
        context.state[_KEPT + series] = ArrayRecord({_KEPT: encode(update.numpy())})
