"""The Gaussian mechanism: N(0, (z C)² I) on a round's sum, whoever draws it (Das et al.,
Algorithms 1 and 2; Zhang et al., Algorithm 3)."""

import math

import numpy as np
import torch

from .entropy import Randomness

# A client's share must span so many of its model's roundings. They then add 1/(12 · 16) to its
# variance, 0.26 % to its deviation, and know nothing of the rest: the rounding of N(m, σ²) to
# multiples of h has mean m and variance σ² + h²/12 but for terms in exp(−2 π² σ²/h²), here 1e-137.
_ROUNDINGS = 4
_ROUNDED = math.sqrt(1 + 1 / (12 * _ROUNDINGS**2))
# A release keeps so many bits of its noise's deviation.
_GRID_BITS = 20


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


def longest_noised(bound: float, deviation: float, dimension: int) -> float:
    """A length that C plus d-dimensional noise of `deviation` exceeds once in 10^12 times.

    ‖noise‖ ≤ deviation (√d + √(2 ln 10^12)): concentration of a Lipschitz function of a Gaussian.
    The roundings that `check_resolution` allows are counted in.
    """
    tail = math.sqrt(2 * math.log(1e12))
    return bound + _ROUNDED * deviation * (math.sqrt(dimension) + tail)


def check_resolution(model: torch.Tensor, local_lr: float, bound: float, deviation: float) -> None:
    """Whether models w_i = w_t − η_l (g_i + noise) can carry noise of `deviation` (gradient units)
    in the precision of w_t = `model` [d].

    Raises ValueError, one line, where their roundings would change its size.
    """
    largest = float(model.abs().max()) + local_lr * (bound + 9 * deviation)
    rounding = float(np.spacing(model.new_tensor(largest).numpy()))
    if local_lr * deviation < _ROUNDINGS * rounding:
        name = str(model.dtype).removeprefix("torch.")
        raise ValueError(
            f"local rate = {local_lr:g} is not allowed with noise at the clients: {name} weights "
            f"of {largest:.2g} are rounded to {rounding:.2g}, and its {local_lr * deviation:.2g} "
            "would be lost in that; set a larger rate, noise at the server, or float64 models"
        )
