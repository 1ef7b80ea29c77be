"""The client's share of the noise: what leaves the node is already private against the server."""

import math
from collections.abc import Sequence

import torch

from client_app.disclosure import PublicRefusal
from client_app.messages import RoundRequest
from server_app.config import RunConfig, clip_units
from server_app.privacy_checks import is_noised
from strategies.entropy import Randomness, SeededRandomness, SystemRandomness
from strategies.noise import client_deviation, gaussian_noise
from strategies.privacy_plan import largest_poisson_cohort
from strategies.update_clipping import ClipNorm

_NOISE_STREAM = 0x6E01


def noised_models(
    config: RunConfig, bounded: torch.Tensor, request: RoundRequest, clients: Sequence[int]
) -> torch.Tensor:
    """Models [B, d] of bounded updates, with N(0, (η_l z C)²/s I) added to each.

    In gradient units every g_i gets N(0, (z C)²/s I), s the number of clients invited; the same
    rows come back where the server draws the noise. From the operating system's entropy, or from
    the run's seed where `insecure-seeded-noise` says so.

    Raises PublicRefusal, so that nothing is sent, where the server names more clients or less noise
    than the run's configuration allows: with less than the local figure counts on, a client does
    not answer.
    """
    if not is_noised(config) or config.noise_location == "server":
        return bounded
    _check_request(config, request)
    bound = ClipNorm(config.clip_norm, clip_units(config)).in_gradient_units(request.local_lr)
    deviation = client_deviation(request.noise_multiplier, bound, request.num_invited)
    noised = bounded.clone()
    for row, client in zip(noised, clients, strict=True):
        noise = gaussian_noise(
            tuple(row.shape),
            deviation * request.local_lr,
            _randomness(config, request.server_round, client),
            torch.float64,
        )
        row.copy_(row.double() + noise)
    return noised


def _check_request(config: RunConfig, request: RoundRequest) -> None:
    z = config.noise_multiplier
    if not 0 < request.noise_multiplier < math.inf or request.noise_multiplier < z:
        raise PublicRefusal(
            f"the server asks for noise-multiplier = {request.noise_multiplier:g}: the run's is "
            f"{z or 'positive'}"
        )
    most = _largest_cohort(config)
    if request.num_invited > most:
        raise PublicRefusal(
            f"the server names {request.num_invited} clients in the round: the local guarantee "
            f"counts on at most {most}"
        )


def _largest_cohort(config: RunConfig) -> int:
    if config.participation == "fixed":
        return config.clients_per_round
    if config.participation == "full":
        return config.num_clients
    return largest_poisson_cohort(
        config.num_clients, config.sample_rate, config.num_server_rounds, config.delta / 2
    )


def _randomness(config: RunConfig, server_round: int, client: int) -> Randomness:
    if config.insecure_seeded_noise:
        return SeededRandomness(config.seed, server_round, client, _NOISE_STREAM)
    return SystemRandomness()
