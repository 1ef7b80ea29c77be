"""An attack on the claim of local-dp-sgd: is one example there? By everything a client sends.

The attacker knows the client's other examples, and is the server: it sees the model and all the
figures of the reply. Poisson batches and noise are all that is hidden from it.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from blackthorn.client_app.configured_rule import configured_rule
from blackthorn.client_app.dp_sgd import dp_sgd_of
from blackthorn.client_app.messages import RoundRequest, start_vector
from blackthorn.settings.config import RunConfig
from blackthorn.simulation.auditing import Finding, lower_bound
from blackthorn.simulation.engine import EngineGrid
from blackthorn.strategies.attestation import UNNAMED, SentRule
from blackthorn.tasks.datasets import Examples
from blackthorn.tasks.flat_model import FlatModel
from blackthorn.tasks.labelled import LabelledTask
from blackthorn.tasks.problem import Problem
from blackthorn.tasks.shards import ExampleShard
from blackthorn.wire import ARRAYS, CONFIG, LOCAL_LR, RULE, SERVER_ROUND

# What a figure is that a reply does not hold: far below all others.
_MISSING = -1e300
_LONGEST_INPUT = 1e6


def attack_sample_claim(
    config: RunConfig,
    problem: Problem,
    runs: int,
    delta: float,
    confidence: float = 0.95,
    advance: Callable[[int], None] = lambda done: None,  # noqa: ARG005
) -> Finding:
    """One round of one client in `runs` runs with an example more, and as many without.

    The client has a full batch's number of blank examples, where a rate or a denominator that
    followed them would jump, and the example more has a gradient as long as is allowed. Looked at,
    each by `lower_bound` and together right with `confidence`: how far the model went along that
    gradient, how far it went at all, and every figure of what the client says.
    """
    # The client's share of a central noise would only hide more, and is not counted on.
    config = config.model_copy(update={"num_clients": 1, "noise_location": "server"})
    start = start_vector(ArrayRecord(problem.state()), problem.model)
    without, with_it, direction = _neighbours(problem, start, config)
    seen: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    for run in range(runs):
        for present, examples in ((True, with_it), (False, without)):
            replies = _replies(EngineGrid(config, problem, [ExampleShard(examples)]), config)
            seen[present].append(_statistics(replies, problem.model, start, direction))
            advance(2 * run + 1 + (not present))
    names = sorted({name for told in (*seen[True], *seen[False]) for name in told})
    # What is always the same tells nothing, and must not weaken what the others tell.
    names = [name for name in names if np.ptp(_values([*seen[True], *seen[False]], name)) > 0]
    # A figure may be larger with the example or smaller. Each of so many bounds is so much surer.
    sure = 1 - (1 - confidence) / max(1, 2 * len(names))
    bounds = [
        lower_bound(
            sign * _values(seen[True], name), sign * _values(seen[False], name), delta, sure
        )
        for name in names
        for sign in (1, -1)
    ]
    found = max(bounds, default=0.0)
    claimed = dp_sgd_of(config, config.local_lr).figure(1, delta).epsilon
    told = f"{runs} rounds of a client with one example more and {runs} without"
    return Finding(told, delta, claimed, found)


def _neighbours(
    problem: Problem, start: torch.Tensor, config: RunConfig
) -> tuple[Examples, Examples, torch.Tensor]:
    """The client's examples without and with one more, and that one's gradient at w_0, of length
    1 and float64 [d]."""
    if not isinstance(problem.task, LabelledTask):
        raise ValueError(f"task = {config.task} is not allowed in an audit of local-dp-sgd")
    shape, size, value = problem.task.input_shape, config.batch_size, 1.0
    blank = Examples(torch.zeros(size, *shape), torch.zeros(size, dtype=torch.int64))
    while True:
        canary = Examples(torch.full((1, *shape), value), torch.ones(1, dtype=torch.int64))
        x, y, weights = canary.x[None], canary.y[None], start.new_ones(1, 1)
        gradient = problem.model.loss_and_gradient(start[None], x, y, weights)[1][0].double()
        length = float(torch.linalg.vector_norm(gradient))
        if length >= config.dp_sgd_clip_norm or value >= _LONGEST_INPUT:
            joined = Examples(torch.cat([blank.x, canary.x]), torch.cat([blank.y, canary.y]))
            return blank, joined, gradient / max(length, 1e-300)
        value *= 10


def _replies(grid: EngineGrid, config: RunConfig) -> list[Message]:
    """What the client answers to the question who it is, and to a round from w_0."""
    arrays = ArrayRecord(grid.problem.state())
    request = RoundRequest(1, config.local_lr, arrays, SentRule(UNNAMED))
    content = RecordDict(
        {
            ARRAYS: arrays,
            CONFIG: ConfigRecord({SERVER_ROUND: 1, LOCAL_LR: config.local_lr}),
            RULE: configured_rule(config, request).sent.record(),
        }
    )
    (node,) = grid.get_node_ids()
    asked = [Message(RecordDict(), node, "query"), Message(content, node, "train")]
    return [reply for message in asked for reply in grid.send_and_receive([message])]


def _statistics(
    replies: Sequence[Message], model: FlatModel, start: torch.Tensor, direction: torch.Tensor
) -> dict[str, float]:
    """What an attacker looks at: two figures of the model, and all that are said."""
    enrolled, trained = replies
    moved = start.double() - start_vector(trained.content.array_records[ARRAYS], model).double()
    seen = {
        "along its gradient": float(moved @ direction),
        "length": float(torch.linalg.vector_norm(moved)),
    }
    for reply in (enrolled, trained):
        for record in reply.content.values():
            if isinstance(record, MetricRecord | ConfigRecord):
                for name, value in record.items():
                    number = value if isinstance(value, int | float) else None
                    said = zlib.crc32(str(value).encode()) if number is None else number
                    seen[f"{reply.metadata.message_type} {name}"] = float(said)
    return seen


def _values(seen: Sequence[Mapping[str, float]], name: str) -> np.ndarray:
    return np.array([figures.get(name, _MISSING) for figures in seen])
