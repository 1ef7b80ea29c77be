"""Masks: vectors of integers modulo 2^k, uniform, from seeds of 256 bits by AES-256 in counter
mode."""

import os

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR

from .key_agreement import KEY_BYTES, Entropy

FEWEST_BITS, MOST_BITS = 8, 32
_FROM_ZERO = CTR(bytes(16))

# Of one of the two dtypes below, all below 2^k.
Residues = np.ndarray


def dtype_of(bits: int) -> np.dtype:
    """In which numbers modulo 2^`bits` are held and sent: little-endian, 16 or 32 bits wide.

    Raises ValueError for bits out of range.
    """
    if not FEWEST_BITS <= bits <= MOST_BITS:
        raise ValueError(f"bits = {bits} is not allowed: {FEWEST_BITS} to {MOST_BITS}")
    return np.dtype("<u2" if bits <= 16 else "<u4")


def expand(seed: bytes, length: int, bits: int) -> Residues:
    """The mask [`length`] of a seed: its key stream from counter 0, of each number the low bits.

    A seed is for one mask alone. Raises ValueError for one that has not 32 bytes.
    """
    if len(seed) != KEY_BYTES:
        raise ValueError(f"a seed of {len(seed)} bytes is not allowed: {KEY_BYTES}")
    dtype = dtype_of(bits)
    stream = Cipher(AES256(seed), _FROM_ZERO).encryptor().update(bytes(length * dtype.itemsize))
    return reduced(np.frombuffer(stream, dtype), bits)


def reduced(numbers: np.ndarray, bits: int) -> Residues:
    """Integers [..] modulo 2^`bits`; of signed ones, too."""
    dtype = dtype_of(bits)
    narrow = numbers.astype(dtype, copy=False)
    return narrow if bits in (16, 32) else narrow & dtype.type(2**bits - 1)


def centred(residues: Residues, bits: int) -> np.ndarray:
    """The integers of [-2^(k-1), 2^(k-1)) with these residues, int64."""
    wide = residues.astype(np.int64)
    return np.where(wide >= 1 << (bits - 1), wide - (1 << bits), wide)


def system_stream() -> Entropy:
    """Random bytes as fast as masks are made: AES-256 in counter mode under a new key of the
    operating system's entropy, 256 bits of it for everything that is drawn from one."""
    encryptor = Cipher(AES256(os.urandom(KEY_BYTES)), _FROM_ZERO).encryptor()
    return lambda size: encryptor.update(bytes(size))
