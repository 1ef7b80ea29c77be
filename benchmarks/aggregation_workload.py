"""The updates on which aggregation rules are timed and counted, and our rules on them."""

from collections.abc import Callable

import numpy as np
import torch

from blackthorn.strategies import aggregation

Call = Callable[[], object]


def draw_updates(num_rows: int, dimension: int, num_corrupt: int) -> np.ndarray:
    """Gaussian rows [K, d], float32, about a common vector; the first shifted by 50 N(0, I)."""
    generator = np.random.default_rng(0)
    updates = generator.standard_normal((num_rows, dimension), dtype=np.float32)
    updates += 0.5 * generator.standard_normal(dimension, dtype=np.float32)
    updates[:num_corrupt] += 50 * generator.standard_normal(dimension, dtype=np.float32)
    return updates


def our_rules(updates: np.ndarray, num_corrupt: int) -> dict[str, Call]:
    """Calls of our rules on `updates` [K, d], by the names in docs/performance.md."""
    tensor, b = torch.from_numpy(updates), num_corrupt
    honest = tensor[b:]
    assumed = min(b, (len(honest) - 1) // 3)
    return {
        "mean": lambda: aggregation.mean(tensor),
        "RAGE": lambda: aggregation.rage(tensor, b),
        "RAGE, nobody corrupt": lambda: aggregation.rage(honest, assumed),
        "Krum": lambda: aggregation.krum(tensor, b),
        "Multi-Krum": lambda: aggregation.multi_krum(tensor, b),
        "Bulyan": lambda: aggregation.bulyan(tensor, b),
        "median": lambda: aggregation.coordinate_median(tensor),
        "trimmed mean": lambda: aggregation.trimmed_mean(tensor, b),
    }
