"""What all plots have in common."""

import itertools
from typing import Any

import numpy as np
import pytest

from blackthorn.reporting.figures import CYCLE

# Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB.
PROTANOPIA = [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
              [-0.003882, -0.048116, 1.051998]]  # fmt: skip
DEUTERANOPIA = [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
                [-0.011820, 0.042940, 0.968881]]  # fmt: skip
TO_XYZ = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
WHITE = (0.9505, 1.0, 1.089)


def lab(colour: str, deficiency: Any) -> np.ndarray:
    """CIE L*a*b* of a colour as somebody with the deficiency sees it."""
    srgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    xyz = np.array(TO_XYZ) @ np.clip(np.array(deficiency) @ linear, 0, 1) / WHITE
    f = np.where(xyz > (6 / 29) ** 3, np.cbrt(xyz), xyz / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("deficiency", [np.eye(3), PROTANOPIA, DEUTERANOPIA])
def test_the_colour_blind_can_tell_the_colours_apart(deficiency: Any) -> None:
    for one, other in itertools.combinations(CYCLE, 2):
        difference = np.linalg.norm(lab(one, deficiency) - lab(other, deficiency))
        assert difference > 15, (one, other)
