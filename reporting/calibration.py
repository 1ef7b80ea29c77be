"""How far a classifier's probabilities can be trusted."""

from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.special import logsumexp, rel_entr
from scipy.stats import rankdata

from blackthorn.reporting.prediction import entropy

NUM_BINS = 15
# Temperatures that are looked for: e^-4 to e^4.
_LOG_RANGE = (-4.0, 4.0)
# Fewer labelled examples than this fit no temperature.
_LEAST_EXAMPLES = 40


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
    truth = _one_hot(probabilities, y)
    n = len(y)
    of_truth = _logs(probabilities)[np.arange(n), y]
    confidence = probabilities.max(axis=1)
    right = probabilities.argmax(axis=1) == y
    bins = _bins(confidence)
    counts = np.bincount(bins, minlength=NUM_BINS)
    with np.errstate(invalid="ignore"):
        confidences = np.bincount(bins, weights=confidence, minlength=NUM_BINS) / counts
        accuracies = np.bincount(bins, weights=right, minlength=NUM_BINS) / counts
    return Calibration(
        accuracy=float(right.mean()),
        nll=float(-of_truth.mean()),
        brier=float(((probabilities - truth) ** 2).sum(axis=1).mean()),
        ece=float(np.nansum(counts * np.abs(accuracies - confidences)) / n),
        entropy=float(entropy(probabilities).mean()),
        counts=counts,
        confidences=confidences,
        accuracies=accuracies,
    )


@dataclass(frozen=True)
class Decomposition:
    """A proper score's mean over n predictions, in parts (Murphy 1973, Bröcker 2009; lower is
    better): score = `reliability` − `resolution` + `uncertainty` + `within`.

    Groups are of one predicted class and one of the 15 bins of its probability. With a group's mean
    probabilities p̄ [C] and frequencies of labels ȳ [C], and the frequencies ȳ_all of all, and the
    score's divergence D (Brier: ‖ȳ − p̄‖²; NLL: KL(ȳ ‖ p̄) in nats): `reliability` is the mean of
    D(ȳ, p̄), what recalibrating could gain; `resolution` that of D(ȳ, ȳ_all), what telling the
    groups apart gains; `uncertainty` the score of ȳ_all itself; `within` what the predictions vary
    inside their groups. A group of few examples makes reliability and resolution look larger, by
    the same amount.
    """

    reliability: float
    resolution: float
    uncertainty: float
    within: float


def decompositions(probabilities: np.ndarray, y: np.ndarray) -> dict[str, Decomposition]:
    """Of `brier` and `nll` of probabilities [n, C] against labels y [n] in 0..C − 1, float64.

    Raises ValueError as `calibration` does.
    """
    truth = _one_hot(probabilities, y)
    keys = probabilities.argmax(axis=1) * NUM_BINS + _bins(probabilities.max(axis=1))
    _, groups, counts = np.unique(keys, return_inverse=True, return_counts=True)
    members = np.eye(len(counts))[groups]
    predicted, found = (members.T @ part / counts[:, None] for part in (probabilities, truth))
    overall, shares = truth.mean(axis=0), counts / len(y)

    def parts(score: float, bad: np.ndarray, good: np.ndarray, uncertainty: float) -> Decomposition:
        reliability, resolution = float(shares @ bad), float(shares @ good)
        within = score - reliability + resolution - uncertainty
        return Decomposition(reliability, resolution, uncertainty, within)

    whole = calibration(probabilities, y)
    return {
        "brier": parts(
            whole.brier,
            ((found - predicted) ** 2).sum(axis=1),
            ((found - overall) ** 2).sum(axis=1),
            float(1 - (overall**2).sum()),
        ),
        "nll": parts(
            whole.nll,
            rel_entr(found, np.exp(_logs(predicted))).sum(axis=1),
            rel_entr(found, overall).sum(axis=1),
            float(entropy(overall[None])[0]),
        ),
    }


def tempered(probabilities: np.ndarray, temperature: float) -> np.ndarray:
    """softmax(log p / T) [n, C]: what a softmax gives whose inputs are divided by T."""
    logs = _logs(probabilities) / temperature
    return np.exp(logs - logsumexp(logs, axis=1, keepdims=True))


def fitted_temperature(probabilities: np.ndarray, y: np.ndarray) -> float:
    """The T from e^-4 to e^4 with the least NLL of `tempered` (Guo et al., 2017)."""
    logs, rows = _logs(probabilities), np.arange(len(y))

    def nll(log_temperature: float) -> float:
        scaled = logs * np.exp(-log_temperature)
        return float((logsumexp(scaled, axis=1) - scaled[rows, y]).mean())

    return float(np.exp(minimize_scalar(nll, bounds=_LOG_RANGE, method="bounded").x))


def cross_tempered(probabilities: np.ndarray, y: np.ndarray) -> np.ndarray | None:
    """Temperature scaling as a baseline where there are no examples beside these: each half [n/2]
    (every other example) has the temperature that was fitted on the other half, so that no
    example's label has a part in its own prediction. None for fewer than 40 examples."""
    _one_hot(probabilities, y)
    if len(y) < _LEAST_EXAMPLES:
        return None
    found = np.empty_like(probabilities)
    for own, other in ((0, 1), (1, 0)):
        temperature = fitted_temperature(probabilities[other::2], y[other::2])
        found[own::2] = tempered(probabilities[own::2], temperature)
    return found


def auroc(here: np.ndarray, elsewhere: np.ndarray) -> float:
    """The probability that a score of `elsewhere` [m] is above one of `here` [n], ties counted
    half: the area under the curve by which the score tells examples from elsewhere (Mann and
    Whitney). 1/2: it tells nothing."""
    n, m = len(here), len(elsewhere)
    ranks = rankdata(np.concatenate([elsewhere, here]))[:m]
    return float((ranks.sum() - m * (m + 1) / 2) / (n * m))


def _one_hot(probabilities: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The labels as [n, C]; ValueError for none, or what are no labels of these predictions."""
    n, classes = probabilities.shape
    if n == 0 or y.shape != (n,):
        raise ValueError(f"{n} predictions and labels of shape {y.shape}: one each, at least 1")
    if y.min() < 0 or y.max() >= classes:
        raise ValueError(f"labels are from {y.min()} to {y.max()}: allowed are 0 to {classes - 1}")
    return np.eye(classes)[y]


def _logs(probabilities: np.ndarray) -> np.ndarray:
    """ln p: one that float64 cannot tell from 0 would make a mean infinite."""
    return np.log(np.maximum(probabilities, np.finfo(np.float64).tiny))


def _bins(confidence: np.ndarray) -> np.ndarray:
    return np.clip(np.ceil(confidence * NUM_BINS).astype(int) - 1, 0, NUM_BINS - 1)
