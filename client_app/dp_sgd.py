"""Sample-level privacy on a client: DP-SGD by Opacus' PrivacyEngine in place of plain SGD.

Every example's gradient is clipped, the sum is noised, batches are Poisson samples. The guarantee
is each client's own, for its own examples, against everybody, the server included.
"""

import copy
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from server_app.config import RunConfig
from strategies.accounting import Figure, Release, spent
from tasks.flat_model import FlatModel
from tasks.shards import ExampleShard, Shard


@dataclass(frozen=True)
class DPSGD:
    """K noisy steps: w ← w − η_l (1/B) [ Σ clip(∇l_j, C) + N(0, (z C)² I) ] − η_l decay · w.

    ``batch_size`` B is the expected size of a batch (0: all examples). Raises ValueError for
    values out of range.
    """

    steps: int
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

    def sample_rate(self, num_examples: int) -> float:
        """The probability with which an example is in a batch: 1/⌈n/B⌉, as Opacus samples."""
        size = self.batch_size or num_examples
        return 1 / -(-num_examples // min(size, num_examples))

    def figure(self, num_examples: int, rounds: int, delta: float) -> Figure:
        """ε at δ for one example of `num_examples` after `rounds` rounds of K steps."""
        release = Release(self.noise_multiplier, sample_rate=self.sample_rate(num_examples))
        return spent([(release, rounds * self.steps)], delta, "rdp")


def train_dp_sgd(
    model: FlatModel,
    start: Tensor,
    shard: Shard,
    spec: DPSGD,
    seed: np.random.Generator | None = None,
) -> tuple[Tensor, float]:
    """The model [d] after K steps from ``start`` [d], and the mean of the batches' losses.

    Batches and noise come from the operating system's entropy, or, for tests, from ``seed``.
    Raises ValueError for a shard without an end and for a model that Opacus cannot take apart
    into examples.
    """
    from opacus import PrivacyEngine

    if not isinstance(shard, ExampleShard):
        raise ValueError("local-dp-sgd needs clients with examples of their own")
    generators = [_generator(seed), _generator(seed)]
    examples = shard.examples
    x = examples.x.to(start.dtype) if examples.x.is_floating_point() else examples.x
    module = _loaded(model, start)
    _check_module(module)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(
        module.parameters(), lr=spec.learning_rate, weight_decay=spec.weight_decay
    )
    size = min(spec.batch_size or len(examples), len(examples))
    loader = DataLoader(TensorDataset(x, examples.y), batch_size=size, generator=generators[0])
    with warnings.catch_warnings():
        # That the noise is not from Opacus' own secure generator: it is seeded by the system's.
        warnings.simplefilter("ignore")
        engine = PrivacyEngine(accountant="rdp", secure_mode=False)
        private, optimizer, batches = engine.make_private(
            module=module,
            optimizer=optimizer,
            data_loader=loader,
            noise_multiplier=spec.noise_multiplier,
            max_grad_norm=spec.clip_norm,
            noise_generator=generators[1],
        )
        losses = _descend(model, private, optimizer, batches, spec.steps)
    _check_history(engine, spec, len(examples))
    state = {name: p.detach() for name, p in private._module.named_parameters()}
    return model.flatten(state).to(start.dtype), losses


def _descend(
    model: FlatModel,
    private: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: DataLoader,
    steps: int,
) -> float:
    total, done = 0.0, 0
    while done < steps:
        for x, y in batches:
            if done == steps:
                break
            optimizer.zero_grad()
            losses = model.example_loss(private(x), y)
            # An empty batch has no loss, but its noise is added all the same.
            losses.sum().div(max(1, len(y))).backward()
            optimizer.step()
            total += float(losses.detach().mean()) if len(y) else 0.0
            done += 1
    return total / steps


def _loaded(model: FlatModel, start: Tensor) -> torch.nn.Module:
    module = copy.deepcopy(model.module).to(start.dtype)
    own = dict(module.named_parameters())
    with torch.no_grad():
        for name, view in model.unflatten(start).items():
            own[name].copy_(view)
    return module.train()


def _check_module(module: torch.nn.Module) -> None:
    from opacus.validators import ModuleValidator

    problems = ModuleValidator.validate(module, strict=False)
    if problems:
        reason = " ".join(str(problems[0]).split())[:200]
        raise ValueError(f"local-dp-sgd is impossible with this model: {reason}")


def _check_history(engine: object, spec: DPSGD, num_examples: int) -> None:
    """What Opacus did must be what the client is charged."""
    expected = [(spec.noise_multiplier, spec.sample_rate(num_examples), spec.steps)]
    history = engine.accountant.history  # type: ignore[attr-defined]
    if history != expected:
        raise RuntimeError(f"Opacus accounted for {history}, not for {expected}")


def _generator(seed: np.random.Generator | None) -> torch.Generator:
    entropy = int.from_bytes(os.urandom(8)) if seed is None else int(seed.integers(2**63))
    return torch.Generator().manual_seed(entropy % 2**63)


def dp_sgd_of(config: RunConfig, local_lr: float) -> DPSGD:
    """A round's DP-SGD as the run configuration says, at the server's learning rate."""
    return DPSGD(
        steps=config.local_steps,
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
    generators: Sequence[np.random.Generator],
) -> tuple[Tensor, Tensor]:
    """As train_clients, by DP-SGD; the generators count only with insecure-seeded-noise."""
    spec = dp_sgd_of(config, local_lr)
    starts = start.expand(len(shards), start.shape[-1])
    params, losses = torch.empty_like(starts), start.new_empty(len(shards))
    for i, (shard, generator) in enumerate(zip(shards, generators, strict=True)):
        seed = generator if config.insecure_seeded_noise else None
        params[i], losses[i] = train_dp_sgd(model, starts[i], shard, spec, seed)
    return params, losses


def sample_epsilon(config: RunConfig, shard: Shard, rounds: int) -> float | None:
    """What one of a client's examples has spent after `rounds` rounds; None without DP-SGD, and
    where a seed makes its noise known."""
    if not config.local_dp_sgd or config.insecure_seeded_noise:
        return None
    spec = dp_sgd_of(config, config.local_lr)
    return spec.figure(shard.num_examples, rounds, config.delta).epsilon
