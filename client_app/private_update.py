"""What leaves the node, and what a client draws for it: by the round's rule, and private against
the server where that asks for a share of the noise."""

import math
from collections.abc import Sequence

import numpy as np
import torch

from blackthorn.client_app.configured_rule import configured_rule
from blackthorn.client_app.disclosure import PublicRefusal
from blackthorn.client_app.messages import RoundRequest
from blackthorn.randomness import Stream, generator_of
from blackthorn.settings.config import RunConfig
from blackthorn.settings.derived import noise_shares
from blackthorn.strategies.attestation import SentRule
from blackthorn.strategies.bounding import check_float32
from blackthorn.strategies.local_rule import ClientRound, RoundOf
from blackthorn.strategies.noise import (
    Randomness,
    SeededRandomness,
    SystemRandomness,
    client_deviation,
)

BOUND, NOISE_MULTIPLIER, NOISE_SHARES = "bound", "noise-multiplier", "noise-shares"


def noised_models(
    config: RunConfig,
    start: torch.Tensor,
    trained: torch.Tensor,
    requests: Sequence[RoundRequest],
    clients: Sequence[int],
) -> torch.Tensor:
    """Models [B, d] that are sent by the round's rule of those `trained` [B, d] from `start` [d].

    With the share of the noise that the rule asks for: from the operating system's entropy, or from
    the run's seed where `insecure-seeded-noise` says so.

    Raises PublicRefusal, so that nothing is sent, where the server names other shares or less noise
    than the run's configuration, or a rate or bound at which the noise is lost in rounding: with
    less than the local figure counts on, a client does not answer.
    """
    drawn_noise(config, requests[0])
    rule, local_lr = configured_rule(config, requests[0]), requests[0].local_lr
    return rule.on_update(start, trained, local_lr, rounds_of(config, requests, clients))


def drawn_noise(config: RunConfig, request: RoundRequest) -> tuple[float, int]:
    """z of the noise that a client draws a share of, and s, how many there are; (0, 1) without.

    Raises PublicRefusal as `noised_models`.
    """
    numbers = request.rule.numbers
    if NOISE_MULTIPLIER not in numbers:
        return 0.0, 1
    _check_noise(config, request.rule)
    z, shares = numbers[NOISE_MULTIPLIER], int(numbers[NOISE_SHARES])
    deviation = client_deviation(z, numbers[BOUND], shares) * request.local_lr
    try:
        check_float32("the noise that the server asks for", deviation)
    except ValueError as error:
        raise PublicRefusal(str(error)) from None
    return z, shares


def _check_noise(config: RunConfig, rule: SentRule) -> None:
    z, shares = rule.numbers[NOISE_MULTIPLIER], rule.numbers.get(NOISE_SHARES, 0)
    if not 0 < z < math.inf or z < config.noise_multiplier:
        raise PublicRefusal(
            f"the server asks for noise-multiplier = {z:g}: the run's is "
            f"{config.noise_multiplier or 'positive'}"
        )
    if shares != noise_shares(config):
        raise PublicRefusal(
            f"the server names {shares:g} shares of the noise: by the run's configuration there "
            f"are {noise_shares(config)}"
        )


def rounds_of(
    config: RunConfig, requests: Sequence[RoundRequest], clients: Sequence[int]
) -> RoundOf:
    """What the round's rule may know of each of the clients, and draw for it."""

    def round_of(row: int) -> ClientRound:
        request, client = requests[row], clients[row]
        return ClientRound(
            client,
            request.server_round,
            request.told,
            request.memory,
            lambda: noise_generator(config.langevin_seed, request.server_round, client),
            lambda: _randomness(config, request.server_round, client),
            request.kept,
        )

    return round_of


def noise_generator(seed: int, server_round: int, client_id: int) -> np.random.Generator:
    """Generator of a client's own noise: from the operating system's entropy for seed -1."""
    if seed < 0:
        return system_generator()
    return generator_of(Stream.LANGEVIN, seed, server_round, client_id)


def system_generator() -> np.random.Generator:
    """A generator from the operating system's entropy, of noise for which no privacy is claimed."""
    return np.random.Generator(np.random.Philox())


def _randomness(config: RunConfig, server_round: int, client: int) -> Randomness:
    if config.insecure_seeded_noise:
        return SeededRandomness(Stream.CLIENT_NOISE, config.seed, server_round, client)
    return SystemRandomness()
