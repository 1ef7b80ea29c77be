"""FA-LD (Deng et al.): how far its samples are from a known posterior, and what averaging over
posterior samples is worth on Fashion-MNIST."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from experiments.finding import Finding
from server_app.calibration import calibration
from server_app.config import RunConfig, make_config
from server_app.posterior_plots import plot_entropy
from server_app.prediction import class_probabilities, predict_with
from server_app.run import PreparedRun, execute, prepare
from simulation.engine import EngineGrid
from strategies.reports import RoundReport
from tasks.labelled import LabelledTask, load_task

# recipes/fa-ld-bayes-linear.toml (a test compares them).
KNOWN_POSTERIOR: dict[str, str | int | float | bool] = {
    "algorithm": "fa-ld",
    "task": "bayes-linear",
    "dtype": "float64",
    "problem-dimension": 3,
    "num-clients": 5,
    "examples-per-client": 20,
    "heterogeneity": 1.0,
    "imbalance": 0.6,
    "prior-precision": 1.0,
    "num-server-rounds": 600,
    "local-steps": 10,
    "batch-size": 0,
    "local-lr": 0.001,
    "shared-noise": 0.5,
    "burn-in": 50,
    "max-samples": 550,
    "evaluate-every": 100,
    "instruments": False,
}
VARIATIONS: dict[str, dict[str, str | int | float]] = {
    "as in the recipe": {},
    "a fifth of the step size": {"local-lr": 0.0002},
    "one local step, not ten": {"local-steps": 1},
    "scheme I, four draws": {"participation": "with-replacement", "clients-per-round": 4},
    "scheme I, two draws": {"participation": "with-replacement", "clients-per-round": 2},
}

# recipes/fa-ld-fashion-mnist.toml (a test compares them).
FASHION_MNIST: dict[str, str | int | float | bool] = {
    "algorithm": "fa-ld",
    "task": "fashion-mnist",
    "model": "mlp-50",
    "partition": "dominant-label",
    "examples-per-client": 100,
    "num-clients": 20,
    "participation": "fixed",
    "clients-per-round": 5,
    "num-server-rounds": 150,
    "local-steps": 20,
    "batch-size": 32,
    "local-lr": 5e-5,
    "shared-noise": 1.0,
    "temperature": 0.1,
    "prior-precision": 1.0,
    "burn-in": 50,
    "max-samples": 100,
    "evaluate-every": 30,
    "instruments": False,
}
NUM_EXAMPLES = 2000
POSTERIOR, LAST, FEDAVG = "posterior averaging", "last iterate", "FedAvg"
FIGURES = ("accuracy", "nll", "brier", "ece", "entropy")
Figures = dict[str, dict[str, np.ndarray]]


def bayes_linear(
    *, num_rounds: int = 600, advance: Callable[[int, int], None] | None = None
) -> dict[str, float]:
    """W2 between the samples' Gaussian fit and the exact posterior, by variation of the recipe."""
    distances = {}
    for done, (name, variation) in enumerate(VARIATIONS.items(), start=1):
        with tempfile.TemporaryDirectory() as folder:
            config = make_config(
                {
                    **KNOWN_POSTERIOR,
                    **variation,
                    "num-server-rounds": num_rounds,
                    "langevin-seed": 0,
                    "output-dir": str(Path(folder) / "run"),
                }
            )
            summary = _run(config, lambda _report: None)[1]
            distances[name] = float(summary["posterior"]["w2"])
        if advance is not None:
            advance(done, len(VARIATIONS))
    return distances


def bayes_linear_findings(distances: Mapping[str, float]) -> list[Finding]:
    """W2 falls with the step size and with K, and rises as fewer clients take part."""
    names = list(VARIATIONS)
    recipe, small, one, four, two = (distances[name] for name in names)
    verdicts = [
        ("", True),
        ("below the recipe's", small < recipe),
        ("below the recipe's", one < recipe),
        ("above the recipe's", four > recipe),
        ("above that of four draws", two > four),
    ]
    return [
        Finding(f"W2, {name}", f"{distances[name]:.3f}", expected, holds)
        for name, (expected, holds) in zip(names, verdicts, strict=True)
    ]


def fashion_mnist(
    data_dir: str = "",
    *,
    num_seeds: int = 3,
    num_rounds: int = 150,
    advance: Callable[[int, int], None] | None = None,
    plots: Path | None = None,
) -> Figures:
    """Test figures of posterior averaging, of the chain's last iterate and of FedAvg, one a seed.

    FedAvg takes the same rounds, clients, local steps and batches, with the same step on the mean
    loss (its rate is n times the step size on the sum), without noise or prior. The "ood" row is
    the mean predictive entropy on MNIST, beside that on Fashion-MNIST. `advance(done, of)` is
    called after each round; `plots` is a folder for the histogram of the first seed's entropies.
    """
    done = 0

    def watch(report: RoundReport) -> None:
        nonlocal done
        done += report.server_round > 0
        if advance is not None:
            advance(done, 2 * num_seeds * num_rounds)

    rows: dict[str, list[dict[str, float]]] = {POSTERIOR: [], LAST: [], FEDAVG: []}
    for seed in range(num_seeds):
        with tempfile.TemporaryDirectory() as folder:
            own = Path(folder)
            chain, _ = _run(_config(data_dir, seed, num_rounds, own / "fa-ld"), watch)
            fedavg, _ = _run(_fedavg(data_dir, seed, num_rounds, own / "fedavg"), watch)
            for name, row in _figures(chain, fedavg, data_dir, plots if seed == 0 else None):
                rows[name].append(row)
    return {
        name: {figure: np.array([row[figure] for row in found]) for figure in found[0]}
        for name, found in rows.items()
    }


def _config(data_dir: str, seed: int, num_rounds: int, folder: Path) -> RunConfig:
    chosen = {
        "num-server-rounds": num_rounds,
        "burn-in": num_rounds // 3,
        "data-dir": data_dir,
        "seed": seed,
        "langevin-seed": seed,
        "output-dir": str(folder),
    }
    return make_config({**FASHION_MNIST, **chosen})


def _fedavg(data_dir: str, seed: int, num_rounds: int, folder: Path) -> RunConfig:
    usual = make_config({})
    chain = _config(data_dir, seed, num_rounds, folder)
    return chain.model_copy(
        update={
            "algorithm": "gfedavg",
            "local_lr": chain.local_lr * NUM_EXAMPLES,
            **{k: getattr(usual, k) for k in ("temperature", "shared_noise", "prior_precision")},
        }
    )


def _run(
    config: RunConfig, watch: Callable[[RoundReport], None]
) -> tuple[PreparedRun, dict[str, Any]]:
    """The run and its summary."""
    prepared = prepare(config)
    return prepared, execute(prepared, EngineGrid(config, prepared.problem), [watch])


def _figures(
    chain: PreparedRun, fedavg: PreparedRun, data_dir: str, plots: Path | None
) -> Sequence[tuple[str, dict[str, float]]]:
    task = chain.problem.task
    assert isinstance(task, LabelledTask) and task.test is not None
    elsewhere = load_task("mnist", data_dir).test
    assert elsewhere is not None
    y = task.test.y.numpy()
    inside, outside = (
        predict_with(chain.folder, chain.config, chain.problem, examples.x)
        for examples in (task.test, elsewhere)
    )
    state = load_file(fedavg.folder / "checkpoints" / "final.safetensors")
    model = fedavg.problem.model
    averaged, averaged_outside = (
        class_probabilities(model, state, x) for x in (task.test.x, elsewhere.x)
    )
    if plots is not None:
        entropies = {"Fashion-MNIST": inside.entropy, "MNIST": outside.entropy}
        plot_entropy(entropies, task.num_classes, plots / "fa-ld-entropy.png")
    return [
        (name, {**calibration(own, y).figures(), "ood": _mean_entropy(other)})
        for name, own, other in (
            (POSTERIOR, inside.probabilities, outside.probabilities),
            (LAST, inside.point, outside.point),
            (FEDAVG, averaged, averaged_outside),
        )
    ]


def _mean_entropy(probabilities: np.ndarray) -> float:
    # The labels play no part in it.
    return calibration(probabilities, np.zeros(len(probabilities), dtype=np.int64)).entropy


def fashion_mnist_findings(figures: Mapping[str, Mapping[str, np.ndarray]]) -> list[Finding]:
    """A line a figure and system: the mean and the range over the seeds.

    Posterior averaging must have lower NLL and ECE than both others in every seed.
    """
    findings = []
    for figure in (*FIGURES, "ood"):
        ours = figures[POSTERIOR][figure]
        for name in (POSTERIOR, LAST, FEDAVG):
            values = figures[name][figure]
            expected, holds = "", True
            if figure in ("nll", "ece") and name != POSTERIOR:
                expected = f"above {POSTERIOR}, every seed"
                holds = bool((values > ours).all())
            measured = f"{values.mean():.3f} ({values.min():.3f} to {values.max():.3f})"
            findings.append(Finding(f"{_LABELS[figure]}, {name}", measured, expected, holds))
    return findings


_LABELS = {
    "accuracy": "accuracy",
    "nll": "NLL",
    "brier": "Brier score",
    "ece": "ECE",
    "entropy": "mean entropy",
    "ood": "mean entropy on MNIST",
}
