"""Means over seeds and how sure they are: standard errors, and Student's 95 % intervals."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import fisher_exact, quantile_test, t

LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """A mean over `count` independent runs; `error` is its standard error s/√n, 0 where it is not
    known: of one run, or of a figure that hangs on no draw."""

    mean: float
    error: float = 0.0
    count: int = 1

    @classmethod
    def of(cls, values: "Sequence[float] | np.ndarray") -> "Estimate":
        """The mean of one value a run, [n], with s² = Σ (x − mean)² / (n − 1)."""
        own = np.asarray(values, dtype=np.float64)
        count = len(own)
        error = float(own.std(ddof=1)) / math.sqrt(count) if count > 1 else 0.0
        return cls(float(own.mean()), error, count)

    @classmethod
    def of_difference(
        cls, one: "Sequence[float] | np.ndarray", other: "Sequence[float] | np.ndarray"
    ) -> "Estimate":
        """The mean of one − other, run by run: runs of a seed share data and batches. Of lists of
        unequal length, the runs that both have."""
        return cls.of([a - b for a, b in zip(one, other, strict=False)])

    @property
    def deviation(self) -> float | None:
        """The standard deviation s of single runs; None of one run, which tells nothing of it."""
        return self.error * math.sqrt(self.count) if self.count > 1 else None

    @property
    def interval(self) -> tuple[float, float]:
        """Where the mean of all runs there could be lies with 95 % confidence (Student's t with
        n − 1 degrees of freedom); the value itself where nothing is known of its error."""
        if self.error == 0.0:
            return self.mean, self.mean
        half = float(t.ppf((1 + LEVEL) / 2, self.count - 1)) * self.error
        return self.mean - half, self.mean + half

    def above(self, bound: float) -> bool | None:
        """Whether the mean is above `bound`; None where the interval leaves that open."""
        low, high = self.interval
        if low == high:
            return self.mean > bound
        return True if low > bound else (False if high < bound else None)

    def inside(self, low: float, high: float) -> bool | None:
        """Whether the mean lies from `low` to `high`. Outside of it, None where the interval still
        reaches in: the deviation is not significant."""
        if low <= self.mean <= high:
            return True
        least, most = self.interval
        return None if least <= high and most >= low else False

    def said(self, digits: int = 3) -> str:
        """The mean in so many significant digits, and its standard error where there is one."""
        text = f"{self.mean:.{digits}g}"
        return f"{text} ± {self.error:.2g}" if self.count > 1 else text


def rarer(one: int, other: int, trials: int) -> bool | None:
    """Whether something happens less often in `one` of so many trials than in `other` of as many:
    Fisher's exact test, one-sided, at 5 %; None where it decides neither way."""
    table = [[one, trials - one], [other, trials - other]]
    if fisher_exact(table, alternative="less")[1] <= 1 - LEVEL:
        return True
    return False if fisher_exact(table, alternative="greater")[1] <= 1 - LEVEL else None


def median_interval(values: "Sequence[float] | np.ndarray") -> tuple[float, float]:
    """Where the median of all runs there could be lies with 95 % confidence, between two of the
    values [n] (binomial, exact); the median itself where there are fewer than 6, too few for it."""
    own = np.asarray(values, dtype=np.float64)
    if len(own) < 6:
        middle = float(np.median(own))
        return middle, middle
    found = quantile_test(own, p=0.5).confidence_interval(LEVEL)
    return float(found.low), float(found.high)


def median_below(
    one: "Sequence[float] | np.ndarray", other: "Sequence[float] | np.ndarray"
) -> bool | None:
    """Whether the median of `one` is below that of `other`: their intervals do not overlap; None
    where they do."""
    (low, high), (others_low, others_high) = median_interval(one), median_interval(other)
    return True if high < others_low else (False if low >= others_high else None)
