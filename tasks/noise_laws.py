"""Laws of the noise in stochastic gradients, from light to fat tails."""

from dataclasses import dataclass

import numpy as np

NOISE_LAWS = ("gaussian", "cauchy", "stable", "student-t")


@dataclass(frozen=True)
class NoiseLaw:
    """``scale`` times a standard draw, symmetric about 0, of the law ``name``:

    * ``gaussian``: N(0, 1).
    * ``cauchy``: density 1 / (π (1 + x²)); stable with α = 1.
    * ``stable``: symmetric α-stable, characteristic function exp(-|t|^α), ``alpha`` in (0, 2];
      α = 2 is N(0, 2).
    * ``student-t``: Student's t with ``dof`` > 0 degrees of freedom; its tail index is dof.

    Raises ValueError for another name or a number out of range.
    """

    name: str
    alpha: float = 2.0
    dof: float = 1.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.name not in NOISE_LAWS:
            raise ValueError(f"noise-law is {self.name!r}: allowed are {', '.join(NOISE_LAWS)}")
        if not 0 <= self.scale < np.inf:
            raise ValueError(f"noise-scale is {self.scale}: it must be 0 or more, and finite")
        if self.name == "stable" and not 0 < self.alpha <= 2:
            raise ValueError(f"noise-alpha is {self.alpha}: it must be above 0 and at most 2")
        if self.name == "student-t" and not 0 < self.dof < np.inf:
            raise ValueError(f"noise-dof is {self.dof}: it must be above 0 and finite")

    def draw(self, generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Independent samples, float64; infinite where the law's size leaves float64."""
        sample = self._standard(generator, shape)
        return sample if self.scale == 1 else np.multiply(sample, self.scale, out=sample)

    def _standard(self, generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        if self.name == "gaussian":
            return generator.standard_normal(shape)
        if self.name == "cauchy":
            return generator.standard_cauchy(shape)
        if self.name == "student-t":
            return generator.standard_t(self.dof, shape)
        return symmetric_stable(generator, self.alpha, shape)


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
