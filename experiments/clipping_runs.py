"""FedAvg, CE-FedAvg and DP-FedAvg at the threshold of Zhang et al.: half the mean of ‖Δ_i‖ in the
FedAvg run."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from blackthorn.experiments.engine_run import run_watched
from blackthorn.experiments.study import Cell, Context, Label, Value
from blackthorn.strategies.bounding import row_norms
from blackthorn.strategies.instruments import measure_updates
from blackthorn.strategies.options import Observer
from blackthorn.strategies.reports import RoundReport
from blackthorn.tasks.problem import Problem

FEDAVG, CLIPPED = "FedAvg", "CE-FedAvg"
SHOWN_ROUND = 16  # of Figures 1 to 3
DELTA = 1e-5


def private_name(epsilon: float) -> str:
    """The name of DP-FedAvg at a budget."""
    return f"DP-FedAvg, ε = {epsilon:g}"


def cells(
    label: Label, values: Mapping[str, Any], epsilons: tuple[float, ...], cost: float
) -> list[Cell]:
    """FedAvg, then what needs its threshold; labels (*label, method, seed of `values`)."""
    seed = values["seed"]
    first = (*label, FEDAVG, seed)
    own: list[tuple[str, dict[str, Any]]] = [(CLIPPED, {"algorithm": "ce-fedavg"})]
    own += [(private_name(epsilon), _private(values, epsilon)) for epsilon in epsilons]
    return [
        Cell(first, unclipped, {**values, "algorithm": "gfedavg"}, cost=cost),
        *(
            Cell((*label, method, seed), clipped, {**values, **keys}, first, cost)
            for method, keys in own
        ),
    ]


def _private(values: Mapping[str, Any], epsilon: float) -> dict[str, Any]:
    """The keys of DP-FedAvg: as many clients a round in the mean, by Poisson sampling."""
    return {
        "algorithm": "dp-fedavg",
        "clip-units": "parameter",
        "participation": "poisson",
        "clients-per-round": 0,
        "sample-rate": values["clients-per-round"] / values["num-clients"],
        "epsilon": epsilon,
        "delta": DELTA,
        "clip-norm-from-data": True,
    }


def model_clipping(label: Label, values: Mapping[str, Any], cost: float) -> Cell:
    """The baseline of Claim 2.1, at the same threshold."""
    keys = {**values, "algorithm": "model-clipping"}
    first = (*label, FEDAVG, values["seed"])
    return Cell((*label, "model clipping", values["seed"]), clipped, keys, first, cost)


class _Curve:
    """Test accuracy in % after every round."""

    def __init__(self) -> None:
        self.accuracy: list[float] = []

    def see(self, report: RoundReport) -> None:
        """Note a round."""
        if report.metrics:
            self.accuracy.append(round(100 * report.metrics["accuracy"], 3))


def unclipped(settings: Mapping[str, Any], context: Context) -> Value:
    """FedAvg's "accuracy" by round; "mean norm" of Δ_i over clients and rounds; and the norms (in
    parameter units), the angles to the last global update (degrees) and the norms' coefficient
    of variation in round 16, or the last before it."""
    curve = _Curve()
    norms: list[np.ndarray] = []
    shape: Value = {}

    def watch(problem: Problem) -> Observer:
        del problem
        last = None

        def see(report: RoundReport) -> None:
            nonlocal last
            curve.see(report)
            if report.updates is None:
                return
            norms.append(report.local_lr * row_norms(report.updates).numpy())
            if report.server_round <= SHOWN_ROUND:
                found = measure_updates(report.updates, report.local_lr, last)
                shape["norms"] = [round(float(v), 5) for v in found.parameter_norms]
                shape["angles"] = [round(float(v), 2) for v in found.angles]
                shape["variation"] = found.variation
            last = report.aggregate

        return see

    run_watched(settings, context.data_dir, watch)
    return {
        "accuracy": curve.accuracy,
        "mean norm": float(np.mean(np.concatenate(norms))),
        **shape,
    }


def clipped(settings: Mapping[str, Any], context: Context) -> Value:
    """The "accuracy" by round of a method at c = half the mean norm of the FedAvg run before."""
    assert context.before is not None, "the threshold is that of a FedAvg run"
    threshold = context.before["mean norm"] / 2
    curve = _Curve()
    values = {**settings, "clip-norm": threshold}
    run_watched(values, context.data_dir, lambda _problem: curve.see)
    return {"accuracy": curve.accuracy, "c": threshold}
