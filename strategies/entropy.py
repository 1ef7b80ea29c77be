"""Random numbers for privacy: the operating system's entropy, or a seed that forfeits the claim.

A guarantee is void if anybody can guess who was drawn or what the noise was, so nothing here is
derived from a run's seed unless that is asked for by name.
"""

import os
from typing import Protocol

import numpy as np

from blackthorn.randomness import Stream, generator_of

# Numbers drawn at a time: 2^20 are 8 MiB.
_BLOCK = 1 << 20
_SIGN, _EXPONENT = np.uint64(1), np.uint64(53)
# Words that one number may take beside its first: 11 + 18 · 53 leading zeros, 2^-965.
_MORE_WORDS = 18
# Where the tails of normal numbers end: -Φ⁻¹(2^-967).
LARGEST_NORMAL = 36.489905447635216


class Randomness(Protocol):
    """A source of independent random numbers, float64."""

    def uniform(self, size: int) -> np.ndarray:
        """`size` numbers uniform on [0, 1): below q with probability q."""

    def normal(self, size: int) -> np.ndarray:
        """`size` standard normal numbers."""


class SystemRandomness:
    """Every number from `os.urandom`; normal ones by inversion of the distribution function."""

    def uniform(self, size: int) -> np.ndarray:
        """Float64 numbers of (0, 1), down to 2^-965 with full precision: below any rate q, itself
        a float64, with probability q exactly."""
        return _fractions(_words(size))

    def normal(self, size: int) -> np.ndarray:
        """±Φ⁻¹(u/2) with u as in `uniform`: the tails reach to `LARGEST_NORMAL` = 36.5."""
        # Imported here, since the import takes longer than that of all strategies.
        from scipy.special import ndtri

        result = np.empty(size)
        for start in range(0, size, _BLOCK):
            part = result[start : start + _BLOCK]
            words = _words(len(part))
            lower = ndtri(_fractions(words) / 2)
            np.copyto(part, np.where(words & _SIGN, -lower, lower))
        return result


def _words(size: int) -> np.ndarray:
    """Random bits, uint64 [size]."""
    return np.frombuffer(os.urandom(8 * size), dtype=np.uint64)


def _fractions(words: np.ndarray) -> np.ndarray:
    """A number uniform on (0, 1), rounded down to a float64, from all but the lowest bit of every
    word: 52 bits after the leading 1, and as many leading zeros as coin tosses give.

    One number in 2^11 needs more tosses than its word has, and gets words of its own.
    """
    zeros = 11 - _bit_length(words >> _EXPONENT)
    going_on = np.flatnonzero(zeros == 11)
    for _ in range(_MORE_WORDS):
        if len(going_on) == 0:
            break
        more = 53 - _bit_length(_words(len(going_on)) >> np.uint64(11))
        zeros[going_on] += more
        going_on = going_on[more == 53]
    mantissa = (words << np.uint64(11)) >> np.uint64(12)
    return np.ldexp(1 + mantissa * 2.0**-52, -1 - zeros)


def _bit_length(numbers: np.ndarray) -> np.ndarray:
    """Of numbers below 2^53, which float64 holds exactly; int32."""
    return np.frexp(numbers.astype(np.float64))[1]


class SeededRandomness:
    """Reproducible numbers of a stream, from a seed and what follows it: never private."""

    def __init__(self, stream: Stream, seed: int, *numbers: int) -> None:
        self._generator = generator_of(stream, seed, *numbers)

    def uniform(self, size: int) -> np.ndarray:
        """From the generator."""
        return self._generator.random(size)

    def normal(self, size: int) -> np.ndarray:
        """From the generator."""
        return self._generator.standard_normal(size)
