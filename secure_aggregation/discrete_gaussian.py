"""The discrete Gaussian N_Z(0, σ²): P(x) ∝ exp(−x²/(2σ²)) on the integers, exactly.

The algorithm is that of Canonne, Kamath and Steinke (arXiv 2004.00010, Algorithm 3): a discrete
Laplace number of scale t = ⌊σ⌋ + 1, accepted with a probability exp(−γ), γ rational. Whole vectors
are drawn at a time. A uniform real number U, of which 53 bits are drawn, decides in float64: |y| =
⌊−t ln U⌋ has the law of the Laplace number's magnitude, and U < exp(−γ) is the toss. Where 53 bits
or float64 do not decide with certainty (some 10^-11 of all), more bits are drawn and the function
is computed to more digits, until they do. So every number has its exact probability, given perfect
bits.
"""

import math
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np

from .key_agreement import Entropy

# Beyond, squares of what is drawn are no int64, and floor(t ln U) is doubtful too often.
LARGEST_VARIANCE = 2**56
_BITS, _MORE_BITS = 53, 128
_UNIT = 2.0**-_BITS
# More than the relative errors of float64 in what is computed below, each of a few roundings.
_ROUNDINGS = 2.0**-48


def discrete_gaussian(size: int, variance: int, entropy: Entropy) -> np.ndarray:
    """`size` independent numbers of N_Z(0, `variance`), int64.

    `variance` is the parameter σ², a positive integer at most 2^56; from σ = 1 on it is the
    variance to 10^-6. Raises ValueError for another.
    """
    if variance != int(variance) or not 1 <= variance <= LARGEST_VARIANCE:
        raise ValueError(f"variance = {variance} is not allowed: an integer, 1 to 2^56")
    found, missing = [np.empty(0, np.int64)], size
    while missing:
        # Three in four are accepted, most of the time.
        found.append(_accepted(missing + missing // 2 + 64, int(variance), entropy)[:missing])
        missing -= len(found[-1])
    return np.concatenate(found)


def _accepted(size: int, variance: int, entropy: Entropy) -> np.ndarray:
    """Numbers of N_Z(0, `variance`), of `size` candidates, int64."""
    scale = math.isqrt(variance) + 1
    magnitude = _geometric(size, scale, entropy)
    negative = np.frombuffer(entropy(size), np.uint8) & 1 == 1
    over = magnitude - variance / scale
    exponents = over * over / (2.0 * variance)
    words = _words(size, entropy)
    low, chance = words * _UNIT, np.exp(-exponents)
    # γ is rounded once before a difference, which makes it worse by 1 + γ at most.
    doubt = chance * (_ROUNDINGS * (1 + exponents) ** 2) + 1e-300
    accepted = low + _UNIT < chance - doubt
    for place in np.flatnonzero(~accepted & (low < chance + doubt)):
        far = (int(magnitude[place]) * scale - variance) ** 2
        exponent = Fraction(far, 2 * variance * scale**2)
        accepted[place] = _is_below_exp(int(words[place]), exponent, entropy)
    # Zero is there once, not with both signs.
    accepted &= ~(negative & (magnitude == 0))
    return np.where(negative, -magnitude, magnitude)[accepted]


def _geometric(size: int, scale: int, entropy: Entropy) -> np.ndarray:
    """⌊−t ln U⌋ of `size` numbers U, int64: at least k with probability exp(−k/t), t = `scale`."""
    words = _words(size, entropy)
    middle = words * _UNIT + _UNIT / 2
    value = -scale * np.log(middle)
    doubt = scale * (_UNIT / middle) + value * _ROUNDINGS + 1e-12
    result = np.floor(value - doubt).astype(np.int64)
    for place in np.flatnonzero(np.floor(value + doubt) != result):
        result[place] = _floor_of_log(int(words[place]), scale, entropy)
    return result


def _words(size: int, entropy: Entropy) -> np.ndarray:
    """The first 53 bits of `size` numbers of [0, 1), uint64."""
    return np.frombuffer(entropy(8 * size), np.uint64) >> np.uint64(64 - _BITS)


def _is_below_exp(word: int, exponent: Fraction, entropy: Entropy) -> bool:
    """Whether a uniform number whose first 53 bits are `word`'s is below exp(−`exponent`)."""
    bits = _BITS
    while True:
        word, bits = _extended(word, bits, entropy)
        with localcontext() as context:
            # Digits for all bits, and those by which exp(−γ) is small.
            context.prec = bits + 60
            context.Emin = -(10**9)
            power = -Decimal(exponent.numerator) / Decimal(exponent.denominator)
            chance = Fraction(power.exp())
        doubt = chance * (1 + int(exponent)) / 2**bits + Fraction(1, 2 ** (4 * bits))
        if Fraction(word + 1, 2**bits) <= chance - doubt:
            return True
        if Fraction(word, 2**bits) >= chance + doubt:
            return False


def _floor_of_log(word: int, scale: int, entropy: Entropy) -> int:
    """⌊−`scale` ln U⌋ of a uniform number U whose first 53 bits are `word`'s."""
    bits = _BITS
    while True:
        word, bits = _extended(word, bits, entropy)
        if word:
            with localcontext() as context:
                context.prec = bits + 60
                ends = [
                    Fraction(-scale * (Decimal(end) / Decimal(2**bits)).ln())
                    for end in (word, word + 1)
                ]
            doubt = Fraction(scale, 2**bits)
            most, least = ends[0] + doubt, ends[1] - doubt
            if math.floor(most) == math.floor(least):
                return math.floor(least)


def _extended(word: int, bits: int, entropy: Entropy) -> tuple[int, int]:
    more = int.from_bytes(entropy(_MORE_BITS // 8), "little")
    return (word << _MORE_BITS) | more, bits + _MORE_BITS
