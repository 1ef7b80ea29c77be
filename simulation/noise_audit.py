"""An attack on the noise that clients add: what does the server learn from one client's messages?

The attacker is the server and knows all of the client's data, so that only the noise is left of a
message; what it asks is which of two data sets the client holds. Messages come from the engine's
client, as in a run.
"""

from collections.abc import Callable, Sequence

import torch
from flwr.app import Message
from scipy import stats

from blackthorn.client_app.configured_rule import configured_rule
from blackthorn.client_app.messages import RoundRequest
from blackthorn.client_app.private_update import NOISE_MULTIPLIER, NOISE_SHARES
from blackthorn.settings.config import RunConfig
from blackthorn.simulation.auditing import Finding, lower_bound
from blackthorn.simulation.engine import EngineGrid
from blackthorn.strategies import PrivacyPlan, Release, spent
from blackthorn.strategies.attestation import UNNAMED, SentRule
from blackthorn.strategies.global_model import GlobalModel
from blackthorn.strategies.messages import content_of_round
from blackthorn.strategies.screening import content_of
from blackthorn.tasks.datasets import Examples
from blackthorn.tasks.labelled import LabelledTask
from blackthorn.tasks.problem import Problem
from blackthorn.tasks.shards import ExampleShard, Shard
from blackthorn.wire import ARRAYS, LOCAL_LR

_MOST_SHARDS = 8
_LARGEST_INPUT = 1e6


def attack_local_claim(
    config: RunConfig,
    problem: Problem,
    plan: PrivacyPlan,
    runs: int,
    delta: float,
    confidence: float = 0.95,
    advance: Callable[[int], None] = lambda done: None,  # noqa: ARG005
) -> list[Finding]:
    """`runs` messages of a client with either of two data sets.

    Two findings: one without any assumption, of one round at `delta`, by how far a message went
    from the one update to the other (`lower_bound`); and one for the whole run at the plan's δ,
    from the size of Gaussian noise (`_least_deviation`) that hides updates which differ by 2 C, or
    by more where a client that does not clip lets them.
    """
    config = config.model_copy(update={"local_dp_sgd": False})
    shards = most_different(config, problem, plan)
    updates = torch.stack([update_sent(_silent(config, problem, shard), plan) for shard in shards])
    apart = updates[1] - updates[0]
    distance = float(torch.linalg.vector_norm(apart))
    direction = apart / distance
    noise = torch.empty(runs, 2, len(direction), dtype=torch.float64)
    clients = [EngineGrid(config, problem, [shard]) for shard in shards]
    for run in range(runs):
        for which, client in enumerate(clients):
            noise[run, which] = update_sent(client, plan) - updates[which]
            advance(2 * run + which + 1)
    went = (noise + updates) @ direction
    one = plan.local_release()
    told = f"{runs} messages of a client with one data set and {runs} with another"
    found = lower_bound(went[:, 1].numpy(), went[:, 0].numpy(), delta, confidence)
    multiplier = _least_deviation(noise, direction, confidence) / max(2.0, distance)
    whole = spent([(Release(multiplier), plan.rounds)], plan.delta, "pld")
    return [
        Finding(told, delta, spent([(one, 1)], delta, "rdp").epsilon, found),
        Finding(
            f"the noise in these messages, as a Gaussian's, over {plan.rounds} rounds",
            plan.delta,
            plan.local_figure().epsilon,
            whole.epsilon,
        ),
    ]


def _least_deviation(noise: torch.Tensor, direction: torch.Tensor, confidence: float) -> float:
    """What the deviation of Gaussian noise [runs, 2, d] is at most, with `confidence`.

    The least of three bounds (chi-square): over all numbers, along `direction`, and in the
    difference of two messages of one round, since noise can be less than it looks.
    """
    sure = (1 - confidence) / 3
    along = noise @ direction
    apart = (noise[:, 1] - noise[:, 0]) / 2**0.5
    return min(
        float((part.square().sum() / stats.chi2.ppf(sure, part.numel())).sqrt())
        for part in (noise, along, apart)
    )


def _silent(config: RunConfig, problem: Problem, shard: Shard) -> EngineGrid:
    """The same client, without noise."""
    return EngineGrid(config.model_copy(update={"noise_location": "server"}), problem, [shard])


def update_sent(client: EngineGrid, plan: PrivacyPlan) -> torch.Tensor:
    """The update [d] in the message of the grid's first client from w_0, float64, in units of C.

    Raises RejectedReply where the client answers with an error.
    """
    config = client.config
    model = GlobalModel.of(client.problem.model.module, statistics=config.statistics)
    told = {NOISE_MULTIPLIER: plan.noise_multiplier, NOISE_SHARES: plan.noise_shares}
    request = RoundRequest(1, config.local_lr, model.sent(), SentRule(UNNAMED, told))
    rule = configured_rule(config, request).sent
    content = content_of_round(1, model.sent(), {LOCAL_LR: config.local_lr}, rule, model.layout)
    node = next(iter(client.get_node_ids()))
    (reply,) = client.send_and_receive([Message(content, node, "train")])
    arrays = content_of(reply).array_records[ARRAYS]
    bound = plan.clip_norm.in_gradient_units(config.local_lr)
    return (model.current.double() - model.vector(arrays).double()) / config.local_lr / bound


def most_different(config: RunConfig, problem: Problem, plan: PrivacyPlan) -> Sequence[Shard]:
    """The two data sets whose updates are farthest apart: of some clients' own, and, where there
    are labels, of one large example under two of them."""
    shards: list[Shard] = list(problem.shards()[:_MOST_SHARDS])
    if isinstance(problem.task, LabelledTask):
        shape, value = problem.task.input_shape, 1.0
        while value <= _LARGEST_INPUT:
            x = torch.full((1, *shape), value)
            shards += [ExampleShard(Examples(x, torch.tensor([label]))) for label in (0, 1)]
            value *= 1e3
    updates = torch.stack([update_sent(_silent(config, problem, shard), plan) for shard in shards])
    distances = torch.cdist(updates, updates)
    one, other = divmod(int(distances.argmax()), len(shards))
    return [shards[one], shards[other]]
