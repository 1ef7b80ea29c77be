"""What only shows once model, task and plan are there, and would make a run's claim a false one."""

import numpy as np

from blackthorn.recording.privacy import local_rate_of, of_an_example
from blackthorn.settings.config import ConfigError, RunConfig
from blackthorn.settings.privacy_checks import (
    OR_NO_CLAIM,
    claims_anything,
    claims_privacy,
    claims_sample_privacy,
    has_central_claim,
)
from blackthorn.strategies import PrivacyPlan
from blackthorn.strategies.accounting import Charge, is_unbounded
from blackthorn.strategies.layout import Entries
from blackthorn.tasks.problem import Problem
from blackthorn.tasks.shards import ExampleShard
from blackthorn.tasks.task import Task


def check_noise(config: RunConfig, plan: PrivacyPlan, problem: Problem) -> None:
    """Raises ConfigError where the clients' models could not carry their noise in the last round.

    The models of later rounds are not known yet: the strategy looks again before each.
    """
    first = problem.model.flatten(problem.state())
    try:
        plan.check_resolution(first, local_rate_of(config).at_least(config.num_server_rounds))
    except ValueError as error:
        raise ConfigError(str(error)) from error


def check_statistics(config: RunConfig, problem: Problem) -> None:
    """Raises ConfigError where clients would send statistics of their examples without noise."""
    found = Entries.of_module(problem.model.module).statistics
    if claims_privacy(config) and config.statistics == "average" and found:
        raise ConfigError(
            f"statistics = average breaks the claim: the model's {found[0]!r} would leave the "
            f"clients without noise; set statistics = server or local, {OR_NO_CLAIM}"
        )


def check_evaluation(config: RunConfig, task: Task) -> str | None:
    """What to tell of a claim whose task evaluates on the people that it protects, else None.

    Metrics are released, and so is what is chosen by them (output-iterate = best, a plateau).
    Raises ValueError, one line, where they are measured on what the clients hold.
    """
    if not task.server_evaluates or not (claims_privacy(config) or claims_sample_privacy(config)):
        return None
    # A task that does not say may read anything.
    read = getattr(task, "evaluation_data", "clients")
    if read == "clients":
        raise ValueError(
            f"task = {config.task} breaks the claim: its metrics are measured on the clients' own "
            f"examples, and released without noise; set another task, {OR_NO_CLAIM}"
        )
    if read == "same-people" and config.partition == "natural":
        return (
            f"task = {config.task} with partition = natural: the test set, which the claim takes "
            "to be public, holds other examples of the same people as the clients"
        )
    return None


def shared_examples(config: RunConfig, problem: Problem) -> str | None:
    """What to tell of a claim where a client has an example more than once, or several have it,
    else None: the figure counts it once, and what one client sends of it."""
    if problem.task.on_nodes or not claims_anything(config):
        return None
    # A task of one's own may give every client a data set of its own.
    dealt: dict[int, list[np.ndarray]] = {}
    for shard in problem.shards():
        if isinstance(shard, ExampleShard):
            dealt.setdefault(id(shard.data_set), []).append(shard.all_rows)
    told = []
    if any(len(np.unique(rows)) < len(rows) for of_one in dealt.values() for rows in of_one):
        told.append("a client has some examples more than once, and the figure counts one of them")
    apart = [np.concatenate([np.unique(rows) for rows in of_one]) for of_one in dealt.values()]
    if any(len(np.unique(of_all)) < len(of_all) for of_all in apart):
        told.append(
            "some examples are at several clients, and the figure counts what one of these sends "
            "of them"
        )
    return f"partition = {config.partition}: {'; '.join(told)}" if told else None


def check_figures(config: RunConfig, plan: PrivacyPlan | None) -> None:
    """Raises ConfigError where there is so little noise that no finite epsilon holds: a claim of
    nothing."""
    if plan is not None and plan.claim:
        release = plan.release() if has_central_claim(config) else plan.local_release()
        charge = release, plan.rounds
        _require_finite(config, "noise-multiplier", plan.noise_multiplier, charge)
    if claims_sample_privacy(config):
        charge = of_an_example(config, config.num_server_rounds)
        z = config.dp_sgd_noise_multiplier
        _require_finite(config, "dp-sgd-noise-multiplier", z, charge)


def _require_finite(config: RunConfig, key: str, multiplier: float, charge: Charge) -> None:
    if is_unbounded([charge], config.delta):
        raise ConfigError(
            f"{key} = {multiplier:g} breaks the claim: with so little noise no finite epsilon "
            f"holds at delta = {config.delta:g}; set more, {OR_NO_CLAIM}"
        )
