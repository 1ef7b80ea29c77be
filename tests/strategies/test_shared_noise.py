"""Noise that every client makes for itself and that must be the same to the last bit."""

import math

import numpy as np
import pytest
import torch
from scipy import special, stats

from blackthorn.strategies.shared_noise import shared_noise, standard_normals

MASK = 2**64 - 1


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x64-10 in Python's integers (Salmon et al., 2011, section 3.3)."""
    c, k = list(counter), list(key)
    for _ in range(10):
        first, second = 0xD2E7470EE14C6C93 * c[0], 0xCA5A826395121157 * c[2]
        c = [
            (second >> 64) ^ c[1] ^ k[0],
            second & MASK,
            (first >> 64) ^ c[3] ^ k[1],
            first & MASK,
        ]
        k = [(k[0] + 0x9E3779B97F4A7C15) & MASK, (k[1] + 0xBB67AE8584CAA73B) & MASK]
    return c


def test_the_oracle_gives_the_published_answers() -> None:
    """From the generator's own list of known answers (Random123)."""
    assert philox([0] * 4, [0] * 2) == [
        0x16554D9ECA36314C,
        0xDB20FE9D672D0FDC,
        0xD7E772CEE186176B,
        0x7E68B68AEC7BA23B,
    ]
    assert philox([MASK] * 4, [MASK] * 2) == [
        0x87B092C3013FE90B,
        0x438C3C67BE8D0224,
        0x9CC7D7C69CD777B6,
        0xA09CAEBF594F0BA0,
    ]


def test_the_integers_are_those_of_the_counter_and_key() -> None:
    seed, server_round, step = 2**62 + 12345, 17, 4
    key = [seed, server_round << 32 | step]
    # The counter's first block is number 1.
    integers = [value for block in (1, 2, 3) for value in philox([block, 0, 0, 0], key)]
    expected = standard_normals(np.array(integers, dtype=np.uint64))
    found = shared_noise(seed, server_round, step, 12, torch.float64)
    assert found.numpy().tobytes() == expected.tobytes()


def test_the_first_numbers_of_a_seed_are_the_known_bits() -> None:
    """Bits of the first numbers, as any other platform has to find them."""
    found = shared_noise(20240229, 3, 1, 6, torch.float64)
    assert [float(value).hex() for value in found] == KNOWN


KNOWN = [
    "0x1.0e40b343f3ecbp+0",
    "0x1.ab1176bcade38p+0",
    "0x1.6eefc31eb6dd1p-2",
    "0x1.1cc04480cdc60p-3",
    "0x1.a27808aa04af9p-8",
    "0x1.d6ea5dbfe3488p-1",
]


def test_normals_are_the_quantiles_of_the_normal_law() -> None:
    generator = np.random.default_rng(0)
    integers = generator.integers(0, 2**64, size=100_000, dtype=np.uint64)
    edges = np.array([0, MASK, 2**63, 2**63 - 1, 1 << 12, 1 << 30, 1 << 50], dtype=np.uint64)
    integers = np.concatenate([integers, edges])
    j = (integers >> np.uint64(12)).astype(np.float64)
    p = (2 * j + 1) * 2.0**-53
    expected = np.where(p < 0.5, special.ndtri(p), -special.ndtri(1 - p))
    np.testing.assert_allclose(standard_normals(integers), expected, rtol=4e-15)


def test_the_largest_is_finite_and_mirrors_the_smallest() -> None:
    low, high = standard_normals(np.array([0, MASK], dtype=np.uint64))
    assert high == -low
    assert 8.2 < high < 8.3


def test_no_mathematical_library_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """exp, log and their kin may differ in the last bit from one platform to the next."""

    def refuse(*_given: object, **_options: object) -> None:
        raise AssertionError("a function of the mathematical library was called")

    for name in ("log", "log1p", "log2", "exp", "expm1", "sin", "cos", "power"):
        monkeypatch.setattr(np, name, refuse)
        if hasattr(math, name):
            monkeypatch.setattr(math, name, refuse)
    assert torch.isfinite(shared_noise(1, 1, 1, 5000, torch.float64)).all()


def test_the_noise_is_standard_normal_and_uncorrelated() -> None:
    sample = shared_noise(9, 2, 5, 200_000, torch.float64).numpy()
    assert stats.kstest(sample, "norm").pvalue > 1e-3
    assert abs(sample.mean()) < 4 / math.sqrt(len(sample))
    assert abs(np.corrcoef(sample[:-1], sample[1:])[0, 1]) < 4 / math.sqrt(len(sample))


def test_seed_round_and_step_all_matter_and_blocks_do_not() -> None:
    base = shared_noise(1, 2, 3, 40_000, torch.float64)
    for other in ((2, 2, 3), (1, 3, 3), (1, 2, 4), (1, 3, 2)):
        correlation = np.corrcoef(base, shared_noise(*other, 40_000, torch.float64))[0, 1]
        assert abs(correlation) < 5 / math.sqrt(40_000)
    assert torch.equal(shared_noise(1, 2, 3, 20_001, torch.float64), base[:20_001])
    assert torch.equal(shared_noise(1, 2, 3, 40_000, torch.float32), base.float())


@pytest.mark.parametrize(
    ("seed", "server_round", "step"), [(-1, 0, 0), (2**63, 0, 0), (0, 2**32, 0), (0, 0, -1)]
)
def test_a_seed_round_or_step_out_of_range_is_refused(
    seed: int, server_round: int, step: int
) -> None:
    with pytest.raises(ValueError, match="is not allowed"):
        shared_noise(seed, server_round, step, 3, torch.float64)
