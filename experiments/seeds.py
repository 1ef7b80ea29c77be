"""Blocks of seeds that one cell measures together."""


def blocks(num_seeds: int, size: int) -> list[tuple[int, int]]:
    """0 .. num_seeds − 1 as (first, past the last) of at most `size` seeds each."""
    return [(start, min(start + size, num_seeds)) for start in range(0, num_seeds, size)]
