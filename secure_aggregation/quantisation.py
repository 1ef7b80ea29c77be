"""From a clipped update to integers that add up modulo 2^k, and from their sum back.

    u -> clip to C -> x = H D u / √d' -> s x -> stochastic rounding to integers q, ‖q‖ ≤ Δ

D are random signs of the session, H is the Walsh-Hadamard matrix, d' the power of two at or above
d. The rotation spreads every vector evenly over the coordinates. Rounding is done again until
(Kairouz et al., arXiv 2102.06387, Section 4.1, β = e^(-1/2))

    Δ² = min{ (sC + √d')², s²C² + d'/4 + (sC + √d'/2) }

holds, so that Δ is the sensitivity whatever was drawn. The noise of a client is N_Z(0, V), V the
least integer with n' V ≥ (z Δ)²: the multiplier is z with n' survivors, the rounding included.

The scale s is the largest with which no coordinate of the sum of all n clients wraps around 2^k,
but with probability 2^-40 over the signs and the noise: with p = 2^-40, L = ln(4d'/p),

    s n C min{1, √(2L/d')}  +  n  +  √(2 L n V)  ≤  2^(k-1) − 1.

The first is Hoeffding's bound on a coordinate of the rotated sum, of length n C at most (or that
length itself), the second is what n roundings change, the third the tail of the noise, which is
subgaussian with variance proxy V for each client. It is for clients that keep to C; a wrapped
coordinate would be wrong in the model, and cost no privacy.
"""

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .accounting import concentrated_epsilon
from .discrete_gaussian import LARGEST_VARIANCE
from .key_agreement import Entropy
from .masks import centred, dtype_of, expand

# By how much the multiplier that is charged is below z: what τ of the accounting may take.
CHARGED = 1 - 1e-9
_WRAPS = 2.0**-40
# With so much more noise than without rounding, bits are too few.
_MOST_INFLATION = 1.1
_TRIES = 200


@dataclass(frozen=True)
class Quantisation:
    """The numbers of a round. C: `bound`; z: `multiplier`, of the noise of n' = `survivors` against
    one client; n: `clients`; k: `bits`; d: `dimension`.

    Raises ValueError, one line, where no scale keeps the sum from wrapping without more noise than
    1.1 times what z asks for, or the noise is too narrow for its accounting.
    """

    bound: float
    multiplier: float
    survivors: int
    clients: int
    bits: int
    dimension: int

    def __post_init__(self) -> None:
        dtype_of(self.bits)
        limit = 2 ** (self.bits - 1) - 1
        inflation = math.inf
        if self._reach(0.0) < limit:
            inflation = self.sensitivity / (self.scale * self.bound)
        if not inflation <= _MOST_INFLATION:
            raise ValueError(
                f"secure-bits = {self.bits} is not allowed for {self.clients} clients, "
                f"{self.dimension} parameters and a noise multiplier of {self.multiplier:g}: what "
                "does not wrap would be too coarse; set more bits"
            )
        if self.variance > LARGEST_VARIANCE:
            raise ValueError(f"secure-bits = {self.bits} is not allowed: the noise is too wide")
        if not self.variance >= 4 or not (
            self.multiplier
            * concentrated_epsilon(self.survivors, self.variance, self.sensitivity, self.padded)
            <= 1 / CHARGED
        ):
            raise ValueError(
                f"secure-bits = {self.bits} is not allowed with a noise multiplier of "
                f"{self.multiplier:g}: the clients' noise would be too narrow to be accounted for; "
                "set more bits, or more noise"
            )

    @cached_property
    def padded(self) -> int:
        """d'."""
        return 1 << max(0, self.dimension - 1).bit_length()

    @cached_property
    def scale(self) -> float:
        """s."""
        limit = 2 ** (self.bits - 1) - 1
        low, high = 0.0, limit * math.sqrt(self.padded) / self.bound
        for _ in range(80):
            middle = (low + high) / 2
            if self._reach(middle) <= limit:
                low = middle
            else:
                high = middle
        return low

    @cached_property
    def sensitivity(self) -> float:
        """Δ, in integers."""
        return self._sensitivity(self.scale)

    @cached_property
    def variance(self) -> int:
        """V, of the noise of one client."""
        return self._variance(self.scale)

    def _sensitivity(self, scale: float) -> float:
        length, root = scale * self.bound, math.sqrt(self.padded)
        conditional = length**2 + self.padded / 4 + length + root / 2
        return math.sqrt(min((length + root) ** 2, conditional))

    def _variance(self, scale: float) -> int:
        return math.ceil((self.multiplier * self._sensitivity(scale)) ** 2 / self.survivors)

    def _reach(self, scale: float) -> float:
        """How far a coordinate of the sum goes, but with probability 2^-40."""
        tail = 2 * math.log(4 * self.padded / _WRAPS)
        rotated = scale * self.clients * self.bound * min(1.0, math.sqrt(tail / self.padded))
        return rotated + self.clients + math.sqrt(tail * self.clients * self._variance(scale))

    def quantised(self, update: np.ndarray, session: bytes, entropy: Entropy) -> np.ndarray:
        """q [d'], int64, of an update [d], float64, no longer than Δ whatever the update is; 0 for
        one that is not finite."""
        vector = np.zeros(self.padded)
        with np.errstate(over="ignore", invalid="ignore"):
            length = float(np.sqrt(np.dot(update, update)))
            if math.isfinite(length):
                vector[: self.dimension] = update * min(1.0, self.bound / max(length, 1e-300))
        scaled = rotated(vector * _signs(session, self.padded)) * self.scale
        floor = np.floor(scaled)
        # Room for the rounding of the sum of squares itself.
        longest = self.sensitivity**2 * (1 - self.padded * 2.0**-52)
        for _ in range(_TRIES):
            words = np.frombuffer(entropy(4 * self.padded), np.uint32)
            found = floor + (words * 2.0**-32 < scaled - floor)
            if float(np.dot(found, found)) <= longest:
                return found.astype(np.int64)
        # With probability (1 - e^(-1/2))^200 at most: towards zero, which is never longer.
        return np.trunc(scaled).astype(np.int64)

    def restored(self, total: np.ndarray, session: bytes) -> np.ndarray:
        """The sum of the clients' clipped updates and noises [d], float64, of that of their
        integers modulo 2^k [d']."""
        scaled = rotated(centred(total, self.bits).astype(np.float64)) * _signs(
            session, self.padded
        )
        return scaled[: self.dimension] / self.scale

    @property
    def deviation(self) -> float:
        """That of the noise of n' survivors on a coordinate of what `restored` gives: z C, and what
        the rounding's share of the sensitivity adds."""
        return math.sqrt(self.survivors * self.variance) / self.scale


def _signs(session: bytes, length: int) -> np.ndarray:
    """±1 [length], float64, of the session."""
    seed = hashlib.sha256(b"rotation" + session).digest()
    return 1.0 - 2.0 * (expand(seed, length, 16) & 1)


def rotated(vector: np.ndarray) -> np.ndarray:
    """H x / √d' of a vector [d'], float64, d' a power of two: orthogonal, and its own inverse."""
    size = len(vector)
    result, other = vector.astype(np.float64), np.empty(size)
    width = 1
    while width < size:
        pairs, out = result.reshape(-1, 2, width), other.reshape(-1, 2, width)
        np.add(pairs[:, 0], pairs[:, 1], out=out[:, 0])
        np.subtract(pairs[:, 0], pairs[:, 1], out=out[:, 1])
        result, other = other, result
        width *= 2
    return result / math.sqrt(size)
