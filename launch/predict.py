"""`blackthorn predict`: class probabilities from a run's posterior samples."""

import os
from pathlib import Path

import numpy as np
from rich.console import Console

from launch.posterior_lines import calibration_table
from server_app.calibration import calibration
from server_app.config import ConfigError, RunConfig
from server_app.posterior_plots import plot_entropy, plot_reliability
from server_app.prediction import Predictions, load_run, predict_with
from tasks.npz_file import read_npz
from tasks.problem import Problem

_SHOWN = 10


def predict(
    run: Path, data: Path, console: Console, *, out: Path | None = None, ood: Path | None = None
) -> Predictions:
    """Predict the examples x of the .npz file `data`, and say how well where it has labels y.

    Writes `out` (.npz: probabilities, entropy, mutual_information, point) where it is given, and
    plots/reliability-*.png beside it or in the run folder; with `ood`, a file of examples from
    elsewhere, the histogram of both entropies. Raises ConfigError with one line.
    """
    if out is not None and out.suffix != ".npz":
        raise ConfigError(f"--out {out} is not allowed: a name that ends in .npz")
    config, problem = load_run(run)
    x, y = read_examples(data)
    if y is not None and (y.shape != x.shape[:1] or y.dtype.kind not in "iu"):
        raise ConfigError(f"{data}: y must hold one integer for each of the {len(x)} examples")
    predictions = _predictions(run, config, problem, data, x)
    reports = {}
    if y is not None:
        try:
            reports = {
                "posterior mean": calibration(predictions.probabilities, y),
                "point estimate": calibration(predictions.point, y),
            }
        except ValueError as error:
            raise ConfigError(f"{data}: {error}") from error
    lines = [f"{len(x)} examples, {predictions.num_samples} posterior samples", ""]
    lines += _first_rows(predictions)
    plots = run / "plots" if out is None else out.parent
    _check_writable(plots)
    if reports:
        lines += ["", *calibration_table({k: r.figures() for k, r in reports.items()})]
        lines.append(str(plot_reliability(reports, plots / f"reliability-{data.stem}.png")))
    if ood is not None:
        elsewhere = _predictions(run, config, problem, ood, read_examples(ood)[0])
        # There may be files of one name in two folders.
        names = (data.stem, ood.stem if ood.stem != data.stem else f"{ood.stem} (elsewhere)")
        entropies = dict(zip(names, (predictions.entropy, elsewhere.entropy), strict=True))
        path = plots / f"entropy-{data.stem}-{ood.stem}.png"
        lines += [
            "",
            f"mean predictive entropy: {names[0]} {predictions.entropy.mean():.4f}, "
            f"{names[1]} {elsewhere.entropy.mean():.4f}",
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
        raise ConfigError(f"data {path} is not an .npz file with an array x: {error}") from error
    return arrays["x"], arrays.get("y")


def _predictions(
    run: Path, config: RunConfig, problem: Problem, path: Path, x: np.ndarray
) -> Predictions:
    try:
        return predict_with(run, config, problem, x)
    except ConfigError as error:
        # There may be two files of examples: whose x it is.
        if str(error).startswith("x "):
            raise ConfigError(f"{path}: {error}") from error
        raise


def _check_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror}") from None
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"{folder} cannot be written: give --out another folder")


def _first_rows(predictions: Predictions) -> list[str]:
    header = ("example", "class", "probability", "entropy", "information", "point class")
    lines = ["".join(f"{name:>13}" for name in header)]
    for row in range(min(_SHOWN, len(predictions.entropy))):
        probabilities = predictions.probabilities[row]
        best = int(probabilities.argmax())
        lines.append(
            f"{row:13d}{best:13d}{probabilities[best]:13.4f}{predictions.entropy[row]:13.4f}"
            f"{predictions.mutual_information[row]:13.4f}{int(predictions.point[row].argmax()):13d}"
        )
    left = len(predictions.entropy) - _SHOWN
    return [*lines, f"{'...':>13} and {left} more"] if left > 0 else lines


def _write(out: Path, predictions: Predictions) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        out,
        probabilities=predictions.probabilities,
        entropy=predictions.entropy,
        mutual_information=predictions.mutual_information,
        point=predictions.point,
    )
