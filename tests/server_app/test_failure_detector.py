"""When a run counts as catastrophically failed."""

import math

import pytest

from blackthorn.server_app.instruments import FailureDetector


def failed_round(num_classes: int, accuracies: list[float | None]) -> int | None:
    detector = FailureDetector(num_classes)
    for server_round, accuracy in enumerate(accuracies):
        detector.see(server_round, accuracy, None if accuracy is None else 1.0)
    return detector.failed_round


@pytest.mark.parametrize(
    ("num_classes", "accuracies", "expected"),
    [
        # Ten classes: learned from 20 %, lost at 15 % and below.
        (10, [0.1, 0.5, 0.9, 0.95], None),
        (10, [0.1, 0.5, 0.9, 0.1], 3),
        (10, [0.1, 0.5, 0.9, 0.15], 3),
        (10, [0.1, 0.5, 0.9, 0.151], None),
        (10, [0.1, 0.2, 0.15], 2),
        (10, [0.1, 0.199, 0.1, 0.05], None),
        (10, [0.9, 0.0], 1),
        # Never learned: slow or hopeless is not catastrophic.
        (10, [0.1, 0.12, 0.09, 0.1], None),
        # The first round of failure stays, whatever comes after.
        (10, [0.5, 0.1, 0.9, 0.1], 1),
        # Rounds without an evaluation tell nothing.
        (10, [0.5, None, None, 0.1], 3),
        (10, [0.5, None, None], None),
        # Two classes: chance is 50 %. Worse than chance is lost too.
        (2, [0.5, 0.59, 0.5], None),
        (2, [0.5, 0.6, 0.55], 2),
        (2, [0.5, 0.9, 0.56], None),
        (2, [0.5, 0.9, 0.2], 2),
        # A hundred classes: 11 % is learned, 6 % is lost; thirds are no floating-point numbers.
        (100, [0.11, 0.06], 1),
        (100, [0.11, 0.061], None),
        (3, [1 / 3 + 0.1, 1 / 3 + 0.05], 1),
    ],
)
def test_accuracies(num_classes: int, accuracies: list[float | None], expected: int | None) -> None:
    assert failed_round(num_classes, accuracies) == expected


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("accuracy", [0.9, None])
def test_a_loss_that_is_not_finite(loss: float, accuracy: float | None) -> None:
    detector = FailureDetector(10)
    detector.see(1, accuracy, 1e300)
    assert detector.failed_round is None
    detector.see(2, accuracy, loss)
    detector.see(3, accuracy, 1.0)
    assert detector.failed_round == 2


@pytest.mark.parametrize("num_classes", [0, 1])
def test_without_classes_only_the_loss_tells(num_classes: int) -> None:
    assert failed_round(num_classes, [0.9, 0.0]) is None
    detector = FailureDetector(num_classes)
    detector.see(4, None, math.inf)
    assert detector.failed_round == 4
