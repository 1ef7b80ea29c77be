"""Local Langevin steps of FA-LD (Deng et al., Algorithms 1 and 2), for many clients at once."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from blackthorn.randomness import Stream, generator_of
from blackthorn.settings.config import RunConfig
from blackthorn.strategies.langevin import Langevin, step_size
from blackthorn.strategies.local_rule import (
    PRIOR_PRECISION,
    SHARED_FRACTION,
    STEP_SIZE,
    STRONG_CONVEXITY,
    TEMPERATURE,
)
from blackthorn.strategies.shared_noise import shared_noise

from .messages import RoundRequest


@dataclass(frozen=True, eq=False)
class LocalLangevin:
    """A round's local steps of B clients, for `train_clients`.

    Client b has the share ``share[b]`` p_c of the ``total_examples`` n, draws ξ^c from
    ``own_noise[b]`` and shares ξ with all of the same ``shared_seeds[b]`` in this round.
    ``first_step_size`` η of the round's first step; it decays by ``strong_convexity`` m k/12.
    """

    langevin: Langevin
    steps: int
    batch_size: int
    first_step_size: float
    strong_convexity: float
    server_round: int
    total_examples: int
    share: Tensor
    shared_seeds: Sequence[int]
    own_noise: Sequence[np.random.Generator]

    def move(self, params: Tensor, gradients: Tensor, step: int, clients: Sequence[int]) -> None:
        """One step in place on ``params`` [R, d], the rows of ``clients``, positions among the B;
        ``gradients`` [R, d] of their mean losses over the batch."""
        eta = step_size(self.first_step_size, self.strong_convexity, step)
        rho = self.langevin.shared_fraction
        self.langevin.step(
            params,
            self.langevin.energy_gradient(params, gradients, self.total_examples),
            eta,
            self.share[list(clients)].to(params.device),
            self._shared(params, step, clients).to(params.device) if rho > 0 else None,
            self._own(params, clients).to(params.device) if rho < 1 else None,
        )

    def _shared(self, params: Tensor, step: int, clients: Sequence[int]) -> Tensor:
        seeds = [self.shared_seeds[client] for client in clients]
        noise = {
            seed: shared_noise(seed, self.server_round, step, params.shape[1], params.dtype)
            for seed in set(seeds)
        }
        return noise[seeds[0]] if len(noise) == 1 else torch.stack([noise[s] for s in seeds])

    def _own(self, params: Tensor, clients: Sequence[int]) -> Tensor:
        dtype = np.float64 if params.dtype == torch.float64 else np.float32
        rows = np.empty(params.shape, dtype=dtype)
        for row, client in zip(rows, clients, strict=True):
            self.own_noise[client].standard_normal(dtype=dtype, out=row)
        return torch.from_numpy(rows)


def langevin_training(
    config: RunConfig, requests: Sequence[RoundRequest], clients: Sequence[int]
) -> LocalLangevin:
    """The local steps of ``clients`` as the round's rule, the run configuration and their requests
    say.

    Raises ValueError where a request lacks the client's share of the examples.
    """
    for client, request in zip(clients, requests, strict=True):
        if not 0 < request.share <= 1 or request.total_examples < 1:
            raise ValueError(
                f"client {client} was told share = {request.share:g} of {request.total_examples} "
                "examples: fa-ld needs a share above 0, at most 1, of at least 1 example"
            )
    numbers = requests[0].rule.numbers
    return LocalLangevin(
        Langevin(numbers[TEMPERATURE], numbers[SHARED_FRACTION], numbers[PRIOR_PRECISION]),
        steps=config.local_steps,
        batch_size=config.batch_size,
        first_step_size=numbers[STEP_SIZE],
        strong_convexity=numbers.get(STRONG_CONVEXITY, 0.0),
        server_round=requests[0].server_round,
        total_examples=requests[0].total_examples,
        share=torch.tensor([request.share for request in requests], dtype=torch.float64),
        shared_seeds=[request.shared_seed for request in requests],
        own_noise=[
            noise_generator(config.langevin_seed, requests[0].server_round, client)
            for client in clients
        ],
    )


def noise_generator(seed: int, server_round: int, client_id: int) -> np.random.Generator:
    """Generator of a client's own noise: from the operating system's entropy for seed -1."""
    if seed < 0:
        return np.random.Generator(np.random.Philox())
    return generator_of(Stream.LANGEVIN, seed, server_round, client_id)
