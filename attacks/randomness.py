"""The corrupt clients' randomness: counter-based, and apart from that of honest training."""

import numpy as np

_ATTACK = 0xB42
_REDRAW = 0xBAD


def round_generator(seed: int, server_round: int) -> np.random.Generator:
    """What all corrupt clients of a round share: Philox keyed by (seed, round, 0xB42)."""
    return np.random.Generator(
        np.random.Philox(np.random.SeedSequence([seed, server_round, _ATTACK]))
    )


def client_generator(seed: int, server_round: int, client_id: int) -> np.random.Generator:
    """One corrupt client's own stream, for attacks in which each draws for itself."""
    sequence = np.random.SeedSequence([seed, server_round, _ATTACK], spawn_key=(client_id,))
    return np.random.Generator(np.random.Philox(sequence))


def redraw_generator(seed: int, server_round: int) -> np.random.Generator:
    """What decides which clients are corrupt in a round: keyed by (seed, round, 0xBAD)."""
    return np.random.Generator(
        np.random.Philox(np.random.SeedSequence([seed, server_round, _REDRAW]))
    )
