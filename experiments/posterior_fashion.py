"""FA-LD on Fashion-MNIST: what averaging over posterior samples is worth."""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from blackthorn.experiments.finding import Claim, ahead, unchecked
from blackthorn.experiments.study import (
    Cell,
    Context,
    Numbers,
    Plot,
    Scale,
    Section,
    Table,
    Value,
    series,
    spread,
)
from blackthorn.reporting.calibration import calibration
from blackthorn.reporting.figures import CYCLE, legend_above, new_figure
from blackthorn.reporting.prediction import class_probabilities, predict_with
from blackthorn.server_app.prepared_run import PreparedRun
from blackthorn.server_app.run import execute, prepare
from blackthorn.settings.config import RunConfig, make_config
from blackthorn.simulation.engine import EngineGrid
from blackthorn.tasks.labelled import LabelledTask, load_task

# recipes/fa-ld-fashion-mnist.toml (a test compares them).
SETTING: dict[str, str | int | float | bool] = {
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
POSTERIOR, LAST, FEDAVG = "posterior averaging", "last iterate", "FedAvg"
SYSTEMS = (POSTERIOR, LAST, FEDAVG)


def cells(scale: Scale) -> list[Cell]:
    """A chain and its FedAvg for every seed; on the digits where Fashion-MNIST is not at hand."""
    task = scale.data_set("fashion-mnist")
    values = {**SETTING, "task": task}
    if scale.quick:
        values |= {"num-server-rounds": 90, "burn-in": 30, "evaluate-every": 90}
    if task == "digits":
        # The examples of a client must not be more than a label has.
        values |= {"examples-per-client": 50, "num-server-rounds": 20, "burn-in": 7}
    return [
        Cell((seed,), figures_of_seed, {**values, "seed": seed, "langevin-seed": seed}, cost=40)
        for seed in range(scale.num_seeds(3, 1))
    ]


def figures_of_seed(settings: Mapping[str, Any], context: Context) -> Value:
    """Test figures of posterior averaging, of the chain's last iterate and of FedAvg.

    FedAvg takes the same rounds, clients, local steps and batches, with the same step on the mean
    loss (its rate is n times the step size on the sum), without noise or prior. "ood" is the mean
    predictive entropy on MNIST, beside that on the test set ("entropy"); "entropies" are the two
    distributions over 40 equal bins from 0 to ln(classes).
    """
    with tempfile.TemporaryDirectory() as folder:
        values = {**settings, "data-dir": context.data_dir, "report": False}
        chain = run(make_config({**values, "output-dir": str(Path(folder) / "fa-ld")}))
        fedavg = run(fedavg_of(chain.config, Path(folder) / "fedavg"))
        return _figures(chain, fedavg, context.data_dir)


def fedavg_of(chain: RunConfig, folder: Path) -> RunConfig:
    """FedAvg at the same cost, and with the same step on the mean loss."""
    usual = make_config({})
    examples = chain.num_clients * chain.examples_per_client
    return chain.model_copy(
        update={
            "algorithm": "gfedavg",
            "local_lr": chain.local_lr * examples,
            "output_dir": str(folder),
            **{k: getattr(usual, k) for k in ("temperature", "shared_noise", "prior_precision")},
        }
    )


def run(config: RunConfig) -> PreparedRun:
    """The run, done."""
    prepared = prepare(config)
    execute(prepared, EngineGrid(config, prepared.problem), [])
    return prepared


def _figures(chain: PreparedRun, fedavg: PreparedRun, data_dir: str) -> Value:
    task = chain.problem.task
    assert isinstance(task, LabelledTask) and task.test is not None
    y = task.test.y.numpy()
    # Images of another kind: for the digits, their negatives.
    elsewhere = 1 - task.test.x if task.name == "digits" else _mnist(data_dir)
    inside, outside = (
        predict_with(chain.folder, chain.problem, x) for x in (task.test.x, elsewhere)
    )
    state = load_file(fedavg.folder / "checkpoints" / "final.safetensors")
    model = fedavg.problem.model
    averaged, averaged_outside = (
        class_probabilities(model, state, x) for x in (task.test.x, elsewhere)
    )
    value: Value = {
        name: {**calibration(own, y).figures(), "ood": _mean_entropy(other)}
        for name, own, other in (
            (POSTERIOR, inside.probabilities, outside.probabilities),
            (LAST, inside.point, outside.point),
            (FEDAVG, averaged, averaged_outside),
        )
    }
    edges = np.linspace(0, np.log(task.num_classes), 41)
    value["entropies"] = {
        name: np.histogram(own, edges, density=True)[0].round(5).tolist()
        for name, own in (("test set", inside.entropy), ("another kind", outside.entropy))
    }
    return value


def _mnist(data_dir: str) -> Any:
    test = load_task("mnist", data_dir).test
    assert test is not None
    return test.x


def _mean_entropy(probabilities: np.ndarray) -> float:
    # The labels play no part in it.
    return calibration(probabilities, np.zeros(len(probabilities), dtype=np.int64)).entropy


Figures = Mapping[str, Mapping[str, np.ndarray]]


def section(numbers: Numbers, scale: Scale) -> Section:
    """The table of test figures, and the entropies' histogram."""
    values = series(numbers)
    figures = {
        name: {figure: np.array([own[name][figure] for own in values]) for figure in _LABELS}
        for name in SYSTEMS
    }
    rows = [
        [label, *(spread(list(figures[name][figure]), 3) for name in SYSTEMS)]
        for figure, label in _LABELS.items()
    ]
    table = Table(
        "Test figures, mean ± standard error (range) over the seeds", ["", *SYSTEMS], rows
    )
    found = claims(figures)
    texts = ["The paper reports no data set; this is what its method is for."]
    if scale.data_set("fashion-mnist") == "digits":
        found = unchecked(found, "no Fashion-MNIST")
        texts.append("Fashion-MNIST is not at hand: this was measured on scikit-learn's digits.")
        return Section(found, [table], texts=texts, setting=SETTING)
    if scale.quick:
        texts.append("Quick: one seed and 90 rounds.")
    return Section(found, [table], [_entropy_plot(values[0]["entropies"])], texts, SETTING)


def claims(figures: Figures) -> list[Claim]:
    """Posterior averaging must have lower NLL and ECE than both others."""
    found = []
    for figure in ("nll", "ece"):
        ours = figures[POSTERIOR][figure]
        findings = []
        for name in (LAST, FEDAVG):
            what = f"of {name} and of posterior averaging"
            values = figures[name][figure]
            findings.append(ahead(what, values, ours, "the second lower", digits=3))
        text = f"Averaging over posterior samples lowers the {_LABELS[figure]}."
        found.append(Claim(text, findings, ours=True))
    return found


def _entropy_plot(entropies: Mapping[str, Sequence[float]]) -> Plot:
    figure = new_figure()
    axes = figure.add_subplot()
    edges = np.linspace(0, np.log(10), 41)
    for i, (name, heights) in enumerate(entropies.items()):
        style = ("-", "--")[i]
        axes.stairs(heights, edges, color=CYCLE[i], label=name, linestyle=style, lw=1.5)
    axes.set(xlabel="predictive entropy (nats)", ylabel="density (per nat)")
    legend_above(axes)
    caption = "Predictive entropy on the test set, and on images of another kind."
    return Plot("entropy", caption, figure)


_LABELS = {
    "accuracy": "accuracy",
    "nll": "NLL",
    "brier": "Brier score",
    "ece": "ECE",
    "entropy": "mean entropy",
    "ood": "mean entropy on images of another kind",
}
