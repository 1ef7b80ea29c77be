"""Who evaluates a run's models: the server by its task, the clients, or nobody."""

import torch
from flwr.app import ArrayRecord, MetricRecord

from blackthorn.settings.config import RunConfig
from blackthorn.settings.privacy_checks import claims_anything
from blackthorn.strategies.array_codec import decode
from blackthorn.strategies.evaluation import EvaluateFn
from blackthorn.tasks.problem import Problem

_NOTHING_HELD_OUT = (
    "nothing is evaluated: there is no test-data, and data gives no client a pair of examples to "
    "train on and to hold out"
)
_NOBODY_ASKED = (
    "nothing is evaluated: the server has no test examples, and under a claim no client is asked"
)


def unevaluated(config: RunConfig, problem: Problem, has_held_out: bool) -> str | None:
    """What to tell where nothing is evaluated, else None; under a claim by the configuration alone,
    since what clients hold out is theirs."""
    if claims_anything(config):
        return None if problem.task.server_evaluates else _NOBODY_ASKED
    return None if has_held_out else _NOTHING_HELD_OUT


def evaluation_of(
    config: RunConfig, problem: Problem, has_held_out: bool = True
) -> EvaluateFn | None:
    """None for the clients, on examples of theirs; nobody where neither the server can nor they
    may say, or it is known that they have none (`has_held_out`, which under a claim is nobody's
    business: whether a round 0 is on record would tell it)."""
    of_server = server_evaluation(problem)
    if of_server is None and (claims_anything(config) or not has_held_out):
        return lambda server_round, arrays: None  # noqa: ARG005
    return of_server


def server_evaluation(problem: Problem) -> EvaluateFn | None:
    """Evaluation by the task, for example on its test set; None where the server has nothing."""
    if not problem.task.server_evaluates:
        return None

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        del server_round
        state = {name: torch.from_numpy(decode(array)) for name, array in arrays.items()}
        return MetricRecord(dict(problem.evaluate(state)))

    return evaluate
