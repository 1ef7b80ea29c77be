"""One run of an experiment: the product's strategy on the in-process engine, without a folder."""

from collections.abc import Sequence

from flwr.app import ArrayRecord, ConfigRecord

from server_app.build import build_strategy
from server_app.config import RunConfig
from server_app.run import server_evaluation
from simulation.engine import EngineGrid
from strategies.frame import EvaluateFn, Observer
from tasks.problem import Problem


def run_in_engine(
    config: RunConfig, problem: Problem, observers: Sequence[Observer], *, evaluates: bool = True
) -> None:
    """Run to the end; the observers see every round. Without `evaluates` nobody evaluates."""
    evaluate: EvaluateFn | None = server_evaluation(problem) if evaluates else _nothing
    build_strategy(config, observers).start(
        EngineGrid(config, problem),
        ArrayRecord(problem.state()),
        num_rounds=config.num_server_rounds,
        timeout=config.round_timeout,
        train_config=ConfigRecord({"seed": config.seed}),
        evaluate_fn=evaluate,
    )


def _nothing(server_round: int, arrays: ArrayRecord) -> None:
    del server_round, arrays
