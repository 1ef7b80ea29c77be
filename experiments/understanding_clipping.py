"""Understanding clipping for federated learning (Zhang et al.): what clipping costs on MNIST."""

from collections.abc import Callable

import numpy as np

from experiments.engine_run import EngineRun, run_alone
from experiments.finding import Finding, between
from server_app.config import make_config
from strategies.bounding import row_norms
from strategies.reports import RoundReport
from tasks.problem import load_problem

# 1920 clients with 125 images each, 46 % of them from each of two digits; 80 clients a round.
SETTING: dict[str, str | int | float] = {
    "task": "mnist",
    "model": "mlp-32",
    "partition": "two-majority",
    "examples-per-client": 125,
    "num-clients": 1920,
    "participation": "fixed",
    "clients-per-round": 80,
    "num-server-rounds": 50,
    "local-steps": 32,
    "batch-size": 64,
    "local-lr": 0.1,
    "evaluate-every": 50,
}
# Test accuracy in % after the last round, and how far from it a run may end.
EXPECTED = {"FedAvg": 90.8, "CE-FedAvg": 89.0, "model clipping": 20.0}
TOLERANCE = 1.5


def mnist(
    data_dir: str = "",
    *,
    num_rounds: int = 50,
    seed: int = 0,
    advance: Callable[[int, int], None] | None = None,
) -> dict[str, float]:
    """Test accuracy in % of FedAvg, CE-FedAvg and model clipping; and ``c``, the threshold of the
    latter two: half the mean of ‖Δ_i‖ over all clients and rounds of the FedAvg run.

    `advance(done, of)` is called after each round.
    """
    rounds_done = 0

    def accuracy(**chosen: str | float) -> tuple[float, float]:
        """Accuracy in %, and the mean of ‖Δ_i‖ over clients and rounds."""
        values = {**SETTING, "data-dir": data_dir, "seed": seed, "num-server-rounds": num_rounds}
        values.update({key.replace("_", "-"): value for key, value in chosen.items()})
        config = make_config(values)
        accuracies: list[float] = []
        norms: list[np.ndarray] = []

        def watch(report: RoundReport) -> None:
            nonlocal rounds_done
            if "accuracy" in report.metrics:
                accuracies.append(100 * report.metrics["accuracy"])
            if report.updates is not None:
                norms.append(report.local_lr * row_norms(report.updates).numpy())
                rounds_done += 1
                if advance is not None:
                    advance(rounds_done, 3 * num_rounds)

        run_alone(EngineRun(config, load_problem(config), [watch]))
        return accuracies[-1], float(np.mean(np.concatenate(norms)))

    fedavg, mean_norm = accuracy(algorithm="gfedavg")
    c = mean_norm / 2
    return {
        "FedAvg": fedavg,
        "CE-FedAvg": accuracy(algorithm="ce-fedavg", clip_norm=c)[0],
        "model clipping": accuracy(algorithm="model-clipping", clip_norm=c)[0],
        "c": c,
    }


def mnist_findings(figures: dict[str, float]) -> list[Finding]:
    """What `mnist` gave, held against what it should be."""
    return [
        between(
            f"{method}, test accuracy in %",
            figures[method],
            expected - TOLERANCE,
            expected + TOLERANCE,
        )
        for method, expected in EXPECTED.items()
    ]
