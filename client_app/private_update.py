"""The client's share of the noise: what leaves the node is already private against the server."""

import math
from collections.abc import Sequence

import torch

from blackthorn.client_app.bounding import bounded_models, bounded_update
from blackthorn.client_app.disclosure import PublicRefusal
from blackthorn.client_app.messages import RoundRequest
from blackthorn.randomness import Stream
from blackthorn.settings.config import RunConfig
from blackthorn.settings.derived import noise_shares
from blackthorn.strategies.entropy import Randomness, SeededRandomness, SystemRandomness
from blackthorn.strategies.local_rule import BOUND, NOISE_MULTIPLIER, NOISE_SHARES, LocalRule
from blackthorn.strategies.noise import client_deviation, gaussian_noise, on_grid
from blackthorn.strategies.update_clipping import check_float32


def noised_models(
    config: RunConfig,
    start: torch.Tensor,
    trained: torch.Tensor,
    request: RoundRequest,
    clients: Sequence[int],
) -> torch.Tensor:
    """Models [B, d] with the bounded updates of `trained` [B, d] from `start` [d], and noise.

    By the round's rule: every g_i gets N(0, (z C)²/s I) in gradient units, one of s shares. From
    the operating system's entropy, or from the run's seed where `insecure-seeded-noise` says so.
    Without noise in the rule, just as `bounded_models`.

    Update and noise are added in float64 and rounded to the model's dtype with it, once: what is
    rounded before the noise could be moved by more than C by a server whose model is large. An
    update that is not finite counts as 0, since NaN would pass through any noise. Their sum is
    `on_grid`.

    Raises PublicRefusal, so that nothing is sent, where the server names other shares or less noise
    than the run's configuration, or a rate or bound at which the noise is lost in rounding: with
    less than the local figure counts on, a client does not answer.
    """
    z, _ = drawn_noise(config, request)
    if z == 0:
        return bounded_models(request.rule, start, trained, request.local_lr)
    deviation = _deviation(request)
    origin, noised = start.double(), torch.empty_like(trained)
    for row, model, client in zip(noised, trained, clients, strict=True):
        update = bounded_update(request.rule, origin, model.double(), request.local_lr)
        randomness = _randomness(config, request.server_round, client)
        noise = gaussian_noise(tuple(row.shape), deviation, randomness, torch.float64)
        finite = bool(torch.isfinite(update).all())
        row.copy_(origin - on_grid(update + noise if finite else noise, deviation))
    return noised


def drawn_noise(config: RunConfig, request: RoundRequest) -> tuple[float, int]:
    """z of the noise that a client draws a share of, and s, how many there are; (0, 1) without.

    Raises PublicRefusal as `noised_models`.
    """
    rule = request.rule
    if NOISE_MULTIPLIER not in rule.numbers:
        return 0.0, 1
    _check_noise(config, rule)
    try:
        check_float32("the noise that the server asks for", _deviation(request))
    except ValueError as error:
        raise PublicRefusal(str(error)) from None
    return rule.numbers[NOISE_MULTIPLIER], int(rule.numbers[NOISE_SHARES])


def _deviation(request: RoundRequest) -> float:
    """η_l z C/√s: of a client's share, in the units of the model."""
    numbers = request.rule.numbers
    z, shares = numbers[NOISE_MULTIPLIER], int(numbers[NOISE_SHARES])
    deviation = client_deviation(z, request.rule.numbers[BOUND], shares)
    return deviation * request.local_lr


def _check_noise(config: RunConfig, rule: LocalRule) -> None:
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


def _randomness(config: RunConfig, server_round: int, client: int) -> Randomness:
    if config.insecure_seeded_noise:
        return SeededRandomness(Stream.CLIENT_NOISE, config.seed, server_round, client)
    return SystemRandomness()
