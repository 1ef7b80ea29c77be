"""Laws of the noise in stochastic gradients, from light to fat tails."""

from collections.abc import Callable

import numpy as np

NOISE_LAWS = ("gaussian", "cauchy", "stable", "student-t")

# Draws independent samples of the shape: float64, symmetric about 0, infinite where the law's
# size leaves float64.
NoiseLaw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


def noise_law(name: str, alpha: float = 2.0, dof: float = 1.0, scale: float = 1.0) -> NoiseLaw:
    """``scale`` times a standard draw of the law:

    * ``gaussian``: N(0, 1).
    * ``cauchy``: density 1 / (π (1 + x²)); stable with α = 1.
    * ``stable``: symmetric α-stable, characteristic function exp(-|t|^α), ``alpha`` in (0, 2];
      α = 2 is N(0, 2).
    * ``student-t``: Student's t with ``dof`` > 0 degrees of freedom; its tail index is dof.

    Raises ValueError for another name or a number out of range.
    """
    if name not in NOISE_LAWS:
        raise ValueError(f"noise-law is {name!r}: allowed are {', '.join(NOISE_LAWS)}")
    if not 0 <= scale < np.inf:
        raise ValueError(f"noise-scale is {scale}: it must be 0 or more, and finite")
    if name == "stable" and not 0 < alpha <= 2:
        raise ValueError(f"noise-alpha is {alpha}: it must be above 0 and at most 2")
    if name == "student-t" and not 0 < dof < np.inf:
        raise ValueError(f"noise-dof is {dof}: it must be above 0 and finite")
    draws: dict[str, NoiseLaw] = {
        "gaussian": lambda generator, shape: generator.standard_normal(shape),
        "cauchy": lambda generator, shape: generator.standard_cauchy(shape),
        "stable": lambda generator, shape: symmetric_stable(generator, alpha, shape),
        "student-t": lambda generator, shape: generator.standard_t(dof, shape),
    }
    draw = draws[name]
    return draw if scale == 1 else lambda generator, shape: scale * draw(generator, shape)


def symmetric_stable(
    generator: np.random.Generator, alpha: float, shape: tuple[int, ...]
) -> np.ndarray:
    """Symmetric α-stable samples, float64 (Chambers, Mallows and Stuck, 1976):

        X = sin(αV) / cos(V)^{1/α} · (cos((1 − α)V) / W)^{(1 − α)/α}

    with V uniform on (−π/2, π/2) and W exponential of mean 1. Formed as sign · exp(ln|X|), since
    for small α the factors leave float64 where their product need not; a product that does is
    infinite.
    """
    angle = generator.uniform(-np.pi / 2, np.pi / 2, shape)
    exponential = generator.standard_exponential(shape)
    # The logarithm of 0 is -inf, and so it should be: X = 0, or an exponential of 0.
    with np.errstate(divide="ignore", over="ignore"):
        log_size = (
            np.log(np.abs(np.sin(alpha * angle)))
            - np.log(np.cos(angle)) / alpha
            + (1 - alpha) / alpha * (np.log(np.cos((1 - alpha) * angle)) - np.log(exponential))
        )
        return np.sign(angle) * np.exp(log_size)
