"""The published systems and the aggregation rules by name, and what is known of each."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

AlgorithmName = Literal[
    "gfedavg",
    "fat-clipping-pr",
    "fat-clipping-pi",
    "ce-fedavg",
    "model-clipping",
    "dp-fedavg",
    "dp-normfedavg",
    "rage",
    "fa-ld",
]
PRIVATE_ALGORITHMS = ("dp-fedavg", "dp-normfedavg")
CLIPPING_ALGORITHMS = (
    *("fat-clipping-pr", "fat-clipping-pi", "ce-fedavg", "model-clipping"),
    *PRIVATE_ALGORITHMS,
)


@dataclass(frozen=True)
class Guarantee:
    """What a rule needs: fewer than `share` of the clients corrupt, and of K rows at most most(K).

    `words` is the share as it is written in messages.
    """

    words: str
    share: float
    most: Callable[[int], int]


THIRD = Guarantee("a third", 1 / 3, lambda rows: (rows - 1) // 3)
HALF = Guarantee("half", 1 / 2, lambda rows: (rows - 1) // 2)
_KRUM = Guarantee("half", 1 / 2, lambda rows: (rows - 3) // 2)
_BULYAN = Guarantee("a quarter", 1 / 4, lambda rows: (rows - 3) // 4)

GUARANTEES = {
    "rage": THIRD,
    "median": HALF,
    "trimmed-mean": HALF,
    "krum": _KRUM,
    "multi-krum": _KRUM,
    "bulyan": _BULYAN,
    "geometric-median": HALF,
    "centered-clipping": HALF,
}
AGGREGATORS = ("auto", "mean", *GUARANTEES)
