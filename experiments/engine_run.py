"""Runs of an experiment: the product's strategies on the in-process engine, without a folder."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord

from blackthorn.server_app.build import build_strategy
from blackthorn.server_app.evaluation import server_evaluation
from blackthorn.server_app.run import with_simulated_attack
from blackthorn.settings.config import RunConfig, make_config
from blackthorn.simulation.engine import EngineGrid, train_together
from blackthorn.strategies.evaluation import EvaluateFn
from blackthorn.strategies.options import Observer
from blackthorn.tasks.problem import Problem, load_problem


@dataclass(frozen=True)
class EngineRun:
    """A run: its configuration, its problem, and who sees every round."""

    config: RunConfig
    problem: Problem
    observers: Sequence[Observer]


def run_alone(run: EngineRun, *, evaluates: bool = True) -> None:
    """Run to the end; without `evaluates` nobody evaluates."""
    evaluate: EvaluateFn = _nothing
    if evaluates:
        evaluate = server_evaluation(run.problem) or _nothing
    build_strategy(run.config, run.observers).start(
        with_simulated_attack(run.config, EngineGrid(run.config, run.problem)),
        ArrayRecord(run.problem.state()),
        num_rounds=run.config.num_server_rounds,
        timeout=run.config.round_timeout,
        train_config=ConfigRecord({"seed": run.config.seed}),
        evaluate_fn=evaluate,
    )


def _nothing(server_round: int, arrays: ArrayRecord) -> None:
    del server_round, arrays


def run_in_lockstep(runs: Sequence[EngineRun]) -> None:
    """Runs that differ in nothing but the seed, round by round, without evaluation.

    Each has its own strategy and grid, and gets the result it would get alone; only the local
    training of all their clients is one batch. For models so small that a call costs more than
    its arithmetic.
    """
    grids = [EngineGrid(run.config, run.problem) for run in runs]
    strategies = [build_strategy(run.config, run.observers) for run in runs]
    models = [ArrayRecord(run.problem.state()) for run in runs]
    configs = [ConfigRecord({"seed": run.config.seed}) for run in runs]
    for server_round in range(1, runs[0].config.num_server_rounds + 1):
        messages = [
            list(strategy.configure_train(server_round, model, config, grid))
            for strategy, model, config, grid in zip(
                strategies, models, configs, grids, strict=True
            )
        ]
        replies = train_together(grids, messages)
        for i, strategy in enumerate(strategies):
            arrays, _ = strategy.aggregate_train(server_round, replies[i])
            models[i] = models[i] if arrays is None else arrays


def run_watched(
    values: Mapping[str, Any], data_dir: str, watch: Callable[[Problem], Observer]
) -> RunConfig:
    """Run `values` (keys of the configuration) to the end; `watch(problem)` sees every round."""
    config = make_config({**values, "data-dir": data_dir})
    problem = load_problem(config)
    run_alone(EngineRun(config, problem, [watch(problem)]))
    return config
