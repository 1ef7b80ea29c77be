"""A workload in the in-process engine: `python -m benchmarks.engine_rounds NAME ROUNDS [CLIENTS]`.

Prints the seconds of every round as JSON. CLIENTS is another size of the population, of which as
many join a round as before; beyond the data set clients share examples.
"""

import json
import sys
import time
from dataclasses import replace

import numpy as np
import torch
from flwr.app import ArrayRecord

from benchmarks.workloads import DATASET, WORKLOADS, Workload
from blackthorn.settings.config import RunConfig, make_config
from blackthorn.simulation.engine import EngineGrid
from blackthorn.strategies import GFedAvg
from blackthorn.strategies.participation import FixedParticipation
from blackthorn.strategies.reports import RoundReport
from blackthorn.tasks.labelled import LabelledTask
from blackthorn.tasks.problem import Problem, load_problem
from blackthorn.tasks.shards import ExampleShard


class DealtProblem(Problem):
    """The workload's problem, whose clients may hold the same examples."""

    def shards(self) -> list[ExampleShard]:
        """`examples-per-client` of the training examples each, in turn."""
        assert isinstance(self.task, LabelledTask) and self.task.train is not None
        train = self.task.train
        order = np.random.default_rng(0).permutation(len(train))
        count, size = self.config.num_clients, self.config.examples_per_client
        places = np.arange(count * size) % len(train)
        return [ExampleShard(train, own) for own in order[places].reshape(count, size)]


def configuration(workload: Workload) -> RunConfig:
    """The workload as a run configuration."""
    return make_config(
        {
            "task": DATASET,
            "model": workload.model,
            "num-clients": workload.clients,
            "examples-per-client": workload.examples,
            "local-steps": workload.steps,
            "batch-size": workload.batch,
            "local-lr": workload.learning_rate,
        }
    )


def seconds_of_rounds(workload: Workload, rounds: int) -> list[float]:
    """Seconds of every round, from its first message to the next global model."""
    config = configuration(workload)
    loaded = load_problem(config)
    problem = DealtProblem(config, loaded.task, loaded.model)
    grid = EngineGrid(config, problem)
    times: list[float] = []

    def note(report: RoundReport) -> None:
        del report
        times.append(time.perf_counter())

    strategy = GFedAvg(
        participation=FixedParticipation(workload.per_round),
        local_rate=workload.learning_rate,
        identity="query",
        num_clients=workload.clients,
        evaluate_every=rounds + 1,
        observers=[note],
    )
    initial = ArrayRecord(problem.state())
    strategy.start(grid, initial, num_rounds=rounds, evaluate_fn=lambda *_: None)
    return np.diff(times).tolist()


def main() -> None:
    """Run the workload named in the arguments."""
    workload = WORKLOADS[sys.argv[1]]
    if len(sys.argv) > 3:
        workload = replace(workload, clients=int(sys.argv[3]))
    torch.manual_seed(0)
    print(json.dumps(seconds_of_rounds(workload, int(sys.argv[2]))))


if __name__ == "__main__":
    main()
