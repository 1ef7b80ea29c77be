"""Random numbers for privacy: the operating system's entropy, or a seed that forfeits the claim.

A guarantee is void if anybody can guess who was drawn or what the noise was, so nothing here is
derived from a run's seed unless that is asked for by name.
"""

import os
from typing import Protocol

import numpy as np
from scipy.special import ndtri

_UNIT = 2.0**-53
# Numbers drawn at a time: 2^20 are 8 MiB.
_BLOCK = 1 << 20


class Randomness(Protocol):
    """A source of independent random numbers, float64."""

    def uniform(self, size: int) -> np.ndarray:
        """`size` numbers uniform on [0, 1)."""

    def normal(self, size: int) -> np.ndarray:
        """`size` standard normal numbers."""


class SystemRandomness:
    """Every number from `os.urandom`; normal ones by inversion of the distribution function."""

    def uniform(self, size: int) -> np.ndarray:
        """Multiples of 2^-53 below 1."""
        words = np.frombuffer(os.urandom(8 * size), dtype=np.uint64)
        return (words >> np.uint64(11)) * _UNIT

    def normal(self, size: int) -> np.ndarray:
        """Φ⁻¹ at the midpoints of the 2^53 cells of (0, 1): within ±8.3."""
        result = np.empty(size)
        for start in range(0, size, _BLOCK):
            part = result[start : start + _BLOCK]
            # The upper half is the mirror of the lower one, where the midpoints are exact.
            words = np.frombuffer(os.urandom(8 * len(part)), dtype=np.uint64)
            cell = (words >> np.uint64(12)).astype(np.float64)
            lower = ndtri((cell + 0.5) * _UNIT)
            np.copyto(part, np.where(words & np.uint64(1), -lower, lower))
        return result


class SeededRandomness:
    """Reproducible numbers from integers such as (seed, round, client): never private."""

    def __init__(self, *key: int) -> None:
        self._generator = np.random.Generator(np.random.Philox(np.random.SeedSequence(list(key))))

    def uniform(self, size: int) -> np.ndarray:
        """From the generator."""
        return self._generator.random(size)

    def normal(self, size: int) -> np.ndarray:
        """From the generator."""
        return self._generator.standard_normal(size)
