"""Every stream of random numbers is named once, and none can be another."""

import ast
import itertools
from pathlib import Path

import numpy as np
import pytest

from blackthorn.randomness import Stream, generator_of

LARGEST = 2**64 - 1


def key(stream: Stream, seed: int, *numbers: int) -> tuple[int, ...]:
    bits = generator_of(stream, seed, *numbers).bit_generator
    return tuple(int(word) for word in bits.state["state"]["key"])


def test_no_two_streams_seeds_rounds_or_clients_share_a_key() -> None:
    """Also where a number is another's stream: client 0xB42 had the colluders' numbers once."""
    numbers = [0, 1, 2, 0xB42, *map(int, Stream), 2**31, 2**32, 2**32 + 1, LARGEST]
    keys = set()
    for stream, seed in itertools.product(Stream, (0, 1, 2**32, LARGEST)):
        for server_round in numbers:
            keys.add(key(stream, seed, server_round))
            keys.update(key(stream, seed, server_round, client) for client in numbers[:9])
    assert len(keys) == len(Stream) * 4 * len(set(numbers)) * (1 + len(set(numbers[:9])))


def test_a_stream_is_what_its_docstring_says() -> None:
    """Philox, keyed through SeedSequence; every number in two words."""
    sequence = np.random.SeedSequence(7, spawn_key=(1, 3, 0, 5, 1))
    expected = np.random.Generator(np.random.Philox(sequence)).random(4)
    found = generator_of(Stream.BATCHES, 7, 3, 2**32 + 5).random(4)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("number", [-1, LARGEST + 1])
def test_a_number_that_a_key_cannot_hold_is_refused(number: int) -> None:
    with pytest.raises(ValueError, match=f"{number} is not allowed"):
        generator_of(Stream.BATCHES, 0, number)


def test_every_stream_is_used_in_one_place_of_the_product(repository: Path) -> None:
    """Who drew from one in two places would draw the same numbers twice."""
    used = []
    packages = ("attacks", "client_app", "recording", "reporting", "server_app", "strategies")
    for package in (*packages, "simulation", "tasks"):
        for path in (repository / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                    used += [node.attr] if node.value.id == "Stream" else []
    # Of two strategies that draw a cohort a run has one; what corrupt clients draw is drawn in the
    # simulation and in a client's own process.
    twice = {"PARTICIPATION", "COLLUDERS", "COLLUDER"}
    assert sorted(used) == sorted([stream.name for stream in Stream] + sorted(twice))
