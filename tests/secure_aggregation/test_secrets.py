"""Shamir's shares, keys, sealed shares, signatures and masks, against what they are by
definition."""

import os
from itertools import combinations, pairwise

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import ECB
from scipy.stats import chisquare

from blackthorn.secure_aggregation import shamir
from blackthorn.secure_aggregation.key_agreement import (
    Advertisement,
    KeyPair,
    Refused,
    seal,
    shared_key,
    unseal,
)
from blackthorn.secure_aggregation.masks import centred, expand, reduced, system_stream

SESSION = bytes(32)


def is_prime(number: int) -> bool:
    """Miller and Rabin's test."""
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in range(2, 60):
        value = pow(base, odd, number)
        if value not in (1, number - 1) and number - 1 not in [
            pow(value, 2**i, number) for i in range(1, twos)
        ]:
            return False
    return True


def test_the_field_is_the_smallest_prime_one_that_holds_every_secret() -> None:
    assert is_prime(shamir.PRIME)
    assert not any(is_prime(2**256 + i) for i in range(1, 297, 2))


@pytest.mark.parametrize(("threshold", "holders"), [(1, 1), (2, 3), (3, 5), (4, 6)])
def test_any_threshold_of_shares_gives_the_secret_and_one_less_another(
    threshold: int, holders: int
) -> None:
    ids = [7 * i + 2 for i in range(holders)]
    for secret in (os.urandom(32), bytes(32), b"\xff" * 32):
        shares = dict(zip(ids, shamir.share(secret, threshold, ids, os.urandom), strict=True))
        for some in combinations(ids, threshold):
            assert shamir.reconstruct({i: shares[i] for i in some}) == secret
        for fewer in combinations(ids, threshold - 1):
            assert shamir.reconstruct({i: shares[i] for i in fewer}) != secret or not any(secret)


def test_shares_are_values_of_a_polynomial_of_that_degree_and_no_less() -> None:
    """By finite differences at holders 0, 1, 2, ...: the third of a parabola is 0, the second
    not."""
    words = shamir.share(os.urandom(32), 3, range(8), os.urandom)
    values = [int.from_bytes(one, "little") for one in words]
    for _ in range(2):
        values = [(b - a) % shamir.PRIME for a, b in pairwise(values)]
    assert len({*values}) == 1
    assert values[0] != 0


def test_the_share_of_one_holder_is_uniform_whatever_the_secret() -> None:
    drawn = [shamir.share(bytes(32), 2, [0, 1], os.urandom)[0] for _ in range(4000)]
    counts = np.bincount([one[31] >> 4 for one in drawn], minlength=16)
    assert chisquare(counts).pvalue > 1e-6


@pytest.mark.parametrize(
    ("secret", "threshold", "holders"),
    [(b"short", 1, [0]), (bytes(32), 0, [0]), (bytes(32), 3, [0, 1]), (bytes(32), 1, [2, 2])],
)
def test_what_cannot_be_shared_is_refused(
    secret: bytes, threshold: int, holders: list[int]
) -> None:
    with pytest.raises(ValueError, match=r"allowed|distinct"):
        shamir.share(secret, threshold, holders, os.urandom)


def test_both_ends_derive_one_key_for_one_purpose_session_and_pair() -> None:
    one, other = KeyPair.generate(os.urandom), KeyPair.generate(os.urandom)
    key = shared_key(one, other.public, "mask", SESSION, (1, 2))
    assert shared_key(other, one.public, "mask", SESSION, (2, 1)) == key
    others = [
        shared_key(one, other.public, "shares", SESSION, (1, 2)),
        shared_key(one, other.public, "mask", b"\x01" * 32, (1, 2)),
        shared_key(one, other.public, "mask", SESSION, (1, 3)),
        shared_key(one, KeyPair.generate(os.urandom).public, "mask", SESSION, (1, 2)),
    ]
    assert len({key, *others}) == 5


@pytest.mark.parametrize("key", [bytes(32), b"\x01" + bytes(31), b"short"])
def test_a_key_by_which_anybody_would_know_the_secret_is_refused(key: bytes) -> None:
    with pytest.raises(Refused, match="no key to agree by"):
        shared_key(KeyPair.generate(os.urandom), key, "mask", SESSION, (1, 2))


def test_a_sealed_share_opens_as_it_was_and_for_its_receiver_alone() -> None:
    key, words = os.urandom(32), os.urandom(66)
    sealed = seal(key, words, b"1 to 2", os.urandom)
    assert unseal(key, sealed, b"1 to 2") == words
    assert words not in sealed
    changed = bytes([sealed[0] ^ 1]) + sealed[1:]
    for wrong in (
        (key, sealed, b"2 to 1"),
        (os.urandom(32), sealed, b"1 to 2"),
        (key, changed, b"1 to 2"),
        (key, sealed[:5], b"1 to 2"),
    ):
        with pytest.raises(Refused):
            unseal(*wrong)


def test_a_signature_holds_for_these_keys_client_and_session_alone() -> None:
    key = ec.generate_private_key(ec.SECP384R1())
    pair = KeyPair.generate(os.urandom), KeyPair.generate(os.urandom)
    signed = Advertisement(3, pair[0].public, pair[1].public).signed(SESSION, key)
    assert signed.is_signed_by(SESSION, key.public_key())
    swapped = Advertisement(3, signed.masking, signed.sealing, signed.signature)
    another = Advertisement(4, signed.sealing, signed.masking, signed.signature)
    unsigned = Advertisement(3, signed.sealing, signed.masking)
    assert not any(
        one.is_signed_by(SESSION, key.public_key()) for one in (swapped, another, unsigned)
    )
    assert not signed.is_signed_by(os.urandom(32), key.public_key())
    assert not signed.is_signed_by(SESSION, ec.generate_private_key(ec.SECP384R1()).public_key())


@pytest.mark.parametrize("bits", [8, 12, 16, 20, 32])
def test_a_mask_is_aes_of_the_counters(bits: int) -> None:
    seed, width = os.urandom(32), 2 if bits <= 16 else 4
    blocks = b"".join(i.to_bytes(16, "big") for i in range(10))
    words = Cipher(AES256(seed), ECB()).encryptor().update(blocks)
    naive = [
        int.from_bytes(words[i : i + width], "little") % 2**bits
        for i in range(0, 20 * width, width)
    ]
    assert expand(seed, 20, bits).tolist() == naive


@pytest.mark.parametrize("bits", [8, 13, 16, 32])
def test_residues_of_either_sign_come_back_from_the_middle(bits: int) -> None:
    numbers = np.array([0, 1, -1, 2 ** (bits - 1) - 1, -(2 ** (bits - 1))])
    assert centred(reduced(numbers, bits), bits).tolist() == numbers.tolist()
    assert centred(reduced(numbers + 3 * 2**bits, bits), bits).tolist() == numbers.tolist()


def test_no_two_streams_of_the_systems_entropy_are_alike() -> None:
    first, second = system_stream(), system_stream()
    drawn = [first(64), first(64), second(64)]
    assert len({*drawn}) == 3


@pytest.mark.parametrize("bits", [7, 33])
def test_a_modulus_out_of_range_is_refused(bits: int) -> None:
    with pytest.raises(ValueError, match="bits"):
        expand(bytes(32), 1, bits)
