"""The Gaussian mechanism: N(0, (z C)² I) on a round's sum, whoever draws it (Das et al.,
Algorithms 1 and 2; Zhang et al., Algorithm 3), and the random numbers that it is made of.

These are the operating system's entropy, or a seed's, which forfeits the claim: a guarantee is void
if anybody can guess who was drawn or what the noise was, so nothing here is derived from a run's
seed unless that is asked for by name.
"""

import math
import os
from typing import Protocol

import numpy as np
import torch

from blackthorn.randomness import Stream, generator_of

# A client's share must span so many of its model's roundings. They then add 1/(12 · 16) to its
# variance, 0.26 % to its deviation, and know nothing of the rest: the rounding of N(m, σ²) to
# multiples of h has mean m and variance σ² + h²/12 but for terms in exp(−2 π² σ²/h²), here 1e-137.
_ROUNDINGS = 4
# Of the deviation of the noise's size, what one client's absence may change in it: as a Gaussian
# mechanism of multiplier 1000, once a run.
_SEEN = 1e-3
_ROUNDED = math.sqrt(1 + 1 / (12 * _ROUNDINGS**2))
# A release keeps so many bits of its noise's deviation.
_GRID_BITS = 20
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


def gaussian_noise(
    shape: tuple[int, ...], deviation: float, randomness: Randomness, dtype: torch.dtype
) -> torch.Tensor:
    """Independent N(0, deviation²) numbers of the given shape, drawn in float64."""
    drawn = randomness.normal(math.prod(shape)).reshape(shape)
    return torch.from_numpy(drawn * deviation).to(dtype)


def on_grid(noised: torch.Tensor, deviation: float) -> torch.Tensor:
    """Float64 numbers in which there is noise of `deviation`, rounded to multiples of a power of
    two, h ≤ 2^-20 deviations, which adds nothing to the error.

    The noise itself is a float64 number, of which there are gaps between, and what is added to it
    shows in the low bits of the sum (Mironov, "On significance of the least significant bits for
    differential privacy", CCS 2012). A step of the grid holds about 2^30 of the noise's numbers.
    """
    step = 2.0 ** (math.floor(math.log2(deviation)) - _GRID_BITS)
    return torch.round(noised / step) * step


def client_deviation(noise_multiplier: float, bound: float, shares: int) -> float:
    """z C/√s: the standard deviation of one client's share of s.

    Raises ValueError for an s below 1.
    """
    if shares < 1:
        raise ValueError(f"noise-shares = {shares} is not allowed: at least 1")
    return noise_multiplier * bound / math.sqrt(shares)


def missing_share(shares: int, counted: int) -> float:
    """The part of a round's variance that `counted` clients did not bring, who have one share of
    s each: 1 − counted/s. Raises ValueError for more clients than shares: they brought too much."""
    if counted > shares:
        raise ValueError(f"{counted} clients cannot have a share each of {shares}")
    return 1 - counted / shares


def signal_to_noise(released: torch.Tensor, deviation: float) -> dict[str, float]:
    """Of a release [d] with noise of `deviation`: `noise_norm` σ√d, which its noise is long within
    a part 1/√(2d), and `signal_to_noise`, by which part of that the rest of it is long, by
    ‖released‖² − σ²d: 0 where that is not above twice what chance makes of it, σ²√(2d). Of what is
    released, and of public numbers, alone."""
    dimension = len(released)
    variance = dimension * deviation**2
    rest = float(released.double().square().sum()) - variance
    seen = rest > 2 * math.sqrt(2 / dimension) * variance
    return {
        "noise_norm": math.sqrt(variance),
        "signal_to_noise": math.sqrt(rest / variance) if seen else 0.0,
    }


def finite_sum(updates: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Σ weights_k g_k [d] of updates [K, d]; a row that is not finite counts as 0."""
    total = torch.einsum("k,kd->d", weights, updates)
    if not bool(torch.isfinite(total).all()):
        rows = torch.isfinite(updates).all(dim=1, keepdim=True)
        total = torch.einsum("k,kd->d", weights, updates.where(rows, 0.0))
    return total


def roundings_needed(dimension: int, rounds: int, shares: int) -> float:
    """How many roundings h of a model a client's share of the noise, σ, must be wide.

    The rounding of a model that is missing, at most h²/12 a number, lacks in the noise's size. The
    mean square of T releases of d numbers, each of variance (s + 1) σ², is known to √(2/(d T)) of
    itself: what is missing has to be less than a thousandth of that.
    """
    seen = math.sqrt(dimension * rounds / 2) / (12 * (shares + 1))
    return max(_ROUNDINGS, math.sqrt(seen / _SEEN))


def longest_noised(bound: float, deviation: float, dimension: int) -> float:
    """A length that C plus d-dimensional noise of `deviation` exceeds once in 10^12 times.

    ‖noise‖ ≤ deviation (√d + √(2 ln 10^12)): concentration of a Lipschitz function of a Gaussian.
    The roundings that `check_resolution` allows are counted in.
    """
    tail = math.sqrt(2 * math.log(1e12))
    return bound + _ROUNDED * deviation * (math.sqrt(dimension) + tail)


def check_resolution(
    model: torch.Tensor,
    local_lr: float,
    bound: float,
    deviation: float,
    roundings: float = _ROUNDINGS,
) -> None:
    """Whether models w_i = w_t − η_l (g_i + noise) can carry noise of `deviation` (gradient units),
    `roundings` wide at least, in the precision of w_t = `model` [d].

    Raises ValueError, one line, where their roundings would change its size.
    """
    largest = float(model.abs().max()) + local_lr * (bound + 9 * deviation)
    rounding = float(np.spacing(model.new_tensor(largest).numpy()))
    if local_lr * deviation < roundings * rounding:
        name = str(model.dtype).removeprefix("torch.")
        raise ValueError(
            f"local rate = {local_lr:g} is not allowed with noise at the clients: {name} weights "
            f"of {largest:.2g} are rounded to {rounding:.2g}, and its {local_lr * deviation:.2g} "
            f"is less than {roundings:.3g} times that, so that its size would tell who answered; "
            "set a larger rate, noise at the server, or float64 models"
        )
