"""Noise that is the same vector on every client, although nothing but a seed travels.

ξ_k of hybrid FA-LD (Deng et al., Algorithm 2) is a pure function of (shared seed, round, step),
made in two stages that leave nothing to the machine:

1. Integers from Philox4x64-10 (Salmon et al., 2011), a counter-based generator: integer arithmetic
   only, fixed by its key.
2. Normals as Φ⁻¹ of the 52 highest bits, by Wichura's rational functions (Applied Statistics 37,
   1988, algorithm AS 241), where everything is made of +, −, ×, ÷ and √ on float64. IEEE 754
   prescribes the result of each to the last bit; NumPy does them one after the other and never
   fuses two into one rounding. No function of a mathematical library takes part, also not the
   logarithm, which these libraries round differently.

So on any platform with IEEE 754 arithmetic the float64 vector is the same bit for bit.
"""

from collections.abc import Sequence

import numpy as np
import torch

MAX_SHARED_SEED = 2**63 - 1
_MAX_COUNT = 2**32 - 1
# Numbers are made block by block: memory stays small, and the work in the processor's caches.
_BLOCK = 2**14

# Numerators and denominators of AS 241, from the constant term on: |p − ½| <= 0.425, then
# r = √(−ln min(p, 1 − p)) up to 5, and beyond.
_CENTRE = (
    (
        *(3.3871328727963666080, 1.3314166789178437745e2, 1.9715909503065514427e3),
        *(1.3731693765509461125e4, 4.5921953931549871457e4, 6.7265770927008700853e4),
        *(3.3430575583588128105e4, 2.5090809287301226727e3),
    ),
    (
        *(1.0, 4.2313330701600911252e1, 6.8718700749205790830e2, 5.3941960214247511077e3),
        *(2.1213794301586595867e4, 3.9307895800092710610e4, 2.8729085735721942674e4),
        *(5.2264952788528545610e3,),
    ),
)
_MIDDLE = (
    (
        *(1.42343711074968357734, 4.63033784615654529590, 5.76949722146069140550),
        *(3.64784832476320460504, 1.27045825245236838258, 2.41780725177450611770e-1),
        *(2.27238449892691845833e-2, 7.74545014278341407640e-4),
    ),
    (
        *(1.0, 2.05319162663775882187, 1.67638483018380384940, 6.89767334985100004550e-1),
        *(1.48103976427480074590e-1, 1.51986665636164571966e-2, 5.47593808499534494600e-4),
        *(1.05075007164441684324e-9,),
    ),
)
_TAIL = (
    (
        *(6.65790464350110377720, 5.46378491116411436990, 1.78482653991729133580),
        *(2.96560571828504891230e-1, 2.65321895265761230930e-2, 1.24266094738807843860e-3),
        *(2.71155556874348757815e-5, 2.01033439929228813265e-7),
    ),
    (
        *(1.0, 5.99832206555887937690e-1, 1.36929880922735805310e-1, 1.48753612908506148525e-2),
        *(7.86869131145613259100e-4, 1.84631831751005468180e-5, 1.42151175831644588870e-7),
        *(2.04426310338993978564e-15,),
    ),
)
_LN_2 = 0.6931471805599453
_SQRT_HALF = 0.7071067811865476
_LN_TERMS = 11


def shared_noise(
    shared_seed: int, server_round: int, step: int, dimension: int, dtype: torch.dtype
) -> torch.Tensor:
    """ξ [dimension] ~ N(0, I) of local step `step` (from 0) in round `server_round`.

    Computed in float64 and rounded to `dtype`. Raises ValueError for a seed outside 0..2^63 − 1,
    or a round or step outside 0..2^32 − 1.
    """
    if not 0 <= shared_seed <= MAX_SHARED_SEED:
        raise ValueError(f"shared seed = {shared_seed} is not allowed: from 0 to 2^63 - 1")
    for name, count in (("round", server_round), ("step", step)):
        if not 0 <= count <= _MAX_COUNT:
            raise ValueError(f"{name} = {count} is not allowed: from 0 to 2^32 - 1")
    key = np.array([shared_seed, server_round << 32 | step], dtype=np.uint64)
    stream = np.random.Philox(key=key)
    noise = torch.empty(dimension, dtype=dtype)
    for start in range(0, dimension, _BLOCK):
        block = noise[start : start + _BLOCK]
        block.copy_(torch.from_numpy(standard_normals(stream.random_raw(len(block)))))
    return noise


def standard_normals(integers: np.ndarray) -> np.ndarray:
    """Φ⁻¹(p) float64 [n] of uint64 [n], p = (2j + 1)/2^53 with j their 52 highest bits.

    p is exact, never 0, ½ or 1, and its mirror image 1 − p is exact too.
    """
    odd = (integers >> np.uint64(12)) * np.uint64(2) + np.uint64(1)
    p = odd.astype(np.float64) * 2.0**-53
    q = p - 0.5
    normals = q * _ratio(_CENTRE, 0.180625 - q * q)
    outer = np.flatnonzero(np.abs(q) > 0.425)
    p = p[outer]
    r = np.sqrt(-_logarithm(np.minimum(p, 1.0 - p)))
    size = np.where(r <= 5.0, _ratio(_MIDDLE, r - 1.6), _ratio(_TAIL, r - 5.0))
    normals[outer] = np.copysign(size, q[outer])
    return normals


def _ratio(coefficients: tuple[Sequence[float], Sequence[float]], x: np.ndarray) -> np.ndarray:
    numerator, denominator = (_polynomial(c, x) for c in coefficients)
    return numerator / denominator


def _polynomial(coefficients: Sequence[float], x: np.ndarray) -> np.ndarray:
    """Σ coefficients[i] x^i by Horner's rule."""
    total = np.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total *= x
        total += coefficient
    return total


def _logarithm(x: np.ndarray) -> np.ndarray:
    """ln x for x in (0, 1): x = 2^e m with √½ <= m < √2, ln m = 2 artanh((m − 1)/(m + 1))."""
    mantissa, exponent = np.frexp(x)
    low = mantissa < _SQRT_HALF
    mantissa = np.where(low, mantissa * 2.0, mantissa)
    exponent = exponent - low
    s = (mantissa - 1.0) / (mantissa + 1.0)
    series = _polynomial([1.0 / (2 * i + 1) for i in range(_LN_TERMS)], s * s)
    return exponent * _LN_2 + 2.0 * s * series
