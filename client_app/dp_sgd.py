"""Sample-level privacy on a client: DP-SGD in place of plain SGD.

Every example's gradient is clipped, the sum is noised, batches are Poisson samples. The guarantee
is each client's own, for its own examples, against everybody, the server included; so nothing
that it rests on follows them: the rate of the batches and what a sum is divided by are the
configuration's, and batches and noise come from the operating system's entropy.
"""

import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from blackthorn.randomness import Stream
from blackthorn.settings.config import RunConfig
from blackthorn.settings.privacy_checks import claims_sample_privacy
from blackthorn.strategies.accounting import Charge, Figure, Release, spent
from blackthorn.strategies.bounding import check_float32, clip
from blackthorn.strategies.noise import (
    Randomness,
    SeededRandomness,
    SystemRandomness,
    gaussian_noise,
    on_grid,
)
from blackthorn.strategies.screening import one_line
from blackthorn.tasks.datasets import Examples
from blackthorn.tasks.flat_model import FlatModel
from blackthorn.tasks.global_generators import global_generators_kept, seed_global_generators
from blackthorn.tasks.shards import ExampleShard, Shard

from .disclosure import PublicRefusal

logger = logging.getLogger("blackthorn.clients")


@dataclass(frozen=True)
class DPSGD:
    """K steps w ← w − η_l (1/B) [ Σ_{j ∈ batch} clip(∇l_j(w), C) + N(0, (z C)² I) ] − η_l decay w
    (Abadi et al., arXiv 1607.00133, Algorithm 1, with a denominator that is fixed).

    Each example is in a step's batch with probability ``sample_rate`` q, on its own. q, B
    (``batch_size``, the batch that is expected), z and C are public and the same for every client,
    so that with neighbours that differ in one example that is there or not the sum moves by at
    most C, and by nothing else. Raises ValueError for values out of range.
    """

    steps: int
    sample_rate: float
    batch_size: int
    learning_rate: float
    weight_decay: float
    noise_multiplier: float
    clip_norm: float

    def __post_init__(self) -> None:
        if not self.noise_multiplier > 0 or not self.clip_norm > 0:
            raise ValueError(
                f"dp-sgd-noise-multiplier = {self.noise_multiplier} with dp-sgd-clip-norm = "
                f"{self.clip_norm} is not allowed: greater than 0 both"
            )
        if not 0 < self.sample_rate <= 1 or self.batch_size < 1:
            raise ValueError(
                f"dp-sgd-sample-rate = {self.sample_rate} with batch-size = {self.batch_size} is "
                "not allowed: a rate above 0, at most 1, and a batch of at least 1"
            )
        check_float32("dp-sgd-clip-norm", self.clip_norm)
        check_float32("the deviation of DP-SGD's noise", self.noise_multiplier * self.clip_norm)
        check_float32("local-lr", self.learning_rate)

    def charge(self, rounds: int = 1) -> Charge:
        """What one example, there or not, is charged for `rounds` rounds of K steps."""
        release = Release(self.noise_multiplier, sample_rate=self.sample_rate)
        return release, rounds * self.steps

    def figure(self, rounds: int, delta: float) -> Figure:
        """ε at δ of `charge(rounds)`."""
        return spent([self.charge(rounds)], delta, "rdp")


def train_dp_sgd(
    model: FlatModel, start: Tensor, shard: Shard, spec: DPSGD, randomness: Randomness
) -> tuple[Tensor, float]:
    """The model [d] after K steps from ``start`` [d], in its dtype, and the mean of the batches'
    mean losses.

    Sums, noise and steps are in float64, since a noise that is rounded beside a sum, or a step
    beside w, is not the noise that is charged; gradients are taken in the dtype of ``start``. Each
    example has its gradient alone, bit for bit the same whatever else is in the batch: what a
    model draws in ``forward`` is the same for all examples of a step, and it remembers none.

    Raises ValueError for a shard without an end, and PublicRefusal where the model has no gradient.
    """
    if not isinstance(shard, ExampleShard):
        raise ValueError("local-dp-sgd needs clients with examples of their own")
    examples, w, total_loss = shard.examples, start.double(), 0.0
    _check_gradient(model, start, examples)
    for _ in range(spec.steps):
        drawn = np.flatnonzero(randomness.uniform(len(examples)) < spec.sample_rate)
        batch, seed = examples.select(drawn), secrets.randbits(32)
        summed, loss = _clipped_sum(model, w.to(start.dtype), batch, spec, seed)
        deviation = spec.noise_multiplier * spec.clip_norm
        summed += gaussian_noise((len(w),), deviation, randomness, torch.float64)
        summed = on_grid(summed, deviation)
        w = w - spec.learning_rate * (summed / spec.batch_size + spec.weight_decay * w)
        total_loss += loss
    return w.to(start.dtype), total_loss / spec.steps


def _check_gradient(model: FlatModel, params: Tensor, examples: Examples) -> None:
    """Raises PublicRefusal where the model has no gradient at a blank example, whatever examples
    there are: found in a batch, it would tell that the batch is not empty."""
    blank = Examples(
        examples.x.new_zeros(1, *examples.x.shape[1:]),
        examples.y.new_zeros(1, *examples.y.shape[1:]),
    )
    try:
        _gradient(model, params, blank)
    except Exception as error:
        raise PublicRefusal(f"the model has no gradient: {one_line(str(error))}") from error


def _gradient(model: FlatModel, params: Tensor, example: Examples) -> tuple[Tensor, Tensor]:
    """Loss [1] and its gradient [1, d] of one example."""
    weight = params.new_ones(1, 1)
    return model.forgetting().loss_and_gradient(
        params[None], example.x[None], example.y[None], weight
    )


def _clipped_sum(
    model: FlatModel, params: Tensor, batch: Examples, spec: DPSGD, seed: int
) -> tuple[Tensor, float]:
    """Σ_j clip(∇l_j, C), float64 [d], and the mean loss; 0 both for an empty batch.

    One example after the other, each copied to memory of its own: how many others there are, or
    its place among them, may have the processor take another order of the same sums, and where a
    model is made so that they cancel, an example that is there or not would turn the gradients of
    all others round. For the same reason every example finds the global generators at ``seed``, and
    the model as if it were the first. A gradient that is not finite counts as 0: as NaN it would
    end in the model that is sent. So does one that cannot be taken: a client that did not answer
    would tell that the example is there.
    """
    summed = torch.zeros(len(params), dtype=torch.float64)
    total_loss = 0.0
    with global_generators_kept():
        for j in range(len(batch)):
            seed_global_generators(seed)
            try:
                loss, gradient = _gradient(model, params, batch.select(np.array([j])))
            except Exception as error:
                reason = one_line(str(error))
                logger.warning("an example has no gradient and counts as 0: %s", reason)
                continue
            summed += clip(gradient.double(), spec.clip_norm)[0].nan_to_num_(nan=0.0)
            total_loss += float(loss)
    return summed, total_loss / max(1, len(batch))


def dp_sgd_of(config: RunConfig, local_lr: float) -> DPSGD:
    """A round's DP-SGD as the run configuration says, at the server's learning rate."""
    return DPSGD(
        steps=config.local_steps,
        sample_rate=config.dp_sgd_sample_rate,
        batch_size=config.batch_size,
        learning_rate=local_lr,
        weight_decay=config.weight_decay,
        noise_multiplier=config.dp_sgd_noise_multiplier,
        clip_norm=config.dp_sgd_clip_norm,
    )


def train_clients_privately(
    config: RunConfig,
    model: FlatModel,
    start: Tensor,
    shards: Sequence[Shard],
    local_lr: float,
    keys: Sequence[tuple[int, int, int]],
) -> tuple[Tensor, Tensor]:
    """As train_clients, by DP-SGD: batches and noise from the operating system's entropy, or from
    each client's key (seed, round, client) with insecure-seeded-noise."""
    spec = dp_sgd_of(config, local_lr)
    starts = start.expand(len(shards), start.shape[-1])
    params, losses = torch.empty_like(starts), start.new_empty(len(shards))
    for i, (shard, key) in enumerate(zip(shards, keys, strict=True)):
        randomness = _randomness(config, key)
        params[i], losses[i] = train_dp_sgd(model, starts[i], shard, spec, randomness)
    return params, losses


def _randomness(config: RunConfig, key: tuple[int, int, int]) -> Randomness:
    if config.insecure_seeded_noise:
        return SeededRandomness(Stream.DP_SGD, *key)
    return SystemRandomness()


def sample_epsilon(config: RunConfig, rounds: int) -> float | None:
    """What one of a client's examples has spent after `rounds` rounds; None where nothing is
    claimed for it. It is the same whatever the client has."""
    if not claims_sample_privacy(config):
        return None
    return dp_sgd_of(config, config.local_lr).figure(rounds, config.delta).epsilon
