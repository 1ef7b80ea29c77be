"""Shamir's secret sharing over a prime field, for secrets of 256 bits (Shamir, CACM 1979)."""

from collections.abc import Mapping, Sequence
from functools import lru_cache

from .key_agreement import Entropy

# The smallest prime above 2^256: every secret of 32 bytes is an element of the field.
PRIME = 2**256 + 297
SECRET_BYTES = 32
SHARE_BYTES = 33
# Drawn for a coefficient: what the remainder of so many bits is off by is 2^-127.
_DRAWN_BYTES = 48


def share(secret: bytes, threshold: int, holders: Sequence[int], entropy: Entropy) -> list[bytes]:
    """A share of the 32 bytes of `secret` for each of `holders`: the value at holder + 1 of a
    random polynomial of degree `threshold` - 1 whose value at 0 is the secret.

    Raises ValueError for a secret of another length, holders that are not distinct or negative, and
    a threshold that is not from 1 to their number.
    """
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"a secret of {len(secret)} bytes is not allowed: {SECRET_BYTES}")
    if len({*holders}) != len(holders) or any(not 0 <= h < PRIME - 1 for h in holders):
        raise ValueError("the holders of shares have to be distinct, and none negative")
    if not 1 <= threshold <= len(holders):
        raise ValueError(f"threshold = {threshold} is not allowed: 1 to {len(holders)}")
    drawn = entropy(_DRAWN_BYTES * (threshold - 1))
    coefficients = [
        int.from_bytes(drawn[i : i + _DRAWN_BYTES], "little") % PRIME
        for i in range(0, len(drawn), _DRAWN_BYTES)
    ]
    secret_value, shares = int.from_bytes(secret, "little"), []
    for holder in holders:
        value = 0
        for coefficient in coefficients:
            value = (value + coefficient) * (holder + 1) % PRIME
        shares.append(((value + secret_value) % PRIME).to_bytes(SHARE_BYTES, "little"))
    return shares


def is_share(words: bytes) -> bool:
    """Whether it is an element of the field."""
    return len(words) == SHARE_BYTES and int.from_bytes(words, "little") < PRIME


def reconstruct(shares: Mapping[int, bytes]) -> bytes | None:
    """The secret of which each holder has a share, from as many as the threshold was; None where
    what they meet in is no secret of 32 bytes. Fewer or wrong shares give another value.

    Raises ValueError for a share that is none.
    """
    holders = tuple(sorted(shares))
    if not all(is_share(one) for one in shares.values()):
        raise ValueError("a share is no element of the field")
    values = [int.from_bytes(shares[holder], "little") for holder in holders]
    total = sum(w * value for w, value in zip(_weights(holders), values, strict=True)) % PRIME
    return total.to_bytes(SECRET_BYTES, "little") if total < 2**256 else None


@lru_cache(maxsize=64)
def _weights(holders: tuple[int, ...]) -> tuple[int, ...]:
    """Lagrange's at 0."""
    weights = []
    for one in holders:
        above, below = 1, 1
        for other in holders:
            if other != one:
                above = above * (other + 1) % PRIME
                below = below * (other - one) % PRIME
        weights.append(above * pow(below, -1, PRIME) % PRIME)
    return tuple(weights)
