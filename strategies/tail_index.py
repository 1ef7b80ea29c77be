"""The tail index α of the noise in stochastic updates (FAT-Clipping, Figures 1 and 2)."""

import math
from typing import Any

import numpy as np
import torch

from .bounding import row_norms


def tail_index(samples: Any, block_size: int = 10) -> float:
    """Estimates α of a symmetric α-stable law from independent samples.

    The sum of n1 independent samples is distributed as n1^{1/α} times one of them, so with the
    sums Y_j of n2 consecutive blocks of n1 = block_size samples X_i

        1/α̂ = (1 / ln n1) · [ mean_j ln‖Y_j‖ − mean_i ln‖X_i‖ ].

    The samples are first centred by their coordinate-wise median: an offset would otherwise grow
    as n1 whatever the law, and for α ≤ 1 there is no mean to subtract. Vectors are summed as
    vectors. Give the noise itself, never its norms: norms are positive, their sums grow as n1,
    and the answer is about 1 for every law.

    Args:
        samples: float [n] or [n, d], in any unit and in the order they were drawn; what is left
            over after ⌊n / block_size⌋ blocks is not used. A sample (or sum) that equals the
            centre exactly has no logarithm and is left out.
        block_size: n1 >= 2.

    Returns:
        α̂. Infinity when the sums are not longer than the samples, as no stable law has it.

    Raises:
        ValueError: for block_size < 2, fewer than one block, other shapes, non-finite samples,
            or samples that are all equal.
    """
    growth = inverse_tail_index(samples, block_size)
    return 1 / growth if growth > 0 else math.inf


def inverse_tail_index(samples: Any, block_size: int = 10) -> float:
    """1/α̂ of `tail_index`, which unlike α̂ may be averaged over several sets of samples.

    Takes and raises what `tail_index` does. The answer is 0 or less when the sums are not longer
    than the samples.
    """
    values = _checked(samples, block_size)
    blocks = len(values) // block_size
    values = values[: blocks * block_size]
    values = values - np.median(values, axis=0)
    sums = values.reshape(blocks, block_size, -1).sum(axis=1)
    return (_mean_log_norm(sums) - _mean_log_norm(values)) / math.log(block_size)


def _mean_log_norm(vectors: np.ndarray) -> float:
    norms = row_norms(torch.from_numpy(vectors)).numpy()
    norms = norms[norms > 0]
    if norms.size == 0:
        raise ValueError("samples must vary: they, or all their block sums, equal their median")
    return float(np.log(norms).mean())


def _checked(samples: Any, block_size: int) -> np.ndarray:
    if block_size < 2:
        raise ValueError(f"block_size must be at least 2: got {block_size}")
    values = torch.as_tensor(samples, dtype=torch.float64).detach().numpy()
    if values.ndim not in (1, 2) or values.shape[-1] == 0:
        raise ValueError(f"samples must have the shape [n] or [n, d]: got {list(values.shape)}")
    if len(values) < block_size:
        raise ValueError(f"samples must fill one block of {block_size}: got {len(values)}")
    if not np.isfinite(values).all():
        raise ValueError("samples must be finite: got NaN or infinity")
    return values if values.ndim == 2 else values[:, None]
