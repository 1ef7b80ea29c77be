"""A workload in Flower's Ray simulation, as its documentation has it: `python -m ... NAME ROUNDS`.

Prints the seconds of every round as JSON. The apps are the plainest possible: FedAvg without
evaluation, and a loop of PyTorch's own optimizer that finds its data loaded in the worker.
"""

import json
import logging
import os
import sys
import time
from collections.abc import Iterable
from functools import cache

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import nn

from benchmarks.workloads import WORKLOADS, client_examples, local_batch, module
from blackthorn.tasks.datasets import Examples

NAME = "BLACKTHORN_BENCHMARK_WORKLOAD"
ROUNDS = "BLACKTHORN_BENCHMARK_ROUNDS"

client_app = ClientApp()
server_app = ServerApp()


@cache
def _loaded(name: str) -> tuple[list[Examples], nn.Module]:
    torch.set_num_threads(1)
    return client_examples(WORKLOADS[name]), module(WORKLOADS[name])


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """K steps of SGD from the server's model."""
    workload = WORKLOADS[os.environ[NAME]]
    clients, model = _loaded(workload.name)
    own = clients[int(context.node_config["partition-id"])]
    model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=workload.learning_rate)
    generator = torch.Generator().manual_seed(int(context.node_config["partition-id"]))
    for _ in range(workload.steps):
        x, y = local_batch(own, workload, generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    arrays, metrics = ArrayRecord(model.state_dict()), MetricRecord({"num-examples": len(own)})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


class TimedFedAvg(FedAvg):
    """FedAvg that notes when each round's model is there."""

    def __init__(self, fraction: float) -> None:
        super().__init__(fraction_train=fraction, fraction_evaluate=0.0)
        self.times = [time.perf_counter()]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """As FedAvg's."""
        result = super().aggregate_train(server_round, replies)
        self.times.append(time.perf_counter())
        return result


@server_app.main()
def serve(grid: Grid, context: Context) -> None:
    """The rounds, and their seconds on stdout."""
    del context
    workload = WORKLOADS[os.environ[NAME]]
    strategy = TimedFedAvg(workload.per_round / workload.clients)
    initial = ArrayRecord(module(workload).state_dict())
    strategy.start(grid, initial, num_rounds=int(os.environ[ROUNDS]))
    seconds = [b - a for a, b in zip(strategy.times, strategy.times[1:], strict=False)]
    print(json.dumps(seconds), flush=True)


def main() -> None:
    """Run the workload named in the arguments."""
    os.environ[NAME], os.environ[ROUNDS] = sys.argv[1:3]
    logging.getLogger("flwr").setLevel(logging.ERROR)
    workload = WORKLOADS[sys.argv[1]]
    run_simulation(
        server_app,
        client_app,
        num_supernodes=workload.clients,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )


if __name__ == "__main__":
    # Under this name, and not as __main__, Ray's workers find the app.
    from benchmarks import peer_flower

    peer_flower.main()
