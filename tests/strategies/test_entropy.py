"""Random numbers for claims: their laws, their tails, and that each is the operating system's."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
from scipy import special, stats

from blackthorn.randomness import Stream
from blackthorn.strategies import ClipNorm, PoissonParticipation, PrivacyPlan
from blackthorn.strategies.noise import LARGEST_NORMAL, SeededRandomness, SystemRandomness


def test_the_systems_normal_numbers_are_normal() -> None:
    """A right generator fails once in 10^6 runs at each assertion."""
    drawn = SystemRandomness().normal(200_000)
    assert stats.kstest(drawn, "norm").pvalue > 1e-6
    assert abs(drawn.mean()) * math.sqrt(len(drawn)) < 5
    assert abs((drawn**2).mean() - 1) * math.sqrt(len(drawn) / 2) < 5
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) * math.sqrt(len(drawn)) < 5
    assert len(set(drawn.tolist())) == len(drawn)


def test_the_systems_uniform_numbers_are_uniform() -> None:
    drawn = SystemRandomness().uniform(200_000)
    assert stats.kstest(drawn, "uniform").pvalue > 1e-6
    assert 0 < drawn.min() < drawn.max() < 1


@pytest.mark.parametrize("zeros", [0, 1, 10, 11, 12, 53, 64, 200, 900])
def test_leading_zeros_reach_into_the_tails(zeros: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """After z heads a number is 2^-(z+1) (1 + m/2^52): a normal one has that tail on either side,
    which 53 bits alone would end at 8.3."""
    m = 0x5A5A5_A5A5A5A5
    for sign in (0, 1):
        first = (1 << 63 - zeros | m << 1 | sign) if zeros < 11 else m << 1 | sign
        words = iter([first, *toss_words(zeros - 11)])
        monkeypatch.setattr(
            "blackthorn.strategies.noise.os.urandom",
            lambda n, words=words: b"".join(
                next(words).to_bytes(8, "little") for _ in range(n // 8)
            ),
        )
        u = 2.0 ** -(zeros + 1) * (1 + m / 2**52)
        if sign == 0:
            assert SystemRandomness().uniform(1).tolist() == [u]
        else:
            (x,) = SystemRandomness().normal(1)
            assert math.erfc(x / math.sqrt(2)) == pytest.approx(u, rel=1e-11)
        assert next(words, None) is None


def hand_out(words: Iterator[int], patch: pytest.MonkeyPatch) -> None:
    """The operating system gives one word after the other, one at a time."""
    patch.setattr(
        "blackthorn.strategies.noise.os.urandom", lambda n: next(words).to_bytes(n, "little")
    )


def toss_words(zeros: int) -> list[int]:
    """The words that follow a first one without a tail: 53 tosses each, from the highest bit."""
    if zeros < 0:
        return []
    whole, rest = divmod(zeros, 53)
    return [0] * whole + [1 << 63 - rest]


def test_the_tails_are_mirrors_and_every_word_s_number_is_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of many words some need more tosses; the others' numbers do not hang on those."""
    source = np.random.default_rng(3)
    words = source.integers(0, 2**64, size=20_000, dtype=np.uint64)
    more = source.integers(0, 2**64, size=100, dtype=np.uint64)

    def drawn(own: np.ndarray) -> np.ndarray:
        drawn, taken = np.concatenate([own, more]), 0

        def urandom(size: int) -> bytes:
            nonlocal taken
            taken += size // 8
            return drawn[taken - size // 8 : taken].tobytes()

        monkeypatch.setattr("blackthorn.strategies.noise.os.urandom", urandom)
        return SystemRandomness().normal(len(own))

    one = drawn(words)
    assert np.array_equal(drawn(words ^ np.uint64(1)), -one)
    # Who tosses on is in the order of the words.
    long = words >> np.uint64(53) == 0
    assert 0 < long.sum() < 100
    assert np.array_equal(drawn(words[~long]), one[~long])
    assert np.abs(one[long]).min() > 3.4
    assert np.abs(one[~long]).max() < 3.5


def test_a_rate_below_all_53_bits_is_met(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of multiples of 2^-53 zero alone is below 1e-18, a hundred times too often."""
    # 11 heads, then 48: 2^-60 is below 1e-18, and so is all that follows; 2^-59 is not.
    for tossed, joins in ((48, True), (47, False)):
        words = iter([0, 1 << 63 - tossed])
        monkeypatch.setattr(
            "blackthorn.strategies.noise.os.urandom",
            lambda n, words=words: next(words).to_bytes(n, "little"),
        )
        sampler = PoissonParticipation(1e-18)
        chosen = PrivacyPlan(ClipNorm(1.0), 1.0, num_clients=1, rounds=1, participation=sampler)
        assert chosen.draw([7], SystemRandomness()).clients == ([7] if joins else [])


def test_the_tails_end_at_the_smallest_fraction() -> None:
    assert pytest.approx(-special.ndtri(2.0**-967), rel=1e-15) == LARGEST_NORMAL


def test_extreme_words_give_finite_normal_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    for byte in (b"\x00", b"\xff"):
        monkeypatch.setattr("blackthorn.strategies.noise.os.urandom", lambda n, byte=byte: byte * n)
        drawn = SystemRandomness().normal(3)
        assert np.isfinite(drawn).all()
        assert np.abs(drawn).max() <= LARGEST_NORMAL
        assert 0 < SystemRandomness().uniform(1)[0] < 1


def test_two_calls_never_repeat_and_a_seed_always_does() -> None:
    assert not np.array_equal(SystemRandomness().normal(9), SystemRandomness().normal(9))
    one, again, other = (SeededRandomness(Stream.SERVER_NOISE, 3, t).normal(9) for t in (1, 1, 2))
    assert np.array_equal(one, again)
    assert not np.array_equal(one, other)
