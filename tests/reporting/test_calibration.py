"""Parts of proper scores, temperatures and the area under the curve, by definition."""

import math

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from blackthorn.reporting.calibration import (
    auroc,
    calibration,
    cross_tempered,
    decompositions,
    fitted_temperature,
    tempered,
)

CLASSES = 4


def drawn(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities [n, C] and labels that follow just those."""
    generator = np.random.default_rng(seed)
    probabilities = generator.dirichlet(np.full(CLASSES, 0.5), size=n)
    return probabilities, np.array([generator.choice(CLASSES, p=p) for p in probabilities])


def sharpened(probabilities: np.ndarray, power: float) -> np.ndarray:
    found = probabilities**power
    return found / found.sum(axis=1, keepdims=True)


def test_the_parts_of_two_forecasts_are_those_by_hand() -> None:
    """(0.7, 0.3) ten times, of which six are class 0; (0.2, 0.8) five times, of which one is."""
    probabilities = np.array([[0.7, 0.3]] * 10 + [[0.2, 0.8]] * 5)
    y = np.array([0] * 6 + [1] * 4 + [0] + [1] * 4)
    found, base = decompositions(probabilities, y), 7 / 15

    def divergence(p: float, q: float) -> float:
        return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))

    brier = found["brier"]
    assert brier.reliability == pytest.approx(2 / 3 * 2 * 0.1**2)
    assert brier.resolution == pytest.approx(
        2 / 3 * 2 * (0.6 - base) ** 2 + 1 / 3 * 2 * (0.2 - base) ** 2
    )
    assert brier.uncertainty == pytest.approx(2 * base * (1 - base))
    nll = found["nll"]
    assert nll.reliability == pytest.approx(2 / 3 * divergence(0.6, 0.7))
    assert nll.resolution == pytest.approx(
        2 / 3 * divergence(0.6, base) + 1 / 3 * divergence(0.2, base)
    )
    assert nll.uncertainty == pytest.approx(
        -base * math.log(base) - (1 - base) * math.log(1 - base)
    )
    # All of a group's predictions are alike: nothing is left over, so the parts are the scores.
    assert (brier.within, nll.within) == pytest.approx((0, 0), abs=1e-12)


def test_what_varies_inside_a_group_is_the_brier_score_s_rest() -> None:
    """Of one group: the predictions' variance less twice their covariance with the labels."""
    probabilities = np.array([[0.61, 0.39], [0.66, 0.34], [0.63, 0.37], [0.65, 0.35]])
    y = np.array([0, 1, 1, 0])
    truth, found = np.eye(2)[y], decompositions(probabilities, y)["brier"]
    apart, of_labels = probabilities - probabilities.mean(0), truth - truth.mean(0)
    expected = (apart**2).sum(1).mean() - 2 * (apart * of_labels).sum(1).mean()
    assert found.within == pytest.approx(expected, abs=1e-12)
    assert abs(expected) > 1e-3


def test_sharper_forecasts_lose_reliability_and_keep_their_resolution() -> None:
    honest, y = drawn(20_000)
    true, sharp = decompositions(honest, y), decompositions(sharpened(honest, 3.0), y)
    for score in ("brier", "nll"):
        assert true[score].reliability < 0.01
        assert sharp[score].reliability > 5 * true[score].reliability
        assert sharp[score].uncertainty == true[score].uncertainty
        assert sharp[score].resolution == pytest.approx(true[score].resolution, rel=0.15)


@pytest.mark.parametrize("power", [0.5, 1.0, 2.5])
def test_the_fitted_temperature_undoes_a_sharpening(power: float) -> None:
    """p^power at T = power is p, under which the labels were drawn."""
    honest, y = drawn(20_000)
    sharp = sharpened(honest, power)
    np.testing.assert_allclose(tempered(sharp, power), honest, rtol=1e-9, atol=1e-12)
    assert fitted_temperature(sharp, y) == pytest.approx(power, rel=0.05)


def test_no_temperature_on_a_grid_is_better_than_the_fitted_one() -> None:
    honest, y = drawn(500, seed=3)
    sharp = sharpened(honest, 2.0)
    best = calibration(tempered(sharp, fitted_temperature(sharp, y)), y).nll
    assert best <= min(calibration(tempered(sharp, t), y).nll for t in np.geomspace(0.1, 10, 400))


def test_no_label_has_a_part_in_its_own_prediction() -> None:
    honest, y = drawn(400, seed=5)
    sharp = sharpened(honest, 2.0)
    found, changed = cross_tempered(sharp, y), y.copy()
    changed[::2] = (changed[::2] + 1) % CLASSES
    other = cross_tempered(sharp, changed)
    assert found is not None and other is not None
    np.testing.assert_array_equal(found[::2], other[::2])
    assert np.abs(found[1::2] - other[1::2]).max() > 0.01
    assert calibration(found, y).nll < calibration(sharp, y).nll - 0.05


def test_a_few_labels_fit_no_temperature() -> None:
    honest, y = drawn(40)
    assert cross_tempered(honest[:39], y[:39]) is None
    assert cross_tempered(honest, y) is not None


def test_sure_predictions_have_finite_parts_and_temperatures() -> None:
    sure, y = np.eye(CLASSES)[[0, 1, 2, 3] * 10], np.array([0, 1, 2, 0] * 10)
    scores = decompositions(sure, y)
    assert all(math.isfinite(scores[name].reliability) for name in scores)
    assert math.isfinite(fitted_temperature(sure, y))


def test_the_area_is_that_of_all_pairs_and_of_another_library() -> None:
    generator = np.random.default_rng(2)
    here, elsewhere = generator.integers(0, 9, 60) / 8, generator.integers(3, 12, 45) / 8
    pairs = np.mean([(b > a) + 0.5 * (b == a) for a in here for b in elsewhere])
    assert auroc(here, elsewhere) == pytest.approx(pairs)
    labels = np.repeat([0, 1], [60, 45])
    theirs = roc_auc_score(labels, np.concatenate([here, elsewhere]))
    assert auroc(here, elsewhere) == pytest.approx(theirs)
    assert auroc(here, here) == 0.5
