"""The global random generators, from which only models of one's own draw, in `forward`."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def global_generators_kept(device: torch.device | None = None) -> Iterator[None]:
    """Afterwards they are as they were, whatever a model has drawn; PyTorch's also on `device`,
    where that is no CPU."""
    ours, numpys = random.getstate(), np.random.get_state()  # noqa: NPY002
    others = [device] if device is not None and device.type != "cpu" else []
    try:
        with torch.random.fork_rng(devices=others):
            yield
    finally:
        random.setstate(ours)
        np.random.set_state(numpys)  # noqa: NPY002


def seed_global_generators(seed: int, device: torch.device | None = None) -> None:
    """What a model of one's own draws from; `seed` is below 2^32."""
    torch.default_generator.manual_seed(seed)  # a hundredth of the time of torch.manual_seed
    if device is not None and device.type != "cpu":
        torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    random.seed(seed)
