"""A workload in pfl-research: `torchrun --nproc-per-node 2 -m benchmarks.peer_pfl NAME ROUNDS`.

The first process prints the seconds of every round as JSON.
"""

import json
import sys
import time
from typing import Any

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.internal.ops import get_ops
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn

from benchmarks.workloads import WORKLOADS, Workload, client_examples, module


class Clock(TrainingProcessCallback):
    """Notes when each round is over."""

    def __init__(self) -> None:
        self.times = [time.perf_counter()]

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: Any, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        """Go on."""
        del aggregate_metrics, model, central_iteration
        self.times.append(time.perf_counter())
        return False, Metrics()


class WithLoss(nn.Module):
    """The workload's model with the methods that pfl asks for."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """The logits."""
        outputs: Tensor = self.inner(x)
        return outputs

    def loss(self, x: Tensor, y: Tensor, eval: bool = False) -> Tensor:
        """Mean cross-entropy."""
        self.eval() if eval else self.train()
        return nn.functional.cross_entropy(self(x), y)

    def metrics(self, x: Tensor, y: Tensor, eval: bool = True) -> dict[str, Any]:
        """None: nothing is evaluated."""
        del x, y, eval
        return {}


def dataset(workload: Workload) -> FederatedDataset:
    """The clients' examples, each client with the batches of its local steps."""
    clients = client_examples(workload)
    sampler = get_user_sampler("minimize_reuse", list(range(workload.clients)))
    return FederatedDataset(lambda client: Dataset((clients[client].x, clients[client].y)), sampler)


def main() -> None:
    """Run the workload named in the arguments."""
    workload, rounds = WORKLOADS[sys.argv[1]], int(sys.argv[2])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002 (pfl draws from it)
    inner = WithLoss(module(workload))
    model = PyTorchModel(inner, torch.optim.SGD, torch.optim.SGD(inner.parameters(), lr=1.0))
    train = NNTrainHyperParams(
        local_batch_size=workload.batch or None,
        local_num_epochs=None if workload.batch else workload.steps,
        local_num_steps=workload.steps if workload.batch else None,
        local_learning_rate=workload.learning_rate,
    )
    data, clock = dataset(workload), Clock()
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=10 * rounds,
            train_cohort_size=workload.per_round,
            val_cohort_size=0,
        ),
        SimulatedBackend(data, data),
        model,
        train,
        callbacks=[clock],
        send_metrics_to_platform=False,
    )
    if get_ops().distributed.global_rank == 0:
        seconds = [b - a for a, b in zip(clock.times, clock.times[1:], strict=False)]
        print(json.dumps(seconds), flush=True)


if __name__ == "__main__":
    main()
