"""`blackthorn predict`: class probabilities by a run's final model or its posterior samples."""

import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from blackthorn.launch.commands.posterior_lines import calibration_table, parts_table
from blackthorn.recording.folder_place import PREDICTIONS
from blackthorn.reporting.calibration import auroc, calibration, decompositions
from blackthorn.reporting.posterior_plots import plot_entropy, plot_reliability
from blackthorn.reporting.posterior_report import compared
from blackthorn.reporting.prediction import Predictions, load_run, predict_with
from blackthorn.settings.config import ConfigError
from blackthorn.strategies.durable_file import private_folder
from blackthorn.tasks.npz_file import read_npz
from blackthorn.tasks.problem import Problem

_SHOWN = 10


def predict(
    run: Path, data: Path, console: Console, *, out: Path | None = None, ood: Path | None = None
) -> Predictions:
    """Predict the examples x of the .npz file `data`, and say how well where it has labels y.

    Writes `out` (.npz: probabilities, entropy; with posterior samples also mutual_information and
    point, the final model's probabilities) where it is given, and reliability-*.png beside it or
    in the run's predictions/, which is its owner's alone: the examples may be anybody's. With
    `ood`, a file of examples from elsewhere, the histogram of both entropies. Raises ConfigError
    with one line.
    """
    if out is not None and out.suffix != ".npz":
        raise ConfigError(f"--out {out} is not allowed: a name that ends in .npz")
    _, problem = load_run(run)
    x, y = read_examples(data)
    if y is not None and (y.shape != x.shape[:1] or y.dtype.kind not in "iu"):
        raise ConfigError(f"{data}: y must hold one integer for each of the {len(x)} examples")
    predictions = _predictions(run, problem, data, x)
    reports, parts = {}, []
    if y is not None:
        try:
            rows = compared(predictions, y)
            reports = {name: calibration(own, y) for name, own in rows.items()}
            parts = _parts(rows, y)
        except ValueError as error:
            raise ConfigError(f"{data}: {error}") from error
    models = f"{predictions.num_samples} posterior samples"
    if predictions.num_samples == 0:
        models = "the final model"
    lines = [f"{_count(len(x))}, {models}", ""]
    lines += _first_rows(predictions)
    plots = _folder(run, out)
    if reports:
        lines += ["", *calibration_table({k: r.figures() for k, r in reports.items()}), *parts]
        lines.append(str(plot_reliability(reports, plots / f"reliability-{data.stem}.png")))
    if ood is not None:
        elsewhere = _predictions(run, problem, ood, read_examples(ood)[0])
        # There may be files of one name in two folders.
        names = (data.stem, ood.stem if ood.stem != data.stem else f"{ood.stem} (elsewhere)")
        entropies = dict(zip(names, (predictions.entropy, elsewhere.entropy), strict=True))
        path = plots / f"entropy-{data.stem}-{ood.stem}.png"
        lines += [
            "",
            f"mean predictive entropy: {names[0]} {predictions.entropy.mean():.4f}, "
            f"{names[1]} {elsewhere.entropy.mean():.4f}",
            *_told_apart(predictions, elsewhere),
            str(plot_entropy(entropies, problem.task.num_classes, path)),
        ]
    if out is not None:
        _write(out, predictions)
        lines.append(str(out))
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
    return predictions


def read_examples(path: Path) -> tuple[np.ndarray, np.ndarray | None]:
    """x, and y where it is there, of an .npz file. Raises ConfigError with one line."""
    try:
        arrays = read_npz(path, ("x",), optional=("y",))
    except ValueError as error:
        raise ConfigError(
            f"data {path} cannot be read as an .npz file with an array x: {error}"
        ) from error
    return arrays["x"], arrays.get("y")


def _predictions(run: Path, problem: Problem, path: Path, x: np.ndarray) -> Predictions:
    try:
        return predict_with(run, problem, x)
    except ConfigError as error:
        # There may be two files of examples: whose x it is.
        if str(error).startswith("x "):
            raise ConfigError(f"{path}: {error}") from error
        raise


def _folder(run: Path, out: Path | None) -> Path:
    """Where plots go, made where it is not there yet; ConfigError where they cannot."""
    folder = run / PREDICTIONS if out is None else out.parent
    try:
        if out is None:
            private_folder(folder)
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror}") from None
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"{folder} cannot be written: give --out another folder")
    return folder


def _parts(rows: Mapping[str, np.ndarray], y: np.ndarray) -> list[str]:
    found = {name: decompositions(own, y) for name, own in rows.items()}
    return [
        line
        for score in ("brier", "nll")
        for line in ("", *parts_table(score, {n: asdict(both[score]) for n, both in found.items()}))
    ]


def _told_apart(here: Predictions, elsewhere: Predictions) -> list[str]:
    """How well each uncertainty tells an example from elsewhere, in its area under the curve."""
    scores = {"entropy": (here.entropy, elsewhere.entropy)}
    if here.num_samples:
        scores["mutual information"] = (here.mutual_information, elsewhere.mutual_information)
        scores["point estimate's entropy"] = (here.point_entropy, elsewhere.point_entropy)
    told = ", ".join(f"{name} {auroc(*both):.4f}" for name, both in scores.items())
    return [f"told apart (AUROC; 0.5: not at all): {told}"]


def _count(examples: int) -> str:
    return f"{examples} example{'' if examples == 1 else 's'}"


def _first_rows(predictions: Predictions) -> list[str]:
    shown = range(min(_SHOWN, len(predictions.entropy)))
    columns: dict[str, list[str]] = {
        "example": [f"{row}" for row in shown],
        "class": [f"{predictions.probabilities[row].argmax()}" for row in shown],
        "probability": [f"{predictions.probabilities[row].max():.4f}" for row in shown],
        "entropy": [f"{predictions.entropy[row]:.4f}" for row in shown],
    }
    if predictions.num_samples:
        columns["information"] = [f"{predictions.mutual_information[row]:.4f}" for row in shown]
        columns["point class"] = [f"{predictions.point[row].argmax()}" for row in shown]
    lines = ["".join(f"{name:>13}" for name in columns)]
    for cells in zip(*columns.values(), strict=True):
        lines.append("".join(f"{cell:>13}" for cell in cells))
    left = len(predictions.entropy) - _SHOWN
    return [*lines, f"{'...':>13} and {left} more"] if left > 0 else lines


def _write(out: Path, predictions: Predictions) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, Any] = {
        "probabilities": predictions.probabilities,
        "entropy": predictions.entropy,
    }
    if predictions.num_samples:
        arrays["mutual_information"] = predictions.mutual_information
        arrays["point"] = predictions.point
    np.savez_compressed(out, **arrays)
