"""Every stream of random numbers that is repeatable by a seed, each named once.

A stream's generator is Philox, keyed through NumPy's SeedSequence by (seed; stream, numbers): the
stream's own number stands in the key, and every number after it in two words, so that no two
streams, rounds or clients can share a key. Nothing here is secret: every client is told the seed.
What a privacy claim rests on is `strategies.noise`'s, and the noise that FA-LD's clients share is
`strategies.shared_noise`'s, which every platform has to draw alike.
"""

from enum import IntEnum, unique

import numpy as np

_WORD = 32


@unique
class Stream(IntEnum):
    """Who draws from it, and what follows the seed in its key."""

    # The learner's: client_app, the engine.
    BATCHES = 1  # a client's local batches: round, client
    HELD_OUT = 2  # which of a node's own examples it holds out: client
    LANGEVIN = 3  # FA-LD's noise of a client, with langevin-seed: round, client
    CLIENT_NOISE = 4  # a client's share of the noise, with insecure-seeded-noise: round, client
    DP_SGD = 5  # DP-SGD's batches and noise, with insecure-seeded-noise: round, client
    SECURE_NOISE = 24  # rounding and noise of a masked update, with insecure-seeded-noise: as above
    OWN_MODEL = 19  # what own code draws in the training of a client on its own: round, client
    OWN_DATA = 22  # what own code draws that loads a client's examples: client
    # The server's: strategies, server_app, recording, reporting.
    PARTICIPATION = 6  # the cohort: round
    SEND_ORDER = 7  # in which order a cohort is asked: round
    RULE = 8  # what an aggregator draws: round
    OUTPUT_ITERATE = 9  # the iterate that is handed out
    COUNT_NOISE = 21  # the noise of an adaptive threshold's count, with insecure_seed: round
    GROUPS = 20  # into which groups clients that take turns are dealt
    PRIVATE_PARTICIPATION = 10  # the cohort of a plan with insecure_seed: round
    SERVER_NOISE = 11  # the server's noise of a plan with insecure_seed: round
    SECURE_SESSION = 23  # the name of a session of a plan with insecure_seed: round
    TAIL_INDEX = 12  # the instruments' partition: round
    RESERVOIR = 13  # which posterior sample gives way: number of the sample
    TRACES = 14  # the coordinates that are traced
    # The attackers': attacks.
    COLLUDERS = 15  # what all corrupt clients of a round share: round
    COLLUDER = 16  # what one draws for itself: round, client
    REDRAW = 17  # who is corrupt: round
    ROGUE = 18  # how the rogue behaves: round


def generator_of(stream: Stream, seed: int, *numbers: int) -> np.random.Generator:
    """The stream's generator for a seed and the numbers that it has: the same in every process
    and on every machine, whoever else draws.

    Raises ValueError for a number below 0, or of more than 64 bits.
    """
    words = []
    for number in numbers:
        if not 0 <= number < 2 ** (2 * _WORD):
            raise ValueError(f"{number} is not allowed in a stream's key: 0 to 2^64 - 1")
        words += [number % 2**_WORD, number >> _WORD]
    sequence = np.random.SeedSequence(seed, spawn_key=(int(stream), *words))
    return np.random.Generator(np.random.Philox(sequence))


def partition_generator(seed: int) -> np.random.Generator:
    """Who holds which examples (tasks): PCG64. The data sets of recorded results hang on it."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(0x70617274,)))


def bayes_linear_generator(seed: int) -> np.random.Generator:
    """The rows and targets of the task bayes-linear: Philox. Recorded results hang on it."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, 0xBA7E])))
