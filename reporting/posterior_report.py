"""What a run says of its posterior samples when it ends."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from blackthorn.recording.folder_place import PLOTS
from blackthorn.recording.posterior_store import (
    FOLDER,
    noisier_rounds,
    read_samples,
    sample_rounds,
)
from blackthorn.reporting.calibration import calibration, cross_tempered, decompositions
from blackthorn.reporting.posterior_diagnostics import (
    Diagnosis,
    collect_traces,
    diagnose,
    gaussian_distance,
)
from blackthorn.reporting.posterior_plots import (
    plot_autocorrelation,
    plot_reliability,
    plot_traces,
)
from blackthorn.reporting.prediction import Predictions, predict_with
from blackthorn.reporting.report_facts import CALIBRATED
from blackthorn.settings.config import RunConfig
from blackthorn.strategies.durable_file import replace_file
from blackthorn.tasks.bayes_linear import BayesLinear
from blackthorn.tasks.labelled import LabelledTask
from blackthorn.tasks.problem import Problem

# Bounds of Vehtari, Gelman, Simpson, Carpenter and Bürkner (2021), the latter of one chain.
RHAT_MOST, ESS_LEAST = 1.01, 100


def report_posterior(run: Path, config: RunConfig, problem: Problem) -> dict[str, Any]:
    """Diagnostics, plots and figures of a run's samples; the result is for summary.json.

    Writes posterior/diagnostics.json and, unless `report` is false,
    plots/{trace,autocorrelation,reliability}.png.
    `samples_rescaled` of the `samples` are of rounds in which a client was missing.
    `w2` where the posterior is known, `posterior` and `point` where there is a test set.
    """
    rounds = sample_rounds(run)
    found: dict[str, Any] = {"samples": len(rounds), "samples_rescaled": len(noisier_rounds(run))}
    if not rounds:
        return found
    found.update(_mixing(run, config, problem))
    if isinstance(problem.task, BayesLinear) and len(rounds) > 1:
        found["w2"] = distance_to_posterior(run, config, problem, problem.task)
    if isinstance(problem.task, LabelledTask) and problem.task.test is not None:
        found.update(_calibration(run, config, problem, problem.task))
    return found


def check_posterior(config: RunConfig, problem: Problem) -> None:
    """Raises ValueError where it is known that there is no posterior to sample."""
    if isinstance(problem.task, BayesLinear):
        problem.task.posterior(config.prior_precision, config.temperature)


def distance_to_posterior(
    run: Path, config: RunConfig, problem: Problem, task: BayesLinear
) -> float:
    """W2 between the Gaussian with the stored samples' moments and the exact posterior."""
    exact = task.posterior(config.prior_precision, config.temperature)
    samples = torch.stack(
        [
            problem.model.flatten({k: torch.from_numpy(v) for k, v in sample.state.items()})
            for sample in read_samples(run)
        ]
    ).double()
    # atleast_2d: in one dimension the covariance is a number.
    covariance = torch.atleast_2d(torch.cov(samples.T))
    return gaussian_distance(samples.mean(dim=0), covariance, exact.mean, exact.covariance)


def _mixing(run: Path, config: RunConfig, problem: Problem) -> dict[str, Any]:
    traces = collect_traces([run], problem)
    diagnoses = diagnose(traces)
    rows = [{k: number_or_none(v) for k, v in asdict(d).items()} for d in diagnoses]
    text = json.dumps(rows, indent=2) + "\n"
    replace_file(run / FOLDER / "diagnostics.json", text.encode())
    if config.report and traces.values.shape[1] > 1:
        plot_traces(traces, run / PLOTS / "trace.png")
        plot_autocorrelation(traces, run / PLOTS / "autocorrelation.png")
    return {**worst(diagnoses), "mixing": mixing(diagnoses, 1)}


def worst(diagnoses: list[Diagnosis]) -> dict[str, float | None]:
    """Smallest effective sample sizes, of bulk and tails, and largest split-R̂ over all scalars."""
    ess = [d.ess for d in diagnoses if math.isfinite(d.ess)]
    tail = [d.ess_tail for d in diagnoses if math.isfinite(d.ess_tail)]
    rhat = [d.rhat for d in diagnoses if math.isfinite(d.rhat)]
    return {
        "ess_min": min(ess, default=None),
        "ess_tail_min": min(tail, default=None),
        "rhat_max": max(rhat, default=None),
    }


def mixing(diagnoses: list[Diagnosis], chains: int) -> str:
    """Whether the `chains` have mixed, in words, by the bounds of Vehtari et al. (2021): split-R̂ at
    most 1.01, and effective sample sizes of bulk and tails of 100 a chain; if not, what to change.
    """
    known = [d for d in diagnoses if math.isfinite(d.rhat)]
    if not known:
        return "not known to have mixed: fewer than 8 samples a chain, or none that moves"
    widest = max(known, key=lambda d: d.rhat)
    if widest.rhat > RHAT_MOST:
        where = "the chains end in different places" if chains > 1 else "the chain still drifts"
        return (
            f"not mixed: {widest.name} has a split-R-hat of {widest.rhat:.3f}, above "
            f"{RHAT_MOST:g}: {where}. Run more rounds (num-server-rounds) after a longer burn-in, "
            "or move further in each: a larger local-lr or local-steps, algorithm = sghmc, or "
            "step-size = cyclical"
        )
    worst_of = min(known, key=lambda d: min(d.ess, d.ess_tail))
    worth, needed = min(worst_of.ess, worst_of.ess_tail), ESS_LEAST * chains
    if worth < needed:
        return (
            f"not mixed: the samples of {worst_of.name} are worth {worth:.0f} independent ones, "
            f"fewer than {needed}: run more rounds (num-server-rounds; thinning saves disk alone), "
            "or move further in each: a larger local-lr or local-steps"
        )
    return f"mixed: split-R-hat at most {RHAT_MOST:g}, effective samples at least {needed}"


def _calibration(
    run: Path, config: RunConfig, problem: Problem, task: LabelledTask
) -> dict[str, Any]:
    assert task.test is not None
    predictions = predict_with(run, problem, task.test.x)
    y = task.test.y.numpy()
    rows = compared(predictions, y)
    reports = {name: calibration(own, y) for name, own in rows.items()}
    if config.report:
        plot_reliability(reports, run / PLOTS / "reliability.png")
    information = float(np.mean(predictions.mutual_information))
    found: dict[str, Any] = {
        CALIBRATED[name]: {**report.figures(), **_parts(rows[name], y)}
        for name, report in reports.items()
    }
    found["posterior"]["mutual_information"] = information
    return found


def compared(predictions: Predictions, y: np.ndarray) -> dict[str, np.ndarray]:
    """By name, the probabilities [n, C] that are shown beside each other for labels y [n]: the
    posterior's mean where there are samples, the point estimate, and the latter with a temperature
    (`cross_tempered`), which is what averaging over samples has to beat."""
    sampled = predictions.num_samples > 0
    rows = {"posterior mean": predictions.probabilities} if sampled else {}
    point = "point estimate" if sampled else "final model"
    rows[point] = predictions.point
    scaled = cross_tempered(predictions.point, y)
    return rows if scaled is None else {**rows, f"{point}, tempered": scaled}


def _parts(probabilities: np.ndarray, y: np.ndarray) -> dict[str, float]:
    return {
        f"{score}_{part}": value
        for score, parts in decompositions(probabilities, y).items()
        for part, value in asdict(parts).items()
    }


def number_or_none(value: Any) -> Any:
    """JSON has no NaN and no infinity: None in their place."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
