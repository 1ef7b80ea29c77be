"""The local learning rate over the rounds."""

import math
from typing import Any

import numpy as np
import pytest

from blackthorn.strategies import CyclicalRate, LocalRate


def test_after_every_round_it_is_multiplied() -> None:
    rate = LocalRate(0.5, 0.5)
    assert rate.after_round(0.5, None) == 0.25
    assert rate.after_round(0.25, 0.9) == 0.125
    assert rate.initial == 0.5


def test_by_default_it_stays() -> None:
    assert LocalRate(0.3).after_round(0.3, -1.0) == 0.3


@pytest.mark.parametrize(
    ("gained", "decays"),
    [(0.00099, True), (0.001, False), (0.5, False), (0.0, True), (-0.2, True), (None, False)],
)
def test_on_a_plateau_it_decays_where_the_gain_is_known_and_small(
    gained: float | None, decays: bool
) -> None:
    rate = LocalRate(0.08, 0.96, "plateau", 0.001)
    assert rate.after_round(0.08, gained) == pytest.approx(0.08 * 0.96 if decays else 0.08)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"initial": 0.0}, "local rate = 0.0"),
        ({"initial": math.nan}, "local rate = nan"),
        ({"initial": math.inf}, "local rate = inf"),
        ({"decay": 0.0}, "decay = 0.0"),
        ({"decay": 1.01}, "decay = 1.01"),
        ({"when": "sometimes"}, "'sometimes'"),
    ],
)
def test_values_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LocalRate(**options)


def test_cyclical_steps_fall_by_a_cosine_and_begin_anew() -> None:
    """η_t = η_0 (1 + cos(π ((t − 1) mod M)/M))/2 of round t, whatever the accuracy."""
    rate = CyclicalRate(0.3, cycle_rounds=4)
    found = [rate.first]
    for server_round in range(1, 9):
        found.append(rate.after_round(found[-1], 0.5, server_round))
    one = [0.3 * (1 + math.cos(math.pi * k / 4)) / 2 for k in range(4)]
    np.testing.assert_allclose(found, [*one, *one, one[0]], rtol=1e-12)


@pytest.mark.parametrize("options", [{"cycle_rounds": 1}, {"strong_convexity": 1.0}])
def test_a_cycle_of_one_round_or_with_a_decay_is_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="cycle rounds = "):
        CyclicalRate(0.3, **{"cycle_rounds": 4, **options})  # type: ignore[arg-type]
