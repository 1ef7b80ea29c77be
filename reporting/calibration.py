"""How far a classifier's probabilities can be trusted."""

from dataclasses import dataclass

import numpy as np

from blackthorn.reporting.prediction import entropy

NUM_BINS = 15


@dataclass(frozen=True)
class Calibration:
    """Of n predictions; `nll`, `entropy` in nats.

    `brier`: mean of Σ_c (p_c − [y = c])². `ece`: Σ_b |b|/n |accuracy(b) − confidence(b)| over 15
    bins of equal width in the largest probability, (0, 1/15], ..., (14/15, 1]. `counts`,
    `confidences` and `accuracies` [15] are the bins', NaN where a bin is empty.
    """

    accuracy: float
    nll: float
    brier: float
    ece: float
    entropy: float
    counts: np.ndarray
    confidences: np.ndarray
    accuracies: np.ndarray

    def figures(self) -> dict[str, float]:
        """The numbers without the bins."""
        return {
            "accuracy": self.accuracy,
            "nll": self.nll,
            "brier": self.brier,
            "ece": self.ece,
            "entropy": self.entropy,
        }


def calibration(probabilities: np.ndarray, y: np.ndarray) -> Calibration:
    """Report of probabilities [n, C] against labels y [n] in 0..C − 1.

    Raises ValueError where there are no examples, or labels without a class.
    """
    n, classes = probabilities.shape
    if n == 0 or y.shape != (n,):
        raise ValueError(f"{n} predictions and labels of shape {y.shape}: one each, at least 1")
    if y.min() < 0 or y.max() >= classes:
        raise ValueError(f"labels are from {y.min()} to {y.max()}: allowed are 0 to {classes - 1}")
    truth = np.eye(classes)[y]
    # A probability that float64 cannot tell from 0 would make the mean infinite.
    of_truth = np.maximum(probabilities[np.arange(n), y], np.finfo(np.float64).tiny)
    confidence = probabilities.max(axis=1)
    right = probabilities.argmax(axis=1) == y
    bins = np.clip(np.ceil(confidence * NUM_BINS).astype(int) - 1, 0, NUM_BINS - 1)
    counts = np.bincount(bins, minlength=NUM_BINS)
    with np.errstate(invalid="ignore"):
        confidences = np.bincount(bins, weights=confidence, minlength=NUM_BINS) / counts
        accuracies = np.bincount(bins, weights=right, minlength=NUM_BINS) / counts
    return Calibration(
        accuracy=float(right.mean()),
        nll=float(-np.log(of_truth).mean()),
        brier=float(((probabilities - truth) ** 2).sum(axis=1).mean()),
        ece=float(np.nansum(counts * np.abs(accuracies - confidences)) / n),
        entropy=float(entropy(probabilities).mean()),
        counts=counts,
        confidences=confidences,
        accuracies=accuracies,
    )
