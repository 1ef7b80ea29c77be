"""What the sum of the survivors' discrete Gaussian noises is worth (Kairouz et al., arXiv
2102.06387, Proposition 14): a bound in concentrated differential privacy.

The sum of n numbers N_Z(0, σ²) is no N_Z(0, nσ²), but so near that for a vector of d coordinates
and a query of L2 sensitivity Δ the mechanism satisfies ½ε²-concentrated DP with

    ε = min{ √(Δ²/(nσ²) + τd/2), Δ/(√n σ) + τ√d },   τ = 10 Σ_{k=1}^{n−1} exp(−2π²σ² k/(k+1)).

Its Rényi divergence of every order α is then at most α ε²/2, that of a Gaussian of multiplier 1/ε.
"""

import math


def concentrated_epsilon(
    survivors: int, variance: float, sensitivity: float, dimension: int
) -> float:
    """ε with which the sum of `survivors` vectors of N_Z(0, `variance`) noise, each of `dimension`
    coordinates, on integers of L2 `sensitivity` is ½ε²-concentrated differentially private.

    Raises ValueError below σ = 1/2, where the bound does not hold, and for other values out of
    range.
    """
    if not variance >= 0.25 or survivors < 1 or not sensitivity > 0 or dimension < 1:
        raise ValueError(
            f"variance = {variance:g}, sensitivity = {sensitivity:g}, {survivors} survivors and "
            f"{dimension} coordinates are not allowed: a variance of at least 0.25, "
            "all else positive"
        )
    base = -2 * math.pi**2 * variance
    tau = 10 * math.fsum(math.exp(base * k / (k + 1)) for k in range(1, survivors))
    gaussian = sensitivity / math.sqrt(survivors * variance)
    return min(math.sqrt(gaussian**2 + tau * dimension / 2), gaussian + tau * math.sqrt(dimension))
