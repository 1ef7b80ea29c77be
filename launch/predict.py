"""`blackthorn predict`: class probabilities from a run's posterior samples."""

import zipfile
from pathlib import Path

import numpy as np
from rich.console import Console

from launch.posterior_lines import calibration_table
from server_app.calibration import calibration
from server_app.config import ConfigError
from server_app.posterior_plots import plot_entropy, plot_reliability
from server_app.prediction import Predictions, load_run, predict_with

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
    predictions = predict_with(run, config, problem, x)
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
    if reports:
        lines += ["", *calibration_table({k: r.figures() for k, r in reports.items()})]
        lines.append(str(plot_reliability(reports, plots / f"reliability-{data.stem}.png")))
    if ood is not None:
        elsewhere = predict_with(run, config, problem, read_examples(ood)[0])
        entropies = {data.stem: predictions.entropy, ood.stem: elsewhere.entropy}
        path = plots / f"entropy-{data.stem}-{ood.stem}.png"
        lines += [
            "",
            f"mean predictive entropy: {data.stem} {predictions.entropy.mean():.4f}, "
            f"{ood.stem} {elsewhere.entropy.mean():.4f}",
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
        with np.load(path, allow_pickle=False) as archive:
            if not isinstance(archive, np.lib.npyio.NpzFile) or "x" not in archive:
                raise ValueError("it has no array x")
            return archive["x"], archive.get("y")
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"data {path} is not an .npz file with an array x: {reason}") from error


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
