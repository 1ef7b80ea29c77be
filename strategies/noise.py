"""The Gaussian mechanism: N(0, (z C)² I) on a round's sum, whoever draws it (Das et al.,
Algorithms 1 and 2; Zhang et al., Algorithm 3)."""

import math

import torch

from .entropy import Randomness


def gaussian_noise(
    shape: tuple[int, ...], deviation: float, randomness: Randomness, dtype: torch.dtype
) -> torch.Tensor:
    """Independent N(0, deviation²) numbers of the given shape, drawn in float64."""
    drawn = randomness.normal(math.prod(shape)).reshape(shape)
    return torch.from_numpy(drawn * deviation).to(dtype)


def client_deviation(noise_multiplier: float, bound: float, invited: int) -> float:
    """z C/√s: the standard deviation of one client's share where s clients were invited.

    Raises ValueError for an s below 1.
    """
    if invited < 1:
        raise ValueError(f"num-invited = {invited} is not allowed: at least 1")
    return noise_multiplier * bound / math.sqrt(invited)


def missing_share(invited: int, counted: int) -> float:
    """The share of a round's variance that the clients did not bring: 1 − counted/invited.

    An empty cohort has brought nothing, so the server owes it all.
    """
    return 1.0 if invited == 0 else 1 - counted / invited


def longest_noised(bound: float, deviation: float, dimension: int) -> float:
    """A length that C plus d-dimensional noise of `deviation` exceeds once in 10^12 times.

    ‖noise‖ ≤ deviation (√d + √(2 ln 10^12)): concentration of a Lipschitz function of a Gaussian.
    """
    return bound + deviation * (math.sqrt(dimension) + math.sqrt(2 * math.log(1e12)))
